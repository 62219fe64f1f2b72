"""A device's own operators: timed once, kept, within time and memory; what the trainer makes of what it is told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p import estimator
from fusion_p2p.estimator import kept_tables, load_table
from fusion_p2p.planner import AtomTimes
from fusion_p2p.planner.network import Device
from fusion_p2p.workload import atoms
from peer.cli_peer import SLOWEST, _operator_lines
from peer.offers import DeviceOffer, SwarmLinks, network_of, shape_of_atoms
from peer.op_times import shape_of
from peer.placement import PlanRequest, make_plan
from peer.protocol import MAX_ATOMS, Accepted, AtomSeconds, ToTrainer
from tests.unit.stage_models import gpt2
from tests.unit.test_estimator import Ticks
from tests.unit.test_placement import BASE
from tests.unit.test_placement import atoms as chain_of
from tests.unit.test_planner_plan import blocks


def test_a_second_offer_times_nothing_again_and_a_short_one_goes_on(tmp_path: Path) -> None:
    dag, calls = gpt2().captured.opdag, list[str]()
    honest = estimator._time

    def counted(node: object, *rest: object) -> object:
        calls.append("")
        return honest(node, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator, "_time", counted)
        assert shape_of(dag, 2, tmp_path, 0.005, clock=Ticks()) is None  # time for a few only
        first = len(calls)
        whole = shape_of(dag, 2, tmp_path, 1e9, clock=Ticks())
        assert 0 < first < len(calls) and whole is not None and len(whole.forward_s) == len(atoms(dag, 2))
        done = len(calls)
        again = shape_of(dag, 2, tmp_path, 1e9, clock=Ticks())
        assert len(calls) == done and again is not None
    assert np.array_equal(again.forward_s, whole.forward_s)
    [table] = kept_tables(tmp_path, "cpu", load_table(tmp_path, "cpu").hardware or _hardware(tmp_path))
    assert len(table.times) == done and all(t.what.startswith("aten.") for t in table.times.values())
    assert load_table(tmp_path, "cpu", "another machine").times == {}


def _hardware(folder: Path) -> str:
    [path] = folder.glob("ops-cpu-*.json")
    return str(msgspec.json.decode(path.read_bytes())["hardware"])


def test_what_does_not_fit_in_memory_is_not_timed(tmp_path: Path) -> None:
    dag = gpt2().captured.opdag
    assert shape_of(dag, 2, tmp_path, 1e9, most_bytes=0, clock=Ticks()) is None
    assert not list(tmp_path.iterdir())
    assert shape_of(dag, 2, tmp_path, 1e9, most_bytes=1 << 30, clock=Ticks()) is not None


def test_a_full_table_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(estimator, "MAX_ENTRIES", 3)
    assert shape_of(gpt2().captured.opdag, 2, tmp_path, 1e9, clock=Ticks()) is None
    [table] = kept_tables(tmp_path, "cpu", _hardware(tmp_path))
    assert len(table.times) == 3


def test_a_shape_divides_what_the_record_promises_and_corrections_count() -> None:
    w, device = blocks(4), Device(peer="p", flops_per_s=1e12, memory_bytes_per_s=1e12, memory_bytes=1e9)
    plain = device.atom_times(w)
    promised = float(plain.forward_s.sum() + plain.backward_s.sum())
    shape = AtomTimes(forward_s=np.array([4.0, 1, 1, 0]), backward_s=np.array([2.0, 1, 1, 2]))
    own = replace(device, shape=shape, correction=3.0).atom_times(w)
    assert float(own.forward_s.sum() + own.backward_s.sum()) == pytest.approx(3 * promised)
    assert own.forward_s[0] / own.forward_s[1] == pytest.approx(4) and own.forward_s[3] == 0
    heavy = replace(device, shape=shape).atom_times(replace(w, heavier=np.array([1.0, 2, 1, 1])))
    assert heavy.forward_s[1] == pytest.approx(2 * own.forward_s[1] / 3)


def test_devices_of_other_proportions_get_other_pieces() -> None:
    """Two devices equally fast by their records; on one the last atoms take most of its time."""
    costs = chain_of(*[1.0] * 8)
    late = AtomTimes(forward_s=np.array([1.0] * 4 + [9.0] * 4), backward_s=np.zeros(8))
    offers = [DeviceOffer(peer=f"peer{k}", flops_per_s=1.0, memory_bytes=1 << 40, machine="here") for k in range(2)]
    assert make_plan(costs, offers, PlanRequest(base=BASE, every_device=True)).numerics.cuts == (4,)
    offers[1] = replace(offers[1], shape=late)
    plan = make_plan(costs, offers, PlanRequest(base=BASE, every_device=True))
    assert plan.host(0).peer == "peer1" and plan.numerics.cuts[0] > 4


def test_a_device_without_a_trial_step_counts_only_where_the_plan_is_tried() -> None:
    offers = [DeviceOffer(peer=f"peer{k}", flops_per_s=1.0, memory_bytes=1 << 40) for k in range(2)]
    offers[0] = replace(offers[0], confirmed=True)
    assert [d.confirmed for d in network_of(offers, SwarmLinks()).devices] == [True, True]
    assert [d.confirmed for d in network_of(offers, SwarmLinks(), canary=False).devices] == [True, False]


numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=5))
def test_whatever_a_volunteer_says_of_its_atoms_is_usable_or_nothing(pairs: list[tuple[float, float]]) -> None:
    """What cannot be a time does not pass the decoder; what passes is finite, whole and of the model's length."""
    said = Accepted(run="r", stage=0, incarnation=0, endpoint="e", memory_bytes=0)
    raw = msgspec.to_builtins(said) | {"atoms": [list(p) for p in pairs]}
    try:
        heard = msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=ToTrainer)
    except msgspec.ValidationError:
        assert any(not (0 <= x <= 1e9) for p in pairs for x in p)
        return
    assert isinstance(heard, Accepted)
    for count in range(6):
        shape = shape_of_atoms(heard.atoms, count)
        if shape is not None:
            assert len(shape.forward_s) == len(shape.backward_s) == count == len(pairs)
            assert math.isfinite(float(shape.forward_s.sum() + shape.backward_s.sum()))
            assert float(shape.forward_s.sum() + shape.backward_s.sum()) > 0


def test_a_list_of_too_many_atoms_is_refused_where_it_is_decoded() -> None:
    said = Accepted(run="r", stage=0, incarnation=0, endpoint="e", memory_bytes=0)
    raw = msgspec.to_builtins(said) | {"atoms": [[0.0, 0.0]] * (MAX_ATOMS + 1)}
    with pytest.raises(msgspec.ValidationError, match="atoms"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=ToTrainer)
    assert shape_of_atoms([AtomSeconds(0.0, 0.0)] * 3, 3) is None and shape_of_atoms((), 0) is None


def test_bench_shows_what_runs_had_the_device_time(tmp_path: Path) -> None:
    assert shape_of(gpt2().captured.opdag, 2, tmp_path, 1e9, clock=Ticks()) is not None
    [table] = kept_tables(tmp_path, "cpu", _hardware(tmp_path))
    lines = _operator_lines(table)
    assert f"{len(table.times)} operator calls timed" in lines[0] and len(lines) == 1 + SLOWEST
    assert all(line.strip().startswith("aten.") and " ms, backward " in line for line in lines[1:])
    assert kept_tables(tmp_path / "nowhere", "cpu", "") == []

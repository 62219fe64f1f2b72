"""What a run measures at its start: the ladder on its own model and its operators; time boxes, files, the planner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fusion_p2p.capture import capture
from fusion_p2p.optim import AdamW
from fusion_p2p.planner import DENSE, AtomTimes, Ladder, Link, Rung, default_ladder
from fusion_p2p.probe import Measured
from fusion_p2p.workload import atoms
from peer.offers import DeviceOffer, SwarmLinks
from peer.op_times import shape_of
from peer.placement import PlanRequest, make_plan
from peer.trainer_ladder import FILE, LadderProbe, kept, ladder_of_run
from tests.tiny_gpt2 import build
from tests.unit.test_placement import BASE


class Ticks:
    """A clock that moves by a millisecond a look."""

    def __init__(self, step_s: float = 1e-3) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


@pytest.fixture(scope="module")
def captured() -> Any:
    model, batch = build()
    return capture(model, batch), batch


def a_probe(captured: Any, folder: Path, **other: Any) -> LadderProbe:
    options = {"limit_s": 60.0, "clock": Ticks(), "micro_batch_size": 2, "seed": 3} | other
    return LadderProbe(captured=captured[0], example=captured[1], optimizer=AdamW(1e-3), folder=folder, **options)


def test_what_is_measured_is_kept_and_read_again(captured: Any, tmp_path: Path) -> None:
    found = a_probe(captured, tmp_path)()
    assert found is not None and found.rungs[0] == DENSE
    shares = [r.byte_share for r in found.rungs]
    assert len(shares) > 1 and shares == sorted(shares, reverse=True)
    assert kept(tmp_path) == found
    names = [m.codec for m in msgspec.json.decode((tmp_path / FILE).read_bytes(), type=tuple[Measured, ...])]
    assert names == [r.codec for r in default_ladder(most_loss=10.0).rungs if r != DENSE]  # none is left an estimate
    (tmp_path / FILE).write_text("[{]")
    assert kept(tmp_path) is None


def test_a_model_that_would_take_too_long_keeps_the_default(captured: Any, tmp_path: Path) -> None:
    assert not a_probe(captured, tmp_path, limit_s=1e-9).fits  # known from its FLOPs
    assert a_probe(captured, tmp_path).fits
    assert a_probe(captured, tmp_path, clock=Ticks(100.0))() is None  # known from its dense steps
    assert kept(tmp_path) is None


def far(rate: float) -> tuple[list[DeviceOffer], SwarmLinks]:
    offers = [DeviceOffer(peer=p, flops_per_s=1e9, memory_bytes=1 << 33) for p in ("a", "b")]
    links = tuple(Link(src=x, dst=y, bandwidth_bytes_per_s=rate, latency_s=1e-4) for x, y in (("a", "b"), ("b", "a")))
    return offers, SwarmLinks(links=links)


def test_plans_choose_from_the_measured_ladder(captured: Any) -> None:
    parts = atoms(captured[0].opdag, 2)
    offers, links = far(1e4)
    request = PlanRequest(base=BASE, stages=2, links=links)
    default = make_plan(parts, offers, request).numerics.codecs
    measured = Ladder((DENSE, Rung("int8", 0.26), Rung("rotated:2/1", 0.05, 1e-9, 1e-9, 0.01)))
    own = make_plan(parts, offers, PlanRequest(base=BASE, stages=2, links=links, ladder=measured)).numerics.codecs
    assert default and own and {c.codec for c in own} == {"rotated:2/1"}
    assert own != default


@pytest.mark.parametrize(("rate", "compression", "pinned", "asked"), [
    (1e4, "adatopk", False, 1), (1e12, "adatopk", False, 0), (1e4, "none", False, 0), (1e4, "adatopk", True, 0),
])  # fmt: skip
def test_codecs_are_measured_only_where_a_new_plan_would_compress(
    captured: Any, tmp_path: Path, rate: float, compression: str, pinned: bool, asked: int
) -> None:
    offers, links = far(rate)
    measured, calls, said = Ladder((DENSE, Rung("int8", 0.25))), [], []

    def measure() -> Ladder:
        calls.append(1)
        return measured

    live: Any = SimpleNamespace(
        options=SimpleNamespace(probe=measure, compression=compression),
        folder=SimpleNamespace(root=tmp_path),
        atoms=atoms(captured[0].opdag, 2),
        request=PlanRequest(base=BASE, stages=2, links=links, compression=compression),
        say=lambda kind, text: said.append(text),
    )
    found = asyncio.run(ladder_of_run(live, offers, pinned=pinned))
    assert len(calls) == asked
    assert found == (measured if asked else None)
    assert bool(said) == bool(asked)


def test_operators_are_timed_once_and_give_the_cuts_their_proportions(captured: Any, tmp_path: Path) -> None:
    dag, n = captured[0].opdag, len(atoms(captured[0].opdag, 2))
    first = shape_of(dag, 2, tmp_path, 1e9)
    assert first is not None and len(first.forward_s) == n
    again = shape_of(dag, 2, tmp_path, 1e9, clock=Ticks(0.0))  # a clock that stands still times nothing
    assert again is not None and (again.forward_s == first.forward_s).all()
    assert shape_of(dag, 2, tmp_path / "new", 1e-9) is None
    offers = [DeviceOffer(peer=p, flops_per_s=1e9, memory_bytes=1 << 33, machine="here") for p in ("a", "b")]
    base = msgspec.structs.replace(BASE, device_class="cpu")
    late = AtomTimes(forward_s=np.where(np.arange(n) < n - 2, 0.0, 1.0), backward_s=np.zeros(n))
    plan = make_plan(atoms(dag, 2), offers, PlanRequest(base=base, stages=2, shape=late))
    assert plan.numerics.cuts == (n - 1,)  # the last two atoms take all the time: one each

"""Operators are timed once per signature, kept on disk per device and build, and summed over atoms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from fusion_p2p.estimator import OpTable, OpTime, Rates, atom_times, load_table, measure, save_table, table_name
from fusion_p2p.flow import analyse
from fusion_p2p.workload import atoms
from tests.unit.stage_models import gpt2

RATES = Rates(flops_per_s=1e10, memory_bytes_per_s=1e10)


class Ticks:
    """A clock that says how often it was asked."""

    def __init__(self) -> None:
        self.ticks: Iterator[int] = count()
        self.now = 0.0

    def __call__(self) -> float:
        self.now = next(self.ticks) * 1e-3
        return self.now


def empty() -> OpTable:
    return OpTable(device="cpu", build=str(torch.__version__))


def test_each_signature_is_timed_once() -> None:
    dag = gpt2().captured.opdag
    clock = Ticks()
    table = measure(dag, 2, empty(), clock=clock, repeats=1)
    assert 5 < len(table.times) < len(analyse(dag).order)  # two equal layers share their signatures
    before = clock.now
    measure(dag, 2, table, clock=clock, repeats=1)
    assert clock.now - before < 0.01  # only the look at the budget
    assert all(t.forward_s > 0 for t in table.times.values())


def test_a_timer_of_its_own_times_the_calls_and_the_clock_bounds_the_whole() -> None:
    """As the thread's CPU time, which a quota does not stretch."""
    dag = gpt2().captured.opdag
    table = measure(dag, 2, empty(), clock=lambda: 0.0, timer=map(float, count(0, 7)).__next__, repeats=1)
    assert table.times and {t.forward_s for t in table.times.values()} == {7.0}
    assert not measure(dag, 2, empty(), clock=Ticks(), timer=lambda: 0.0, budget_s=0.0).times


def test_times_sum_over_atoms_and_unknown_calls_take_the_prior() -> None:
    dag = gpt2().captured.opdag
    table = measure(dag, 2, empty(), clock=Ticks(), repeats=1)
    known, guessed = atom_times(dag, 2, table, RATES), atom_times(dag, 2, None, RATES)
    assert len(known.forward_s) == len(guessed.forward_s) == len(atoms(dag, 2))
    assert (guessed.forward_s > 0).all() and (known.forward_s > 0).all()
    twice = OpTable(
        device="cpu",
        build=table.build,
        times={k: OpTime(2 * t.forward_s, 2 * t.backward_s) for k, t in table.times.items()},
    )
    assert atom_times(dag, 2, twice, RATES).forward_s == pytest.approx(2 * known.forward_s)
    again = atom_times(dag, 2, table, RATES, recompute=True)
    assert again.backward_s == pytest.approx(known.backward_s + known.forward_s)


def test_tables_are_kept_per_device_and_a_damaged_one_is_forgotten(tmp_path: Path) -> None:
    table = empty()
    table.times["aa"] = OpTime(1.0, 2.0)
    save_table(table, tmp_path)
    assert load_table(tmp_path, "cpu").times == table.times
    assert load_table(tmp_path, "cuda:0").times == {}
    file = tmp_path / table_name("cpu")
    file.write_bytes(file.read_bytes()[:-5])
    assert load_table(tmp_path, "cpu").times == {}
    table.build = "another"
    save_table(table, tmp_path)
    assert load_table(tmp_path, "cpu").times == {}

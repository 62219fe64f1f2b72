"""The simulator's invariants, and cases whose step time is known by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.planner import DENSE, Device, Ladder, Network, Workload
from fusion_p2p.planner.costs import Costs
from fusion_p2p.planner.simulate import Options, Pool, Schedule, simulate
from tests.unit.test_planner_dp import LADDERS, random_problem


def line(stage_s: list[float], hop_s: float, latency_s: float, micro_batches: int) -> Costs:
    """One atom per device; forward and backward of atom k take stage_s[k] / 2 on any device, a transfer hop_s."""
    n = len(stage_s)
    half = np.array(stage_s) / 2
    zero = np.zeros(n)
    w = Workload(
        name="line",
        forward_flops=half,
        backward_flops=half,
        forward_bytes=zero,
        parameters=zero,
        stash_bytes=zero,
        kernels=zero,
        cut_bytes=np.ones(n + 1),
    )
    devices = tuple(Device(peer=f"d{i}", flops_per_s=1, memory_bytes_per_s=1, memory_bytes=1) for i in range(n))
    bw = np.full((n, n), 1 / hop_s if hop_s else np.inf)
    net = Network(devices=devices, bandwidth_bytes_per_s=bw, latency_s=np.full((n, n), latency_s))
    return Costs(w, net, micro_batches, Ladder((DENSE,)))


def run(costs: Costs, options: Options | None = None) -> Schedule:
    n = len(costs.net)
    return simulate(costs, costs.fit(tuple(range(n)), tuple(range(1, n)))[0], options)


def test_one_stage_takes_all_micro_batches_in_turn() -> None:
    assert run(line([2.0], 0, 0, 5)).step_s == pytest.approx(10)


def test_two_equal_stages_fill_and_drain() -> None:
    # Round trip 2 + 2 + two hops of 0.25 + 0.1, then (M - 1) x 2.
    assert run(line([2.0, 2.0], 0.25, 0.1, 6)).step_s == pytest.approx(4 + 0.7 + 5 * 2)


def test_a_slow_link_sets_the_pace() -> None:
    costs = line([2.0, 2.0], 3.0, 0.0, 10)
    assert run(costs).step_s == pytest.approx(costs.fit((0, 1), (1,))[1].step_s)


def test_a_window_of_one_serialises_round_trips() -> None:
    costs = line([2.0, 2.0], 0.25, 0.1, 4)
    assert run(costs, Options(windows=(1, 1))).step_s == pytest.approx(4 * 4.7)


def test_devices_that_share_one_core_run_at_half_speed() -> None:
    costs = line([2.0, 2.0], 0, 0, 8)
    shared = run(costs, Options(pools=(Pool((0, 1), 1.0),)))
    assert shared.step_s == pytest.approx(8 * 4.0)  # all the work on one core
    assert run(costs, Options(pools=(Pool((0, 1), 2.0),))).step_s == pytest.approx(run(costs).step_s)


def test_a_shared_card_sends_one_frame_at_a_time() -> None:
    costs = line([0.2, 0.2, 0.2], 1.0, 0, 6)
    assert run(costs, Options(shared_nic=True)).step_s > run(costs).step_s * 1.3  # the middle one sends both ways


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 micro-batch"):
        run(line([1.0, 1.0], 0, 0, 2), Options(windows=(0, 1)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), ladder=st.sampled_from(sorted(LADDERS)), window=st.integers(1, 6))
def test_invariants(seed: int, ladder: str, window: int) -> None:
    costs = random_problem(seed, 4, 8, ladder, micro_batches=6)
    rng = np.random.default_rng(seed)
    hosts = tuple(int(x) for x in rng.permutation(4)[: rng.integers(1, 5)])
    cuts = tuple(sorted(int(x) for x in rng.choice(np.arange(1, 8), len(hosts) - 1, replace=False)))
    chain, score = costs.fit(hosts, cuts)
    free, limited = simulate(costs, chain), simulate(costs, chain, Options(windows=(window,) * len(hosts)))
    for s in (free, limited):
        work = [x for x in s.spans if x.to is None]
        assert len(work) == 2 * costs.m * len(hosts)  # each micro-batch forward and backward once per stage
        assert s.step_s >= costs.m * max(score.stage_s) * (1 - 1e-9)
        assert s.step_s >= score.round_trip_s * (1 - 1e-9)
        for k in range(len(hosts)):  # one compute queue: no overlap; forwards in order; backward after forward
            mine = sorted((x for x in work if x.stage == k), key=lambda x: x.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(mine))
            forwards = [x for x in mine if x.kind == "F"]
            assert [x.micro_batch for x in forwards] == list(range(costs.m))
            ends = {x.micro_batch: x.end_s for x in forwards}
            assert all(x.start_s >= ends[x.micro_batch] - 1e-9 for x in mine if x.kind == "B")
    assert max(limited.peak) <= window
    assert len(free.grid(60)) == len(hosts)
    assert all(len(row) == 60 for row in free.grid(60))

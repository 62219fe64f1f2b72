"""The fast dynamic programme against its plain reference and against brute force, on random small networks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.planner import (
    DENSE,
    Device,
    Ladder,
    Network,
    Workload,
    dp,
    dp_reference,
    exact,
    plan,
    top_k_ladder,
    uniform_top_k,
)
from fusion_p2p.planner.bound import lower_bound_s
from fusion_p2p.planner.costs import Chain, Costs
from fusion_p2p.planner.dp_tables import build

LADDERS = {"dense": Ladder((DENSE,)), "uniform": uniform_top_k(100.0), "adaptive": top_k_ladder()}


def random_problem(seed: int, peers: int, atoms: int, ladder: str, micro_batches: int = 8) -> Costs:
    """A network of `peers` with log-uniform speeds and links (some alike, as in a site), and a chain of `atoms`."""
    rng = np.random.default_rng(seed)
    sites = rng.integers(0, max(1, peers // 2), peers)
    speed = np.exp(rng.uniform(np.log(5e12), np.log(1e14), peers))
    between = np.exp(rng.uniform(np.log(1e6), np.log(1e9), (peers, peers)))
    alike = rng.random() < 0.5
    bw = between[np.ix_(sites, sites)] if alike else between
    lat = (
        rng.uniform(1e-4, 0.05, (peers, peers))[np.ix_(sites, sites)]
        if alike
        else rng.uniform(1e-4, 0.05, (peers, peers))
    )
    w = Workload(
        name="random",
        forward_flops=rng.uniform(1e9, 1e11, atoms),
        backward_flops=rng.uniform(2e9, 2e11, atoms),
        forward_bytes=rng.uniform(1e6, 1e8, atoms),
        parameters=rng.uniform(0, 5e7, atoms),
        stash_bytes=rng.uniform(0, 1e7, atoms),
        kernels=rng.integers(1, 9, atoms).astype(float),
        cut_bytes=rng.choice([1e6, 4e6, 1.6e7], atoms + 1),
        recompute=bool(rng.integers(2)),
        wire_bytes_per_element=2.0,
    )
    devices = tuple(
        Device(
            peer=f"p{i}",
            flops_per_s=float(speed[i]),
            memory_bytes_per_s=5e11,
            memory_bytes=float(rng.uniform(0.3, 3.0)) * 28 * float(w.parameters.sum()),
        )
        for i in range(peers)
    )
    return Costs(w, Network(devices=devices, bandwidth_bytes_per_s=bw, latency_s=lat), micro_batches, LADDERS[ladder])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ladder=st.sampled_from(sorted(LADDERS)),
    scale=st.floats(0.2, 3.0),
    skip=st.booleans(),
)
def test_sweep_equals_reference(seed: int, ladder: str, scale: float, skip: bool) -> None:
    costs = random_problem(seed, 4, 7, ladder)
    order = tuple(int(x) for x in np.random.default_rng(seed).permutation(4))
    threshold = scale * float(costs.work_s[:, -1].min())
    t = build(costs, np.array([threshold]))
    found = dp.sweep(t, np.array([order]), np.array([0]), skip=skip)
    expected = dp_reference.least_round_trip(costs, order, threshold, skip=skip)
    assert found.round_trip_s[0] == pytest.approx(expected, rel=1e-9)
    if np.isfinite(expected):
        hosts, cuts = found.chain(0)
        score = costs.score(Chain(hosts, cuts, costs.rungs_at(hosts, cuts, threshold)))
        assert score.fits
        assert score.round_trip_s == pytest.approx(expected, rel=1e-9)
        assert score.bottleneck_s <= threshold * (1 + 1e-6)
        assert skip or hosts == order


@pytest.mark.parametrize("ladder", sorted(LADDERS))
def test_plan_equals_brute_force(ladder: str) -> None:
    for seed in range(6):
        costs = random_problem(seed, 4, 6, ladder)
        expected = dp_reference.brute_force(costs)
        assert expected is not None
        found = exact.best_of_all_orders(costs, range(4), np.flatnonzero(costs.cut_allowed))
        assert found is not None
        assert found[1].fits
        assert found[1].step_s == pytest.approx(expected[1].step_s, rel=1e-6)
        assert lower_bound_s(costs) <= expected[1].step_s * (1 + 1e-9)


def test_plan_door_gives_the_optimum_of_a_small_network() -> None:
    costs = random_problem(3, 5, 6, "dense")
    p = plan(costs.w, costs.net, micro_batches=8, ladder=LADDERS["dense"])
    expected = dp_reference.brute_force(costs)
    assert expected is not None
    assert p.score.step_s == pytest.approx(expected[1].step_s, rel=1e-6)

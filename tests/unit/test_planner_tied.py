"""Tied weights in the planner: co-located uses or the weight as an edge, charged once a step, against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from fusion_p2p.planner import DENSE, Ladder, Network, dp_reference, exact, plan, synthetic
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.workload import SharedWeight
from tests.unit.test_planner_dp import LADDERS, random_problem
from tests.unit.test_planner_plan import blocks


def tied_problem(seed: int, peers: int) -> Costs:
    """A random problem too large for one peer, with one weight read at both ends and one read up to the middle."""
    c = random_problem(seed, peers, 6, sorted(LADDERS)[seed % 3])
    rng, last = np.random.default_rng(seed), c.w.atoms - 1
    shared = SharedWeight(0, last, float(rng.choice([1e5, 1e6, 1e7, 1e8]))), SharedWeight(0, last // 2, 2e6)
    w = replace(c.w, shared=shared)
    whole = w.stage_bytes(0, w.atoms, c.m).total
    devices = tuple(replace(d, memory_bytes=float(rng.uniform(0.45, 0.9)) * whole) for d in c.net.devices)
    return Costs(w, replace(c.net, devices=devices), c.m, c.ladder)


def best_ring(costs: Costs) -> tuple[Chain, Score] | None:
    """The best chain that ends on the device it begins on, by trying all."""
    inner = [p for p in range(1, costs.w.atoms) if costs.cut_allowed[p]]
    best = None
    for count in range(2, min(len(costs.net), len(inner)) + 1):
        for cuts in combinations(inner, count):
            for hosts in permutations(range(len(costs.net)), count):
                found = costs.fit((*hosts, hosts[0]), cuts)
                if found[1].fits and (best is None or found[1].step_s < best[1].step_s):
                    best = found
    return best


@pytest.mark.parametrize("seed", range(6))
def test_chains_with_tied_weights_equal_brute_force(seed: int) -> None:
    costs = tied_problem(seed, 4)
    expected = dp_reference.brute_force(costs)
    found = exact.best_of_all_orders(costs, range(4), np.flatnonzero(costs.cut_allowed))
    assert expected is not None and found is not None
    assert found[1].shared_s > 0 or len(found[0].hosts) == 1
    assert found[1].step_s == pytest.approx(expected[1].step_s, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_the_better_of_the_weight_as_an_edge_and_its_uses_together(seed: int) -> None:
    costs = tied_problem(seed, 3 + seed % 2)
    options = [f[1].step_s for f in (dp_reference.brute_force(costs), best_ring(costs)) if f is not None]
    p = plan(costs.w, costs.net, micro_batches=costs.m, ladder=costs.ladder)
    assert p.score.step_s == pytest.approx(min(options), rel=1e-6)


def large(size_bytes: float) -> tuple[Network, float, float]:
    """A network, and the step of a plan for a chain with a weight of that size read at both ends: planned with what is
    known of it, and planned without and then charged."""
    w = replace(blocks(24, parameters=1e8), shared=(SharedWeight(0, 23, size_bytes),))
    net, dense = synthetic.network(16, 3), Ladder((DENSE,))
    knows = plan(w, net, micro_batches=8, ladder=dense)
    blind = plan(replace(w, shared=()), net, micro_batches=8, ladder=dense)
    charged = Costs(w, net, 8, dense).score(blind.chain)
    return net, knows.score.step_s, charged.step_s


def test_a_heavy_tied_weight_moves_the_ends_together_and_a_light_one_nothing() -> None:
    _, light, blind = large(1e3)
    assert light <= blind * 1.01
    _, heavy, blind = large(4e8)
    assert heavy < 0.8 * blind


def test_a_plan_says_where_tied_weights_go() -> None:
    costs = tied_problem(0, 3)
    p = plan(costs.w, costs.net, micro_batches=costs.m, ladder=costs.ladder)
    line = next(x for x in p.reasons if x.startswith("tied weights"))
    assert ("never travel" in line) == (p.score.shared_s == 0)

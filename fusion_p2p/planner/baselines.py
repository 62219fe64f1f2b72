"""What OP-Fence is measured against, on the same costs and simulator: naive orders and cuts, and the published rules.

FusionLLM section 4 (OP-Fence: Louvain fences, every device, compute in proportion) and section 5 (AdaTopK).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.dp_tables import Ints
from fusion_p2p.planner.fences import louvain
from fusion_p2p.planner.ladder import DENSE, top_k
from fusion_p2p.planner.workload import Floats

Solution = tuple[Chain, Score]


def random_equal_layers(costs: Costs, seed: int) -> Solution:
    """Random order of all devices, as many atoms to each."""
    return _chain(costs, _shuffled(costs, seed), np.ones(costs.w.atoms), None)


def random_equal_compute(costs: Costs, seed: int) -> Solution:
    """Random order of all devices, as many FLOP to each."""
    return _chain(costs, _shuffled(costs, seed), costs.w.forward_flops + costs.w.backward_flops, None)


def published(costs: Costs, seed: int = 0) -> Solution:
    """OP-Fence as published: Louvain communities one after the other, every device, FLOP in proportion to speed."""
    order = _fenced(costs, seed)
    speed = np.array([1.0 / costs.work_s[d, -1] for d in order])
    return _chain(costs, order, costs.w.forward_flops + costs.w.backward_flops, speed)


def published_as_listed(costs: Costs) -> Solution:
    """The same with nothing drawn: communities and their peers stand in the order in which the network lists them.

    A list sorted by site puts near communities beside each other, which the published rule does not promise.
    """
    order = [d for f in louvain(costs.net) for d in f if costs.net.devices[d].accepts]
    speed = np.array([1.0 / costs.work_s[d, -1] for d in order])
    return _chain(costs, order, costs.w.forward_flops + costs.w.backward_flops, speed)


def network_only(costs: Costs, seed: int = 0) -> Solution:
    """The fences' order with equal stages: what knowing only the network gives."""
    return _chain(costs, _fenced(costs, seed), costs.w.forward_flops + costs.w.backward_flops, None)


def published_adatopk(costs: Costs, chain: Chain, ratio: float = 100.0) -> Solution:
    """AdaTopK as published: a hop's Top-K ratio in proportion to its dense transfer time, `ratio` at the slowest."""
    h = np.array(chain.hosts)
    dense = costs.w.cut_bytes[list(chain.cuts)] * costs.slow_s_per_byte[h[:-1], h[1:]]
    ratios = [float(ratio * t / dense.max()) for t in dense]
    rungs = tuple(top_k(r) if r > 3.0 else DENSE for r in ratios)  # below 3 the indices outweigh what is saved
    new = replace(chain, rungs=rungs)
    return new, costs.score(new)


def cheap_cuts(costs: Costs) -> Ints:
    """Positions a person would cut at: allowed, and no dearer than the median inner cut."""
    inner = np.flatnonzero(costs.cut_allowed[1:-1]) + 1
    size = costs.w.cut_bytes[inner]
    out: Ints = inner[size <= np.median(size) * (1 + 1e-9)]
    return out


def _fenced(costs: Costs, seed: int) -> list[int]:
    """Louvain says neither in which sequence the communities come nor their peers: both are drawn."""
    rng = random.Random(seed)
    fences = [[d for d in f if costs.net.devices[d].accepts] for f in louvain(costs.net, seed)]
    rng.shuffle(fences)
    for f in fences:
        rng.shuffle(f)
    return [d for f in fences for d in f]


def _shuffled(costs: Costs, seed: int) -> list[int]:
    order = [i for i, d in enumerate(costs.net.devices) if d.accepts]
    random.Random(seed).shuffle(order)
    return order


def _chain(costs: Costs, order: Sequence[int], weight: Floats, share: Floats | None) -> Solution:
    """Cuts nearest to the targets: each device of the order gets `share` (default equal) of the sum of `weight`."""
    count = len(order)
    positions = cheap_cuts(costs)
    if len(positions) < count - 1:
        positions = np.flatnonzero(costs.cut_allowed[1:-1]) + 1
    if len(positions) < count - 1:
        raise InputError(f"{count} devices cannot share {len(positions) + 1} pieces; drop some devices")
    done = np.concatenate([[0.0], np.cumsum(weight)])[positions] / weight.sum()
    part = np.full(count, 1.0 / count) if share is None else share / share.sum()
    targets = np.cumsum(part)[:-1]
    chosen: list[int] = []
    for k, target in enumerate(targets):
        low = chosen[-1] + 1 if chosen else 0
        high = len(positions) - (count - 2 - k)  # leave one for each device to come
        i = low + int(np.abs(done[low:high] - target).argmin())
        chosen.append(i)
    cuts = tuple(int(positions[i]) for i in chosen)
    return costs.fit(tuple(int(d) for d in order), cuts)

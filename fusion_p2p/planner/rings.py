"""Chains that end on the device they begin on, so that a weight read at both ends of the model never travels.

FusionLLM keeps the uses of a tied weight together; where one stage cannot hold them, one device can hold two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from fusion_p2p.planner.costs import Chain, Costs
from fusion_p2p.planner.dp_tables import Ints

Where = tuple[tuple[int, ...], tuple[int, ...]]  # hosts, cuts
PLACES = 10  # positions tried for a cut
FEW = 5  # devices, up to which rings of four stages are tried outright
ENDS, MIDDLES = 5, 4  # devices tried as both ends, and between them


def candidates(costs: Costs, chains: Sequence[Chain], allowed: Ints) -> list[Where]:
    """Rings made of these chains: by one more stage, by another host at an end, by a device that takes both ends off
    them; and short rings."""
    inner = allowed[1:-1]
    found: dict[Where, None] = {}
    for where in (*_around(costs, chains, inner), *_wrapped(costs, chains, inner), *_short(costs, inner)):
        found.setdefault(where)
    return list(found)


def _around(costs: Costs, chains: Iterable[Chain], inner: Ints) -> Iterator[Where]:
    for chain in chains:
        hosts, cuts = chain.hosts, chain.cuts
        if len(set(hosts)) < 2 or hosts[0] == hosts[-1]:
            continue
        for p in _spread(costs, inner[inner < cuts[0]]):
            yield (hosts[-1], *hosts), (p, *cuts)
        for p in _spread(costs, inner[inner > cuts[-1]]):
            yield (*hosts, hosts[0]), (*cuts, p)
        if len(hosts) > 2:
            yield (hosts[-1], *hosts[1:]), cuts
            yield (*hosts[:-1], hosts[0]), cuts


def _wrapped(costs: Costs, chains: Iterable[Chain], inner: Ints) -> Iterator[Where]:
    fast = np.argsort(np.where(costs.room_bytes > 0, costs.work_s[:, -1], np.inf), kind="stable")[:ENDS].tolist()
    for chain in chains:
        cuts = chain.cuts
        for d in fast:
            if d not in chain.hosts and len(cuts) and costs.room_bytes[d] > 0:
                for p in _spread(costs, inner[inner < cuts[0]]):
                    for q in _spread(costs, inner[inner > cuts[-1]]):
                        yield (d, *chain.hosts, d), (p, *cuts, q)
                        yield (d, *chain.hosts[::-1], d), (p, *cuts, q)


def _short(costs: Costs, inner: Ints) -> Iterator[Where]:
    """Two devices, one with both ends of the model and the other with its middle; with few devices also three."""
    whole = np.where(costs.room_bytes > 0, costs.work_s[:, -1], np.inf)
    few = len(whole) <= FEW
    for s in np.argsort(whole, kind="stable")[:ENDS].tolist():
        near = whole + float(costs.m) * costs.w.typical_cut_bytes() * costs.slow_s_per_byte[s]
        near[s] = np.inf
        middles = [h for h in np.argsort(near, kind="stable")[:MIDDLES].tolist() if np.isfinite(near[h] + whole[s])]
        for count in (1, 2) if few else (1,):
            places = list(combinations(_spread(costs, inner, PLACES if count == 1 else PLACES - 3), count + 1))
            for hosts in permutations(middles, count):
                yield from (((s, *hosts, s), cuts) for cuts in places)


def _spread(costs: Costs, positions: Ints, most: int = PLACES) -> list[int]:
    """At most so many of them, evenly by work, both ends included."""
    if len(positions) <= most:
        return [int(p) for p in positions]
    done = costs.work_s[:, positions].mean(axis=0)
    wanted = np.linspace(done[0], done[-1], most)
    return [int(p) for p in np.unique(positions[np.minimum(np.searchsorted(done, wanted), len(positions) - 1)])]

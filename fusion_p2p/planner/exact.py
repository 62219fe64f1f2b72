"""The true optimum of small networks: all orders at once (subsets of devices), all thresholds by branch and bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fusion_p2p.planner import dp
from fusion_p2p.planner.costs import INF, Chain, Costs, Score
from fusion_p2p.planner.dp_tables import SLACK, Ints, Tables, build
from fusion_p2p.planner.workload import Floats

MOST_DEVICES = 7  # 7 * 2^6 states of a subset and its last device

Solution = tuple[Chain, Score]
Solve = Callable[[Floats], tuple[Floats, Sequence[Solution | None]]]


def best_of_all_orders(costs: Costs, devices: Sequence[int], at: Ints) -> Solution | None:
    """The chain of least step time over every subset, order and cut in `at`; None if nothing fits."""
    return minimise(lambda thresholds: _solve(costs, devices, at, thresholds), costs)


def _scored(costs: Costs, where: tuple[tuple[int, ...], tuple[int, ...]], threshold: float) -> Solution:
    hosts, cuts = where
    at = Chain(hosts, cuts, costs.rungs_at(hosts, cuts, threshold))
    here = (at, costs.score(at))
    again = costs.fit(hosts, cuts)
    return min((here, again), key=lambda s: (not s[1].fits, s[1].step_s))


def minimise(solve: Solve, costs: Costs) -> Solution | None:
    """Least step time over thresholds B. solve(B) gives least round trips under B and chains that reach them.

    In an interval (low, high] of B no chain beats S(high) + (M-1) x low; the chain found at `high` closes the part
    of the interval above its own bottleneck. Exact where codecs do not depend on B; else for the thresholds tried.
    """
    top = 4.0 * float(costs.work_s[:, -1].max())
    best: Solution | None = None
    for _ in range(40):  # hops may be slower than any stage
        best = solve(np.array([top]))[1][0]
        if best is not None and best[1].fits:
            break
        top *= 4.0
    if best is None:
        return None
    intervals = [(0.0, min(top, best[1].step_s / costs.m))]
    while intervals:
        highs = np.array([h for _, h in intervals])
        trips, found = solve(highs)
        left: list[tuple[float, float]] = []
        for (low, high), trip, s in zip(intervals, trips, found, strict=True):
            if s is None:
                continue
            if s[1].fits and s[1].step_s < best[1].step_s:
                best = s
            reach = min(high, s[1].bottleneck_s) * (1 - 1e-7)
            if reach <= low or trip + (costs.m - 1) * low >= best[1].step_s:
                continue
            if (high - low) < 1e-5 * high:
                continue
            middle = (low + reach) / 2 if low > 0 else reach / 2
            left += [(low, middle), (middle, reach)]
        intervals = left
    return best


# --- subsets


@dataclass(frozen=True, eq=False)
class _Level:
    """States of subsets of one size: pairs (subset, last device), F[k] (pairs, B, m)."""

    index: dict[tuple[int, int], int]
    values: dict[int, Floats]


def _solve(costs: Costs, devices: Sequence[int], at: Ints, thresholds: Floats) -> tuple[Floats, list[Solution | None]]:
    """Held-Karp over subsets with cuts: F[subset][last][q] as in dp.py, every subset of a size in one call; where
    weights are tied, once for each device that may hold the first stage."""
    t = build(costs, thresholds, at, np.arange(len(costs.net)))  # every device its own group
    starts: list[int | None] = list(range(len(devices))) if t.paid_s is not None else [None]
    best = np.full(len(thresholds), INF)
    chains: list[Solution | None] = [None] * len(thresholds)
    for start in starts:
        trips, found = _solve_from(costs, devices, t, start)
        for j in np.flatnonzero(trips < best).tolist():
            best[j], chains[j] = trips[j], found[j]
    return best, chains


def _solve_from(
    costs: Costs, devices: Sequence[int], t: Tables, start: int | None
) -> tuple[Floats, list[Solution | None]]:
    b, m = len(t.thresholds), len(t.at)
    levels: list[_Level] = []
    best = np.full(b, INF)
    end: list[tuple[int, int, int] | None] = [None] * b
    first = None if start is None else devices[start]
    for size in range(1, len(devices) + 1):
        pairs = [
            (s, e)
            for s in _subsets(len(devices), size)
            for e in range(len(devices))
            if s >> e & 1 and (start is None or (s >> start & 1 and (size == 1 or e != start)))
        ]
        dev = np.repeat(np.array([devices[e] for _, e in pairs]), b)
        of = np.tile(np.arange(b), len(pairs))
        enter = _enter(t, devices, pairs, levels[-1] if levels else None, b, m)
        placed = dp.advance(t, enter, dev, of, None if first is None else np.full(len(dev), first))
        out = {k: v.T.reshape(len(pairs), b, m) for k, v in placed.items()}
        levels.append(_Level({p: i for i, p in enumerate(pairs)}, out))
        last = out[0][:, :, -1]
        for j in np.flatnonzero(last.min(axis=0) < best).tolist():
            i = int(last[:, j].argmin())
            best[j] = last[i, j]
            end[j] = (size - 1, *pairs[i])
    chains: list[Solution | None] = []
    for j in range(b):
        e = end[j]
        if e is None:
            chains.append(None)
            continue
        hosts = _order(t, devices, levels, e, j, first)
        found = dp.sweep(
            t, np.array([hosts]), np.array([j]), skip=False, starts=None if first is None else np.array([first])
        )
        chains.append(_scored(costs, found.chain(0), float(t.thresholds[j])))
    return best, chains


def _subsets(n: int, size: int) -> list[int]:
    return [sum(1 << i for i in c) for c in combinations(range(n), size)]


def _enter(
    t: Tables, devices: Sequence[int], pairs: list[tuple[int, int]], before: _Level | None, b: int, m: int
) -> dict[int, Floats]:
    enter = {k: np.full((len(pairs), b, m), INF) for k in {0, *t.classes}}
    if before is None:
        enter[0][:, :, 0] = 0.0
    else:
        for i, (s, e) in enumerate(pairs):
            rest = s & ~(1 << e)
            for d in range(len(devices)):
                if (j := before.index.get((rest, d), -1)) >= 0:
                    for k in t.classes:
                        hop = t.hop_s[k][:, :, devices[e], devices[d]].T[:, t.size_of]
                        np.minimum(enter[k][i], before.values[k][j] + hop, out=enter[k][i])
    return {k: np.ascontiguousarray(v.reshape(-1, m).T) for k, v in enter.items()}


def _order(
    t: Tables, devices: Sequence[int], levels: list[_Level], end: tuple[int, int, int], j: int, first: int | None
) -> list[int]:
    """Hosts, first to last, of the chain that ends in state `end` at the last position under threshold j."""
    level, s, e = end
    q, ko = len(t.at) - 1, 0
    out = [devices[e]]
    limit = float(t.thresholds[j]) * SLACK * (1 + 1e-12)
    while level > 0:
        before, rest = levels[level - 1], s & ~(1 << e)
        dev = devices[e]
        work = t.work_s[dev, q] - t.work_s[dev, :q]
        paid = 0.0
        if first is not None and t.paid_s is not None:
            paid = t.paid_s[q, first, dev] - t.paid_s[:q, first, dev]
        best: tuple[float, int, int, int] | None = None
        for d in range(len(devices)):
            if (rest, d) in before.index:
                for k in t.classes:
                    hop = t.hop_s[k][:, j, dev, devices[d]][t.size_of[:q]]
                    v = before.values[k][before.index[rest, d], j, :q] + hop + work + paid
                    fits = work + t.codec_s[k, :q] + t.codec_s[ko, q] <= limit
                    v = np.where(fits & t.memory.fits(dev, q), v, INF)
                    p = int(v.argmin())
                    if best is None or v[p] < best[0]:
                        best = (float(v[p]), d, p, k)
        if best is None:
            break
        _, d, q, ko = best
        s, e, level = rest, d, level - 1
        out.append(devices[d])
    return out[::-1]

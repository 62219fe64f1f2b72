"""A lower bound that no plan can beat, and which devices are worth considering.

Single linkage: a plan whose dearest hop costs h lies inside one component of the graph of hops <= h. Inside a
component no plan beats perfect balance over its k fastest devices, the k-1 cheapest tree edges, and that dearest hop
(a path's edges are a forest, and no forest of k-1 edges is lighter than the k-1 lightest of a spanning tree).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion_p2p.planner.costs import INF, Costs
from fusion_p2p.planner.workload import Floats

Ints = npt.NDArray[np.int64]
MOST_IN_SET = 32  # devices of a neighbourhood, about
CENTRES = 24  # devices that neighbourhoods are grown from


@dataclass(frozen=True, eq=False)
class Component:
    """Devices joined by hops of at most `hop_s` (round trip); `bound_s` holds for plans inside it that use that hop."""

    members: Ints  # by speed, fastest first
    count: int  # devices at the bound's minimum
    hop_s: float
    bound_s: float
    bottleneck_s: float


def cheapest_hop(costs: Costs) -> tuple[Floats, Floats]:
    """(round trip s, slower direction's transfer s), each (D, D): over all cuts and rungs, the least."""
    inner = costs.cut_allowed[1:-1]
    if not inner.any():
        big = np.full(costs.both_latency_s.shape, INF)
        return big, big
    size = costs.w.cut_bytes[1:-1][inner]
    trip = np.full(costs.both_latency_s.shape, INF)
    for r in costs.ladder.rungs:
        least = r.byte_share * float(size.min())
        codec = (
            2 * (r.encode_s_per_element + r.decode_s_per_element) * float(size.min()) / costs.w.wire_bytes_per_element
        )
        trip = np.minimum(trip, least * costs.both_s_per_byte + costs.both_latency_s + codec)
    slow = costs.ladder.rungs[-1].byte_share * float(size.min()) * costs.slow_s_per_byte
    return trip, slow


def components(costs: Costs, *, must_use_all: bool = False) -> list[Component]:
    """One component per device and per merge of single linkage, each with its bound; sorted by bound."""
    trip, slow = cheapest_hop(costs)
    whole = costs.work_s[:, -1].copy()
    share = (np.diff(costs.work_s, axis=1) / whole[:, None]).min(axis=0).sum()  # V of the balance argument
    usable = costs.room_bytes > 0
    whole[~usable] = INF
    edges = _spanning_tree(trip)
    n = len(whole)
    out = []
    if not must_use_all or n == 1:
        out = [_component(np.array([i]), whole, share, [], 0.0, 0.0, costs.m, False) for i in range(n) if usable[i]]
    owner = list(range(n))
    members: dict[int, list[int]] = {i: [i] for i in range(n)}
    inside: dict[int, list[float]] = {i: [] for i in range(n)}

    def find(x: int) -> int:
        while owner[x] != x:
            owner[x] = owner[owner[x]]
            x = owner[x]
        return x

    for i, j in edges:
        a, b = find(i), find(j)
        across = float(slow[np.ix_(members[a], members[b])].min())  # any hop that joins the two
        owner[b] = a
        members[a] = members[a] + members.pop(b)
        inside[a] = inside[a] + inside.pop(b)
        ids = np.array(members[a])
        ids = ids[usable[ids]]
        if len(ids) and (not must_use_all or len(ids) == n):
            dearest = float(trip[i, j])
            ids = ids[np.argsort(whole[ids], kind="stable")]
            least_tx = across if np.isfinite(dearest) else INF
            out.append(_component(ids, whole, share, inside[a], dearest, least_tx, costs.m, must_use_all))
        inside[a] = inside[a] + [float(trip[i, j])]
    return sorted(out, key=lambda c: c.bound_s)


def _component(
    ids: Ints, whole: Floats, share: float, inside: list[float], dearest: float, least_tx: float, m: int, all_: bool
) -> Component:
    k = np.arange(1, len(ids) + 1)
    balance = share / np.cumsum(1.0 / whole[ids])
    tree = np.concatenate([[0.0], np.cumsum(np.sort(inside))]) if len(inside) else np.zeros(1)
    hops = np.where(k > 1, tree[np.clip(k - 2, 0, len(tree) - 1)] + dearest, 0.0)
    slowest = np.where(k > 1, np.maximum(balance, least_tx), balance)
    # Where the hop, not the balance, sets the pace, fast devices may take more: the work of the last count that
    # is slower than the hop is still a bound.
    floor = int(max(1, (balance > least_tx).sum()))
    work = np.where(slowest > balance, floor * balance[floor - 1], k * balance)
    total = work + hops + (m - 1) * slowest
    if all_:
        total[:-1] = INF
    best = int(total.argmin())
    return Component(ids, best + 1, dearest, float(total[best]), float(slowest[best]))


def lower_bound_s(costs: Costs, *, must_use_all: bool = False) -> float:
    """Seconds that no plan of this network, workload, micro-batch count and ladder can beat."""
    found = components(costs, must_use_all=must_use_all)
    return found[0].bound_s if found else INF


def neighbourhoods(costs: Costs, pace_s: float) -> list[Ints]:
    """Sets of devices near and fast enough to help each other, the most promising first.

    A set grows from one device like a tree: next comes the device of least (hop to the nearest member + pace) x its
    seconds for the model, for as long as the estimate falls: balance over the set, each hop as dear as when it came.
    """
    trip, slow = cheapest_hop(costs)
    trip, slow = np.minimum(trip, trip.T), np.minimum(slow, slow.T)
    usable = np.flatnonzero(costs.room_bytes > 0)
    whole = np.where(costs.room_bytes > 0, costs.work_s[:, -1], INF)
    key = (trip + pace_s) * whole[None, :]
    np.fill_diagonal(key, INF)
    # A centre is promising if it and its nearest dozen are fast.
    near = np.partition(key[usable], min(12, len(usable) - 1), axis=1)[:, :12].mean(axis=1)
    centres = usable[np.argsort(near * whole[usable], kind="stable")][:CENTRES]
    grown = [_grow(int(c), trip, slow, whole, pace_s, costs.m) for c in centres]
    return [members for _, members in sorted(grown, key=lambda g: g[0])]


def _grow(centre: int, trip: Floats, slow: Floats, whole: Floats, pace_s: float, m: int) -> tuple[float, Ints]:
    """(estimated step seconds, members) of the best prefix of the set grown from `centre`."""
    members, hops, slowest = [centre], 0.0, 0.0
    hop, tx = trip[centre].copy(), slow[centre].copy()
    left = np.isfinite(whole)
    left[centre] = False
    power = 1.0 / float(whole[centre])
    best, keep = m / power, 1
    for _ in range(min(int(left.sum()), 2 * MOST_IN_SET)):
        d = int(np.where(left, (hop + pace_s) * whole, INF).argmin())
        left[d] = False
        hops, slowest = hops + float(hop[d]), max(slowest, float(tx[d]))
        power += 1.0 / float(whole[d])
        members.append(d)
        closer = trip[d] < hop
        hop, tx = np.where(closer, trip[d], hop), np.where(closer, slow[d], tx)
        total = len(members) / power + hops + (m - 1) * max(1.0 / power, slowest)
        if total < best:
            best, keep = total, len(members)
    return best, np.array(members[:keep], dtype=np.int64)


def _spanning_tree(w: Floats) -> list[tuple[int, int]]:
    """Edges of a minimum spanning tree (Prim), lightest first."""
    n = len(w)
    w = np.minimum(w, w.T)
    near = w[0].copy()
    via = np.zeros(n, dtype=np.int64)
    left = np.ones(n, dtype=bool)
    left[0] = False
    edges = []
    for _ in range(n - 1):
        j = int(np.where(left, near, np.inf).argmin())
        if not left[j]:
            j = int(np.flatnonzero(left)[0])
        edges.append((int(via[j]), j))
        left[j] = False
        closer = left & (w[j] < near)
        near[closer] = w[j][closer]
        via[closer] = j
    return sorted(edges, key=lambda e: float(w[e]))

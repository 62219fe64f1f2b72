"""What the dynamic programme of `dp` looks up: work, hops, codec times and memory, by device and threshold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion_p2p.planner.costs import INF, Costs
from fusion_p2p.planner.workload import Floats

Ints = npt.NDArray[np.int64]
SLACK = 1 + 1e-9  # thresholds are compared with this much room for rounding


def groups_of(costs: Costs) -> Ints:
    """Group number per device: devices of a group have the same links to all others and among themselves."""
    net = costs.net
    n = len(net)
    bw, lat = net.bandwidth_bytes_per_s, net.latency_s
    same = np.ones((n, n), dtype=bool)
    for a in (bw, lat, bw.T, lat.T):
        for i in range(n):
            eq = a[i][None, :] == a  # row i against every row j, except columns i and j
            eq[:, i] = True
            eq[np.arange(n), np.arange(n)] = True
            same[i] &= eq.all(axis=1)
    same &= (bw == bw.T) & (lat == lat.T) | np.eye(n, dtype=bool)
    label = np.full(n, -1, dtype=np.int64)
    count = 0
    for i in range(n):
        if label[i] < 0:
            members = [j for j in np.flatnonzero(same[i]) if label[j] < 0]
            kept: list[int] = []
            for j in members:  # also alike among themselves
                if all(bw[j, k] == bw[kept[0], kept[1]] for k in kept[:1] if len(kept) > 1):
                    kept.append(int(j))
            label[kept] = count
            count += 1
    return label


@dataclass(frozen=True, eq=False)
class Early:
    """Stages start..stop (positions) that fit although one that begins later does not, by row b * D + d: those of row r
    are begin[r] .. begin[r + 1] - 1."""

    begin: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Memory:
    """Which stages fit: need_bytes[p, q] (m, m) of a stage from p to q, room_bytes (D,) of each device, below 0: takes
    none. lo, may (D, m): the first position from which every stage that ends at q fits, and from which one may."""

    need_bytes: Floats
    room_bytes: Floats
    lo: Ints
    may: Ints

    def fits(self, device: int, q: int) -> npt.NDArray[np.bool_]:
        """(q,): for each position before q, whether a stage from there to q fits the device."""
        out: npt.NDArray[np.bool_] = self.need_bytes[:q, q] <= self.room_bytes[device]
        return out


@dataclass(frozen=True, eq=False)
class Tables:
    """Everything the sweep looks up. Positions are a subset `at` of 0..n (first 0, last n), m of them.

    hop_s[u, b, e, g] (class-wise): seconds that a hop adds to a round trip, INF where not allowed; u numbers the
    distinct cut sizes. spans[ki][ko][.., b, d, q]: where `_sparse` has the least over all first positions from which
    every stage of device d ending at q fits; early[ki][ko]: those before them, which fit because codec time or memory
    varies with the cut (None: none).
    """

    at: Ints
    thresholds: Floats
    work_s: Floats  # (D, m)
    group: Ints
    size_of: Ints  # (m,) distinct size number
    hop_s: tuple[Floats, ...]  # per class: (U, B, G, G), from group g to group e, indexed [u, b, e, g]
    codec_s: Floats  # (K, m) seconds each end pays for a hop of class k at a position
    levels: int  # of `_sparse`
    spans: tuple[tuple[tuple[Ints, Ints], ...], ...]
    early: tuple[tuple[Early | None, ...], ...]
    memory: Memory
    classes: tuple[int, ...]  # classes that any hop uses
    paid_s: Floats | None = None  # (m, D, D) [q, s, e]: tied weights read before q on e, whose owner is on s


def build(
    costs: Costs,
    thresholds: Floats,
    at: Ints | None = None,
    group: Ints | None = None,
    *,
    relaxed: bool = False,
    devices: Iterable[int] | None = None,
) -> Tables:
    """Tables for these thresholds (seconds), over the positions `at` (all allowed ones by default).

    `relaxed`: every hop is charged the dearest codec's time in its stages (one class: faster, for screening).
    `devices`: those that sweeps will ask for (default all).
    """
    if at is None:
        at = np.flatnonzero(costs.cut_allowed)
    if group is None:
        group = groups_of(costs)
    work = np.ascontiguousarray(costs.work_s[:, at])
    sizes, size_of = np.unique(costs.w.cut_bytes[at], return_inverse=True)
    rates, class_of = np.unique(
        [r.encode_s_per_element + r.decode_s_per_element for r in costs.ladder.rungs], return_inverse=True
    )
    codec = rates[:, None] * costs.elements[at][None, :]
    codec[:, [0, -1]] = 0.0  # no hop at the ends
    if relaxed:
        codec, class_of = codec[-1:], np.zeros_like(class_of)
    hop = _hops(costs, thresholds, sizes, len(codec), class_of, group)
    classes = tuple(k for k in range(len(codec)) if np.isfinite(hop[k]).any())
    memory = _memory(costs, at)
    used = range(len(work)) if devices is None else sorted(devices)
    lo, early = _windows(work, codec, thresholds, memory, classes, used)
    levels = _levels((x for row in lo for x in row), len(at))
    spans = tuple(tuple(_spans(x, levels) for x in row) for row in lo)
    paid = None if relaxed else _paid(costs, at)
    return Tables(at, thresholds, work, group, size_of, hop, codec, levels, spans, early, memory, classes, paid)


def _paid(costs: Costs, at: Ints) -> Floats | None:
    """What tied weights add to a step, as a running sum over positions, given the host of the first stage.

    Exact where that stage is the first reader, as in a language model whose head is its embedding.
    """
    if not costs.w.shared:
        return None
    out = np.zeros((len(at), len(costs.net), len(costs.net)))
    for w in costs.w.shared:
        out[at > w.last] += w.size_bytes * costs.both_s_per_byte + costs.both_latency_s
    return out


def _pair_matrix(a: Floats, group: Ints, member: Ints) -> Floats:
    """(G, G) values of a (D, D) matrix between groups; inside a group, between its two first members."""
    out = a[np.ix_(member, member)].copy()
    for g in range(len(member)):
        mates = np.flatnonzero(group == g)
        out[g, g] = a[mates[0], mates[1]] if len(mates) > 1 else INF
    return out


def _hops(
    costs: Costs, thresholds: Floats, sizes: Floats, class_count: int, class_of: Ints, group: Ints
) -> tuple[Floats, ...]:
    member = np.unique(group, return_index=True)[1]  # one device of each group
    slow = _pair_matrix(costs.slow_s_per_byte, group, member)
    both = _pair_matrix(costs.both_s_per_byte, group, member)
    lat = _pair_matrix(costs.both_latency_s, group, member)
    both = np.where(np.isfinite(slow), both, 0.0)
    dense = np.where(np.isfinite(slow), slow, -1.0)[..., None] * sizes  # (G, G, U); below 0: no such pair
    elements = sizes / costs.w.wire_bytes_per_element
    cap = costs.upload_bytes[member] / 2  # a stage sends on two sides; half each keeps the sum within the cap
    cap = np.minimum(cap[:, None], cap[None, :])[..., None]
    share = np.array([r.byte_share for r in costs.ladder.rungs])
    codec = 2 * np.array([r.encode_s_per_element + r.decode_s_per_element for r in costs.ladder.rungs])
    out = [np.full((len(thresholds), *dense.shape), INF) for _ in range(class_count)]
    for b, threshold in enumerate(thresholds):
        allowed = costs.ladder.tau * threshold * SLACK / np.maximum(dense, 1e-30)
        rung = np.minimum(np.searchsorted(-share, -allowed), len(share) - 1)  # the first whose share is allowed
        sent = share[rung]
        seconds = sent * both[..., None] * sizes + lat[..., None] + codec[rung] * elements
        ok = (dense >= 0) & (sent * dense <= threshold * SLACK) & (sent * sizes * costs.m <= cap)
        for k in range(class_count):
            mine = ok & (class_of[rung] == k)
            out[k][b][mine] = seconds[mine]
    return tuple(np.ascontiguousarray(o.transpose(3, 0, 2, 1)) for o in out)


def _memory(costs: Costs, at: Ints) -> Memory:
    """Found once for these costs and positions: sweeps differ in their thresholds only."""
    key = at.tobytes()
    if key not in costs.memory_of:
        need = costs.span_bytes(at)
        room = np.where(costs.room_bytes < 0, -1.0, costs.room_bytes * (1 + 1e-12) + 1e-6)
        m = len(at)
        lo, may = np.full((len(room), m), m), np.full((len(room), m), m)
        for q in range(m):
            here = need[:q, q]
            later = np.maximum.accumulate(here[::-1])  # ascending: the most that any stage from there on needs
            least = np.minimum.accumulate(here)[::-1]  # ascending too
            lo[:, q] = q - np.searchsorted(later, room, side="right")
            may[:, q] = q - np.searchsorted(least, room, side="right")
        lo[room < 0] = may[room < 0] = m
        costs.memory_of[key] = Memory(need, room, lo, may)
    return costs.memory_of[key]


def _windows(
    work: Floats, codec: Floats, thresholds: Floats, memory: Memory, classes: Sequence[int], devices: Iterable[int]
) -> tuple[tuple[tuple[Ints, ...], ...], tuple[tuple[Early | None, ...], ...]]:
    """Per (class in, class out): lo[b, d, q], the first position from which every stage fits, and those before."""
    d, m = work.shape
    k_all = len(codec)
    bent = bool((memory.may < memory.lo).any())  # a stage may fit although one that begins later does not
    lo: list[tuple[Ints, ...]] = []
    early: list[tuple[Early | None, ...]] = []
    for ki in range(k_all):
        row: list[Ints] = []
        row_early: list[Early | None] = []
        for ko in range(k_all):
            if not {ki, ko} <= ({0} | set(classes)):
                row.append(np.broadcast_to(np.arange(m), (1, 1, m)))  # never looked up: nothing fits
                row_early.append(None)
                continue
            key = work - codec[ki]
            sure = np.minimum.accumulate(key[:, ::-1], axis=1)[:, ::-1]  # nondecreasing: all later ones are larger
            may = np.maximum.accumulate(key, axis=1)
            first = np.full((len(thresholds), d, m), m, dtype=np.int64)
            some = first.copy() if bent or codec[ki].any() else None
            for i in devices:
                need = ((work[i] + codec[ko])[None] - (thresholds * SLACK)[:, None]).ravel()
                first[:, i] = np.searchsorted(sure[i], need, side="left").reshape(-1, m)
                if some is not None:
                    some[:, i] = np.searchsorted(may[i], need, side="left").reshape(-1, m)
            row.append(np.maximum(first, memory.lo[None]))
            row_early.append(
                None
                if some is None
                else _early(np.maximum(some, memory.may), row[-1], key, work + codec[ko], thresholds, memory)
            )
        lo.append(tuple(row))
        early.append(tuple(row_early))
    return tuple(lo), tuple(early)


def _early(some: Ints, lo: Ints, begins: Floats, ends: Floats, thresholds: Floats, memory: Memory) -> Early:
    """From `some` to `lo` (B, D, m), those that fit: ends[d, q] - begins[d, p] at most the threshold, and memory."""
    m = lo.shape[-1]
    count = np.maximum(np.minimum(lo, np.arange(m)) - some, 0)
    b, d, q = np.nonzero(count)
    count = count[b, d, q]
    first = np.cumsum(count) - count
    of = np.repeat(np.arange(len(count)), count)
    p = np.arange(len(of)) + (some[b, d, q] - first)[of]
    need = ends[d, q] - thresholds[b] * SLACK
    fits = (begins[d[of], p] >= need[of]) & (memory.need_bytes[p, q[of]] <= memory.room_bytes[d[of]])
    p, of = p[fits], of[fits]
    begin = np.searchsorted((b * lo.shape[1] + d)[of], np.arange(lo.shape[0] * lo.shape[1] + 1))
    return Early(begin, p, q[of])


def _spans(lo: Ints, levels: int) -> tuple[Ints, Ints]:
    """Two places in `_sparse` (as level * m + position) whose lesser entry is the minimum over [lo[..., q], q);
    INF's if empty."""
    m = lo.shape[-1]
    q = np.arange(m)
    span = q - lo
    floor_log2 = np.array([max(x, 1).bit_length() - 1 for x in range(m + 1)])
    level = floor_log2[np.maximum(span, 0)]
    first = level * m + np.minimum(lo, m - 1)
    second = level * m + np.maximum(q - (1 << level), 0)
    empty = span <= 0
    first[empty] = second[empty] = levels * m
    return first, second


def _levels(lo: Iterable[Ints], m: int) -> int:
    """How many levels of `_sparse` the widest window looks up."""
    return max(1, *(int((np.arange(m) - x).max()).bit_length() for x in lo))

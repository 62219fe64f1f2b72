"""The exact dynamic programme over cut points for given orders of devices, with skipping (DESIGN section 5).

For a threshold B the programme finds, per order, the chain of least round trip whose every stage and hop takes at
most B. `Tables` holds what depends on (device, B); `sweep` runs many (order, B) pairs at once, one numpy call per
device of the order. State: F[k][q], the least round trip of a chain that ends at position q on the current device and
leaves room in its stage for a hop of codec class k. Devices with equal links form a group, of which only the best
is kept per position, so a step costs (groups x positions), not (devices x positions).

`reference` in dp_reference.py is the same programme written plainly; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
class Tables:
    """Everything the sweep looks up. Positions are a subset `at` of 0..n (first 0, last n), m of them.

    hop_s[b, e, g, u] (class-wise): seconds that a hop adds to a round trip, INF where not allowed; u numbers the
    distinct cut sizes. lo[ki][ko][b, d, q]: first position from which every stage of device d ending at q fits;
    early[ki][ko][b, d, q] <= lo: some between the two may fit, because codec time varies with the cut (None: none).
    """

    at: Ints
    thresholds: Floats
    work_s: Floats  # (D, m)
    group: Ints
    member: Ints  # one device of each group
    size_of: Ints  # (m,) distinct size number
    hop_s: tuple[Floats, ...]  # per class: (B, G, G, U), from group g to group e, indexed [b, e, g, u]
    codec_s: Floats  # (K, m) seconds each end pays for a hop of class k at a position
    lo: tuple[tuple[Ints, ...], ...]
    spans: tuple[tuple[tuple[Ints, Ints], ...], ...]  # lo as places in `_sparse`
    early: tuple[tuple[Ints | None, ...], ...]
    lo_hard: Ints  # (D, m): memory
    classes: tuple[int, ...]  # classes that any hop uses


def build(
    costs: Costs, thresholds: Floats, at: Ints | None = None, group: Ints | None = None, *, relaxed: bool = False
) -> Tables:
    """Tables for these thresholds (seconds), over the positions `at` (all allowed ones by default).

    `relaxed`: every hop is charged the dearest codec's time in its stages (one class: faster, for screening).
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
    count = int(group.max()) + 1
    member = np.array([int(np.flatnonzero(group == g)[0]) for g in range(count)], dtype=np.int64)
    hop = _hops(costs, thresholds, sizes, len(codec), class_of, group, member)
    classes = tuple(k for k in range(len(codec)) if np.isfinite(hop[k]).any())
    hard = _memory_lo(costs, at)
    lo, early = _windows(work, codec, thresholds, hard, classes)
    spans = tuple(tuple(_spans(x, len(at)) for x in row) for row in lo)
    return Tables(at, thresholds, work, group, member, size_of, hop, codec, lo, spans, early, hard, classes)


def _pair_matrix(a: Floats, group: Ints, member: Ints) -> Floats:
    """(G, G) values of a (D, D) matrix between groups; inside a group, between its two first members."""
    out = a[np.ix_(member, member)].copy()
    for g in range(len(member)):
        mates = np.flatnonzero(group == g)
        out[g, g] = a[mates[0], mates[1]] if len(mates) > 1 else INF
    return out


def _hops(
    costs: Costs, thresholds: Floats, sizes: Floats, class_count: int, class_of: Ints, group: Ints, member: Ints
) -> tuple[Floats, ...]:
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
    return tuple(np.ascontiguousarray(np.swapaxes(o, 1, 2)) for o in out)


def _memory_lo(costs: Costs, at: Ints) -> Ints:
    held = costs.held_bytes[at]
    need = held[None, :] - costs.room_bytes[:, None]
    lo = np.searchsorted(held, need * (1 - 1e-12) - 1e-6, side="left")
    return np.where(costs.room_bytes[:, None] < 0, len(at), lo)


def _windows(
    work: Floats, codec: Floats, thresholds: Floats, hard: Ints, classes: Sequence[int]
) -> tuple[tuple[tuple[Ints, ...], ...], tuple[tuple[Ints | None, ...], ...]]:
    """lo and early per (class in, class out); see Tables."""
    d, m = work.shape
    k_all = len(codec)
    lo: list[tuple[Ints, ...]] = []
    early: list[tuple[Ints | None, ...]] = []
    for ki in range(k_all):
        row: list[Ints] = []
        row_early: list[Ints | None] = []
        for ko in range(k_all):
            if not {ki, ko} <= ({0} | set(classes)):
                row.append(np.zeros((1, 1, m), dtype=np.int64))
                row_early.append(None)
                continue
            key = work - codec[ki]
            sure = np.minimum.accumulate(key[:, ::-1], axis=1)[:, ::-1]  # nondecreasing: all later ones are larger
            may = np.maximum.accumulate(key, axis=1)
            need = (work + codec[ko])[None] - (thresholds * SLACK)[:, None, None]
            first = np.empty((len(thresholds), d, m), dtype=np.int64)
            some = np.empty_like(first) if codec[ki].any() else None
            for i in range(d):
                first[:, i] = np.searchsorted(sure[i], need[:, i].ravel(), side="left").reshape(-1, m)
                if some is not None:
                    some[:, i] = np.searchsorted(may[i], need[:, i].ravel(), side="left").reshape(-1, m)
            row.append(np.maximum(first, hard[None]))
            row_early.append(None if some is None else np.maximum(some, hard[None]))
        lo.append(tuple(row))
        early.append(tuple(row_early))
    return tuple(lo), tuple(early)


@dataclass(frozen=True, eq=False)
class Found:
    """`round_trip_s[a]`: least round trip of pair a, INF if none. `chain(a)` walks back its hosts and cuts."""

    round_trip_s: Floats
    tables: Tables
    orders: Ints
    thresholds_of: Ints
    states: list[list[Floats]]  # per step, per class in `classes`+0: (A, m)
    skip: bool

    def chain(self, a: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _walk_back(self, a)


def sweep(t: Tables, orders: Ints, thresholds_of: Ints, *, skip: bool = True) -> Found:
    """Run every pair (orders[a], thresholds[thresholds_of[a]]). `skip` False: every device of the order is used."""
    a_count, steps = orders.shape
    m = len(t.at)
    ks = sorted({0} | set(t.classes))
    slot, seen = _slots(t.group[orders])
    groups = np.zeros((a_count, int(slot.max()) + 1), dtype=np.int64)
    rows = np.arange(a_count)
    groups[rows[:, None], slot] = t.group[orders]
    # best_of[k][a, slot] holds positions sorted by cut size, so that a hop's seconds are one number per slice.
    best_of = {k: np.full((a_count, groups.shape[1], m), INF) for k in t.classes}
    sort = np.argsort(t.size_of, kind="stable")
    unsort = np.argsort(sort)
    ends = np.searchsorted(t.size_of[sort], np.arange(t.size_of.max() + 2))
    by_size = [(u, slice(int(a), int(b))) for u, (a, b) in enumerate(pairwise(ends))]
    states: list[list[Floats]] = []
    done = np.full(a_count, INF)
    for s in range(steps):
        dev = orders[:, s]
        grp = t.group[dev]
        enter = {k: np.full((a_count, m), INF) for k in {0, *t.classes}}
        if s:
            n = seen[s - 1]
            for k in t.classes:
                hop = t.hop_s[k][thresholds_of[:, None], grp[:, None], groups[:, :n]]  # (A, n, U)
                entered = np.empty((a_count, m))
                for u, part in by_size:
                    np.min(best_of[k][:, :n, part] + hop[:, :, u, None], axis=1, out=entered[:, part])
                enter[k] = entered[:, unsort]
        if skip or s == 0:
            enter[0][:, 0] = 0.0
        out = advance(t, enter, dev, thresholds_of)
        states.append([out[k] for k in ks])
        for k in t.classes:
            now = out[k][:, sort]
            if skip:
                now = np.minimum(best_of[k][rows, slot[:, s]], now)
            else:
                best_of[k].fill(INF)
            best_of[k][rows, slot[:, s]] = now
        done = np.minimum(done, out[0][:, -1]) if skip else out[0][:, -1]
    return Found(done, t, orders, thresholds_of, states, skip)


def _slots(group: Ints) -> tuple[Ints, list[int]]:
    """(slot (A, S), seen): groups numbered as they appear in each order; seen[s]: most groups after step s."""
    slot = np.zeros_like(group)
    for a, row in enumerate(group.tolist()):
        first: dict[int, int] = {}
        slot[a] = [first.setdefault(g, len(first)) for g in row]
    seen = np.maximum.accumulate(slot.max(axis=0)) + 1
    return slot, [int(x) for x in seen]


def advance(t: Tables, enter: dict[int, Floats], dev: Ints, thresholds_of: Ints) -> dict[int, Floats]:
    """Place a stage of dev[a] after entering at every position: enter[k] (A, m) by hop class -> F[k] (A, m)."""
    work = t.work_s[dev]
    out: dict[int, Floats] = {}
    rows = np.arange(len(work))[:, None]
    tables = {ki: _sparse(g - work) for ki, g in enter.items()}
    for ko in sorted({0, *t.classes}):
        total = np.full(work.shape, INF)
        for ki, table in tables.items():
            first, second = t.spans[ki][ko]
            f: Floats = np.minimum(table[rows, first[thresholds_of, dev]], table[rows, second[thresholds_of, dev]])
            _add_early(t, ki, ko, table, f, thresholds_of, dev)
            np.minimum(total, f, out=total)
        out[ko] = total + work
    return out


def _spans(lo: Ints, m: int) -> tuple[Ints, Ints]:
    """Two places in a row of `_sparse` whose lesser entry is the minimum over [lo[..., q], q); INF's if empty."""
    q = np.arange(m)
    span = q - lo
    level = np.frexp(np.maximum(span, 1).astype(np.float64))[1].astype(np.int64) - 1  # floor of the binary logarithm
    first = level * m + np.minimum(lo, m - 1)
    second = level * m + np.maximum(q - (1 << level), 0)
    empty = span <= 0
    first[empty] = second[empty] = _levels(m) * m
    return first, second


def _levels(m: int) -> int:
    return max(1, m.bit_length())


def _sparse(v: Floats) -> Floats:
    """(A, levels * m + 1): per row the minima of every run of 1, 2, 4, ... entries, then INF."""
    a, m = v.shape
    out = np.full((a, _levels(m) * m + 1), INF)
    out[:, :m] = v
    width = 1
    for level in range(1, _levels(m)):
        before = out[:, (level - 1) * m : level * m]
        here = out[:, level * m : (level + 1) * m]
        if width < m:
            np.minimum(before[:, : m - width], before[:, width:], out=here[:, : m - width])
        width *= 2
    return out


def _add_early(t: Tables, ki: int, ko: int, v: Floats, f: Floats, thresholds_of: Ints, dev: Ints) -> None:
    """Positions below lo that fit although a later one does not; in place into f."""
    early = t.early[ki][ko]
    if early is None:
        return
    top = np.minimum(t.lo[ki][ko][thresholds_of, dev], np.arange(f.shape[1]))
    count = top - early[thresholds_of, dev]
    a, q = np.nonzero(count > 0)
    count, top = count[a, q], top[a, q]
    d = dev[a]
    need = t.work_s[d, q] + t.codec_s[ko, q] - t.thresholds[thresholds_of[a]] * SLACK
    for back in range(1, int(count.max(initial=0)) + 1):
        on = count >= back
        a, q, d, need, count, top = a[on], q[on], d[on], need[on], count[on], top[on]
        p = top - back
        ok = t.work_s[d, p] - t.codec_s[ki, p] >= need
        f[a[ok], q[ok]] = np.minimum(f[a[ok], q[ok]], v[a[ok], p[ok]])


def _walk_back(found: Found, a: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Hosts and cuts of pair a: from its end, each time the predecessor that gives the state's value."""
    t, b = found.tables, int(found.thresholds_of[a])
    ks = sorted({0} | set(t.classes))
    order = found.orders[a]
    path = {k: np.array([state[i][a] for state in found.states]) for i, k in enumerate(ks)}  # (step, position)
    limit = float(t.thresholds[b]) * SLACK * (1 + 1e-12)
    s = int(path[0][:, -1].argmin()) if found.skip else len(order) - 1
    q, ko = len(t.at) - 1, 0
    hosts, starts = [int(order[s])], list[int]()
    while True:
        d = order[s]
        value = float(path[ko][s, q])
        work = t.work_s[d, q] - t.work_s[d, :q]
        spent = work + t.codec_s[ko, q]
        fits = np.arange(q) >= t.lo_hard[d, q]
        if fits[0] and (found.skip or s == 0) and spent[0] <= limit and _close(work[0], value):
            return tuple(reversed(hosts)), tuple(reversed(starts))
        nearest = np.arange(s - 1, -1 if found.skip else s - 2, -1)
        best = (INF, s, q, ko)
        for k in t.classes:
            hop = t.hop_s[k][b, t.group[d], t.group[order[nearest]]][:, t.size_of[:q]]
            v = path[k][nearest, :q] + hop + np.where(fits & (spent + t.codec_s[k, :q] <= limit), work, INF)
            at = int(v.argmin())
            if v.flat[at] < best[0]:
                best = (float(v.flat[at]), int(nearest[at // q]), at % q, k)
        if not _close(best[0], value):
            raise AssertionError(f"no predecessor gives {value} at step {s}, position {q}: {best}")
        _, s, q, ko = best
        hosts.append(int(order[s]))
        starts.append(int(t.at[q]))


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-15

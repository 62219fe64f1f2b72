"""The exact dynamic programme over cut points for given orders of devices, with skipping (DESIGN section 5).

For a threshold B the programme finds, per order, the chain of least round trip whose every stage and hop takes at
most B. `Tables` holds what depends on (device, B); `sweep` runs many (order, B) pairs at once, one numpy call per
device of the order. State: F[k][q], the least round trip of a chain that ends at position q on the current device and
leaves room in its stage for a hop of codec class k. Devices with equal links form a group, of which only the best
is kept per position, so a step costs (groups x positions), not (devices x positions).

Plain numpy: whole plans for 48, 200 and 1,000 peers take 0.15, 0.19 and 0.53 s of CPU on a busy machine; importing
numba 0.68 takes 0.16 s, and compiling one small kernel 0.59 s, before anything is planned.

`reference` in dp_reference.py is the same programme written plainly; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, eq=False)
class Found:
    """`round_trip_s[a]`: least round trip of pair a, INF if none. `chain(a)` walks back its hosts and cuts."""

    round_trip_s: Floats
    tables: Tables
    orders: Ints
    thresholds_of: Ints
    states: list[list[Floats]]  # per step, per class in `classes`+0: (m, A)
    skip: bool
    starts: Ints | None = None

    def chain(self, a: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _walk_back(self, a)


def sweep(t: Tables, orders: Ints, thresholds_of: Ints, *, skip: bool = True, starts: Ints | None = None) -> Found:
    """Run every pair (orders[a], thresholds[thresholds_of[a]]). `skip` False: every device of the order is used.

    `starts`: the device of each pair's first stage, so that tied weights count; None: any, and they do not.
    Pairs lie along the last axis, so that every numpy call runs over long rows.
    """
    a_count, steps = orders.shape
    m = len(t.at)
    ks = sorted({0} | set(t.classes))
    slot, seen = _slots(t.group[orders]) if skip else (np.zeros_like(orders), [1] * steps)
    groups = np.zeros((seen[-1], a_count), dtype=np.int64)  # by slot; without skipping, that of the device before
    pairs = np.arange(a_count)
    # best_of[k][slot] holds positions sorted by cut size, so that a hop's seconds are one number per slice.
    best_of = {k: np.full((seen[-1], m, a_count), INF) for k in t.classes}
    sort = np.argsort(t.size_of, kind="stable")
    unsort = np.argsort(sort)
    ends = np.searchsorted(t.size_of[sort], np.arange(t.size_of.max() + 2))
    by_size = [(u, slice(int(a), int(b))) for u, (a, b) in enumerate(pairwise(ends))]
    room, entered = np.empty((seen[-1], int(np.diff(ends).max()), a_count)), np.empty((m, a_count))
    states: list[list[Floats]] = []
    done = np.full(a_count, INF)
    for s in range(steps):
        dev = orders[:, s]
        grp = t.group[dev]
        enter = {0: np.full((m, a_count), INF)}
        if s:
            n = seen[s - 1]
            for k in t.classes:
                hop = t.hop_s[k][:, thresholds_of, grp, groups[:n]]  # (U, n, A)
                for u, part in by_size:
                    sums = np.add(best_of[k][:n, part], hop[u][:, None, :], out=room[:n, : part.stop - part.start])
                    np.minimum.reduce(sums, axis=0, out=entered[part])
                enter[k] = entered[unsort]
        if skip or s == 0:
            enter[0][0] = 0.0 if starts is None else np.where(dev == starts, 0.0, INF)
        out = advance(t, enter, dev, thresholds_of, starts)
        states.append([out[k] for k in ks])
        groups[slot[:, s], pairs] = grp
        for k in t.classes:
            now = out[k][sort]
            if skip:
                here = slot[:, s]
                now = np.minimum(best_of[k][here, :, pairs].T, now)
                best_of[k][here, :, pairs] = now.T
            else:
                best_of[k][0] = now
        done = np.minimum(done, out[0][-1]) if skip else out[0][-1]
    return Found(done, t, orders, thresholds_of, states, skip, starts)


def _slots(group: Ints) -> tuple[Ints, list[int]]:
    """(slot (A, S), seen): groups numbered as they appear in each order; seen[s]: most groups after step s."""
    slot = np.zeros_like(group)
    for a, row in enumerate(group.tolist()):
        first: dict[int, int] = {}
        slot[a] = [first.setdefault(g, len(first)) for g in row]
    seen = np.maximum.accumulate(slot.max(axis=0)) + 1
    return slot, [int(x) for x in seen]


def advance(
    t: Tables, enter: dict[int, Floats], dev: Ints, thresholds_of: Ints, starts: Ints | None = None
) -> dict[int, Floats]:
    """Place a stage of dev[a] after entering at every position: enter[k] (m, A) by hop class -> F[k] (m, A)."""
    work = np.ascontiguousarray(t.work_s[dev].T)
    if starts is not None and t.paid_s is not None:
        work = work + t.paid_s[:, starts, dev]
    out: dict[int, Floats] = {}
    pairs = np.arange(len(dev))
    tables = {ki: _sparse(g - work, t.levels) for ki, g in enter.items()}
    flat = {ki: table.ravel() for ki, table in tables.items()}
    for ko in sorted({0, *t.classes}):
        total = np.full(work.shape, INF)
        for ki, table in tables.items():
            first, second = (np.ascontiguousarray(x[thresholds_of, dev].T) * len(dev) + pairs for x in t.spans[ki][ko])
            f: Floats = np.minimum(flat[ki].take(first), flat[ki].take(second))
            if (early := t.early[ki][ko]) is not None:
                _add_early(early, table, f, thresholds_of * len(t.work_s) + dev)
            np.minimum(total, f, out=total)
        out[ko] = total + work
    return out


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


def _sparse(v: Floats, levels: int) -> Floats:
    """(levels * m + 1, A) of (m, A): the minima of every run of 1, 2, 4, ... positions, then INF."""
    m, a = v.shape
    out = np.empty((levels * m + 1, a))
    out[-1] = INF
    out[:m] = v
    width = 1
    for level in range(1, levels):
        before = out[(level - 1) * m : level * m]
        here = out[level * m : (level + 1) * m]
        np.minimum(before[: m - width], before[width:], out=here[: m - width])
        here[m - width :] = INF  # no run that long begins there
        width *= 2
    return out


def _add_early(early: Early, v: Floats, f: Floats, row_of: Ints) -> None:
    """Stages that `early` names for the rows `row_of` (A,), one per pair; in place into f. v, f: (m, A), contiguous."""
    begin, count = early.begin[row_of], early.begin[row_of + 1] - early.begin[row_of]
    total = int(count.sum())
    if total:
        at = np.arange(total) + np.repeat(begin - (np.cumsum(count) - count), count)
        pair = np.repeat(np.arange(len(row_of)), count)
        width = len(row_of)
        np.minimum.at(f.ravel(), early.stop[at] * width + pair, v.ravel()[early.start[at] * width + pair])


def _walk_back(found: Found, a: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Hosts and cuts of pair a: from its end, each time the predecessor that gives the state's value."""
    t, b = found.tables, int(found.thresholds_of[a])
    ks = sorted({0} | set(t.classes))
    order = found.orders[a]
    path = {k: np.array([state[i][:, a] for state in found.states]) for i, k in enumerate(ks)}  # (step, position)
    limit = float(t.thresholds[b]) * SLACK * (1 + 1e-12)
    s = int(path[0][:, -1].argmin()) if found.skip else len(order) - 1
    q, ko = len(t.at) - 1, 0
    hosts, starts = [int(order[s])], list[int]()
    while True:
        d = order[s]
        value = float(path[ko][s, q])
        work = t.work_s[d, q] - t.work_s[d, :q]
        spent = work + t.codec_s[ko, q]
        begins = found.skip or s == 0
        if found.starts is not None:
            begins = begins and d == found.starts[a]
            if t.paid_s is not None:
                work = work + t.paid_s[q, found.starts[a], d] - t.paid_s[:q, found.starts[a], d]
        fits = t.memory.fits(d, q)
        if fits[0] and begins and spent[0] <= limit and _close(work[0], value):
            return tuple(reversed(hosts)), tuple(reversed(starts))
        nearest = np.arange(s - 1, -1 if found.skip else s - 2, -1)
        best = (INF, s, q, ko)
        for k in t.classes:
            hop = t.hop_s[k][:, b, t.group[d], t.group[order[nearest]]].T[:, t.size_of[:q]]
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

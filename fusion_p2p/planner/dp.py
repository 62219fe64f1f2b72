"""The exact dynamic programme over cut points for given orders of devices, with skipping (DESIGN section 5).

For a threshold B the programme finds, per order, the chain of least round trip whose every stage and hop takes at most
B. `Tables` (dp_tables.py) holds what depends on (device, B); `sweep` runs many (order, B) pairs at once, one numpy
call per device of the order. State: F[k][q], the least round trip of a chain that ends at position q on the current
device and leaves room in its stage for a hop of codec class k. Devices with equal links form a group, of which only
the best is kept per position, so a step costs (groups x positions), not (devices x positions).

Plain numpy: whole plans for 48, 200 and 1,000 peers take 0.15, 0.19 and 0.53 s of CPU on a busy machine; importing
numba 0.68 takes 0.16 s, and compiling one small kernel 0.59 s, before anything is planned.

`reference` in dp_reference.py is the same programme written plainly; tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fusion_p2p.planner.costs import INF
from fusion_p2p.planner.dp_tables import SLACK, Early, Ints, Tables
from fusion_p2p.planner.workload import Floats


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

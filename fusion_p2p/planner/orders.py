"""Candidate orders of devices: fences in several sequences, peers inside them (DESIGN section 5).

The search adds the reverse of those that do well.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fusion_p2p.planner.fences import Fences, average_linkage, leaves
from fusion_p2p.planner.workload import Floats

Order = tuple[int, ...]


def candidate_orders(fences: Fences, hop_s: Floats, whole_s: Floats, limit: int = 20) -> list[Order]:
    """At most `limit` distinct orders of all devices in `fences`.

    hop_s: (D, D) symmetric round-trip seconds of a typical hop; whole_s: seconds of the whole model per device.
    """
    n_all = sorted(d for f in fences for d in f)
    log_hop = np.log(np.maximum(hop_s, 1e-9))
    inside = [_inside(f, hop_s, log_hop, whole_s) for f in fences]
    between = _fence_hops(fences, hop_s)
    power = np.array([sum(1.0 / whole_s[d] for d in f) for f in fences])
    single = np.array([max(1.0 / whole_s[d] for d in f) for f in fences])
    sequences: list[list[int]] = [list(np.argsort(-power, kind="stable")), list(np.argsort(-single, kind="stable"))]
    starts = list(dict.fromkeys([*np.argsort(-power)[:4], *np.argsort(-single)[:2]]))
    sequences += [_two_opt(_greedy(int(s), between, power), between) for s in starts]
    greedy = [_greedy(int(s), between, power) for s in starts]
    sequences += greedy + [_two_opt(g, between, first=1) for g in greedy]
    if len(fences) > 2:
        sequences.append(leaves(average_linkage(np.log(np.maximum(between, 1e-9))), between))
    out: list[Order] = []
    for seq in sequences:
        for variant in range(2):
            out.append(_join(seq, inside, variant, hop_s))
    sub = np.ix_(n_all, n_all)
    if len(n_all) > 2:
        tree = leaves(average_linkage(log_hop[sub]), log_hop[sub])
        out.append(tuple(n_all[i] for i in tree))
    out.append(tuple(sorted(n_all, key=lambda d: float(whole_s[d]))))
    return distinct(out)[:limit]


def distinct(orders: Iterable[Order]) -> list[Order]:
    return list(dict.fromkeys(tuple(int(x) for x in o) for o in orders))


def neighbours(order: Order, fence_of: Mapping[int, int], rng: random.Random, count: int) -> list[Order]:
    """`order` and up to `count` - 1 others: runs of one fence moved, reversed or swapped, single devices moved."""
    runs: list[list[int]] = []
    for d in order:
        if runs and fence_of.get(runs[-1][-1], -1) == fence_of.get(d, -1):
            runs[-1].append(d)
        else:
            runs.append([d])
    out = [order]
    for _ in range(4 * count):
        r = [list(x) for x in runs]
        kind = rng.randrange(4) if len(runs) > 1 else rng.randrange(2) * 3
        i, j = rng.randrange(len(r)), rng.randrange(len(r))
        if kind == 0:
            r[i].reverse()
        elif kind == 1:
            r[i], r[j] = r[j], r[i]
        elif kind == 2:
            moved = r.pop(i)
            r.insert(rng.randrange(len(r) + 1), moved[::-1] if rng.random() < 0.5 else moved)
        flat = [d for x in r for d in x]
        if kind == 3:
            d = flat.pop(rng.randrange(len(flat)))
            flat.insert(rng.randrange(len(flat) + 1), d)
        out.append(tuple(flat))
    return distinct(out)[:count]


def _inside(fence: Sequence[int], hop_s: Floats, log_hop: Floats, whole_s: Floats) -> list[list[int]]:
    """Two orders of a fence's peers: nearest-neighbour path from the fastest with 2-opt, and machines by speed."""
    f = sorted(fence, key=lambda d: float(whole_s[d]))
    if len(f) <= 2:
        return [list(f), list(f)]
    sub = hop_s[np.ix_(f, f)]
    tour = _two_opt(_greedy(0, sub, np.array([1.0 / whole_s[d] for d in f])), sub)
    tree = leaves(average_linkage(log_hop[np.ix_(f, f)]), sub)
    return [[f[i] for i in tour], [f[i] for i in tree]]


def _fence_hops(fences: Fences, hop_s: Floats) -> Floats:
    n = len(fences)
    out = np.zeros((n, n))
    for i, a in enumerate(fences):
        for j in range(i):
            out[i, j] = out[j, i] = float(np.median(hop_s[np.ix_(a, fences[j])]))
    return out


def _greedy(start: int, hop_s: Floats, power: Floats) -> list[int]:
    """Nearest neighbour from `start`; among neighbours equally near (within 10%) the most powerful."""
    left = set(range(len(hop_s))) - {start}
    seq = [start]
    while left:
        ids = np.array(sorted(left))
        d = hop_s[seq[-1], ids]
        near = ids[d <= d.min() * 1.1]
        nxt = int(near[int(power[near].argmax())])
        seq.append(nxt)
        left.remove(nxt)
    return seq


def _two_opt(seq: list[int], hop_s: Floats, rounds: int = 4, first: int = 0) -> list[int]:
    """Shorten an open path by reversing segments from place `first` on, best move per start, a few rounds."""
    s = np.array(seq)
    n = len(s)
    if n < 4:
        return seq
    for _ in range(rounds):
        better = False
        for i in range(first, n - 2):
            before = hop_s[s[i - 1], s[i]] if i else 0.0
            j = np.arange(i + 1, n)
            after = np.append(hop_s[s[j[:-1]], s[j[:-1] + 1]], 0.0)
            new = (hop_s[s[i - 1], s[j]] if i else 0.0) + np.append(hop_s[s[i], s[j[:-1] + 1]], 0.0)
            gain = before + after - new
            k = int(gain.argmax())
            if gain[k] > 1e-12:
                s[i : j[k] + 1] = s[i : j[k] + 1][::-1].copy()
                better = True
        if not better:
            break
    return [int(x) for x in s]


def _join(seq: Sequence[int], inside: Sequence[Sequence[Sequence[int]]], variant: int, hop_s: Floats) -> Order:
    """Fences in sequence, each in the direction whose first peer is nearer to the last one placed."""
    out: list[int] = []
    for f in seq:
        part = list(inside[f][variant])
        if out and hop_s[out[-1], part[-1]] < hop_s[out[-1], part[0]]:
            part.reverse()
        out += part
    return tuple(out)

"""The dynamic programme of dp.py written plainly, and brute force: what the fast code is tested against.

O(D^2 n^2) per order and threshold, plain loops; for small problems only.
"""

from __future__ import annotations

from itertools import combinations, permutations

from fusion_p2p.planner.costs import INF, Chain, Costs, Score

SLACK = 1 + 1e-9


def least_round_trip(costs: Costs, order: tuple[int, ...], threshold_s: float, *, skip: bool = True) -> float:
    """Least round trip of a chain along `order` whose every stage and hop takes at most `threshold_s`."""
    n = costs.w.atoms
    rates = sorted({r.encode_s_per_element + r.decode_s_per_element for r in costs.ladder.rungs} | {0.0})
    best: dict[tuple[int, int, float], float] = {}  # (place in order, end, rate of the hop out) -> seconds
    for s, e in enumerate(order):
        for q in range(1, n + 1):
            for rate_out in rates:
                for p in range(q):
                    if not costs.cut_allowed[p] or not _fits(costs, e, p, q):
                        continue
                    work = float(costs.work_s[e, q] - costs.work_s[e, p])
                    out_s = rate_out * float(costs.elements[q])
                    options = [(0.0, 0.0)] if p == 0 and (skip or s == 0) else []
                    for b in range(s) if skip else range(max(0, s - 1), s):
                        hop = _hop(costs, order[b], e, p, threshold_s)
                        if p and hop is not None:
                            options.append((best.get((b, p, hop[1]), INF) + hop[0], hop[1]))
                    for before, rate_in in options:
                        spent = work + out_s + rate_in * float(costs.elements[p])
                        if spent <= threshold_s * SLACK:
                            key = (s, q, rate_out)
                            best[key] = min(best.get(key, INF), before + work)
    ends = range(len(order)) if skip else (len(order) - 1,)
    return min(best.get((s, n, 0.0), INF) for s in ends)


def _fits(costs: Costs, e: int, p: int, q: int) -> bool:
    held = costs.w.stage_bytes(p, q, costs.window).total
    return costs.room_bytes[e] >= 0 and held <= float(costs.room_bytes[e]) * (1 + 1e-12) + 1e-6


def _hop(costs: Costs, a: int, b: int, p: int, threshold_s: float) -> tuple[float, float] | None:
    """(round-trip seconds with codecs, codec rate) of the hop a -> b at p, None if slower than the threshold."""
    dense = float(costs.w.cut_bytes[p] * costs.slow_s_per_byte[a, b])
    rung = costs.rungs_at((a, b), (p,), threshold_s)[0]
    if rung.byte_share * dense > threshold_s * SLACK:
        return None
    rate = rung.encode_s_per_element + rung.decode_s_per_element
    size = rung.byte_share * float(costs.w.cut_bytes[p])
    seconds = size * float(costs.both_s_per_byte[a, b]) + float(costs.both_latency_s[a, b])
    return seconds + 2 * rate * float(costs.elements[p]), rate


def brute_force(costs: Costs) -> tuple[Chain, Score] | None:
    """Every subset, order and set of cuts. Factorial: at most 6 devices and a dozen atoms."""
    inner = [p for p in range(1, costs.w.atoms) if costs.cut_allowed[p]]
    best: tuple[Chain, Score] | None = None
    for count in range(1, min(len(costs.net), len(inner) + 1) + 1):
        for cuts in combinations(inner, count - 1):
            for hosts in permutations(range(len(costs.net)), count):
                found = costs.fit(hosts, cuts)
                if found[1].fits and (best is None or found[1].step_s < best[1].step_s):
                    best = found
    return best

"""How many micro-batches a stage holds in flight: the fewest that cost nothing in the simulation."""

from __future__ import annotations

import math
from dataclasses import replace

from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.simulate import Options, Schedule, simulate

Windows = tuple[tuple[int, ...], Schedule]
LOSS = 0.01  # of the step time, that bounding what is in flight may cost


def choose_windows(costs: Costs, chain: Chain, score: Score, free: Schedule, options: Options) -> Windows:
    """(window per stage, the step's schedule under them, without spans), from `free`, the one without bounds.

    First guess: the seconds of what is downstream over the pace, plus half for what waits.
    """
    trips = _downstream_s(costs, chain, score)
    for factor in (1.5, 3.0):
        windows = tuple(min(costs.m, math.ceil(factor * t / score.bottleneck_s) + 1) for t in trips)
        limited = simulate(costs, chain, replace(options, windows=windows), spans=False)
        if limited.step_s <= free.step_s * (1 + LOSS):
            return windows, limited
    return (costs.m,) * len(chain.hosts), free


def _downstream_s(costs: Costs, chain: Chain, score: Score) -> list[float]:
    """Per stage: seconds from the start of its forward to the end of its backward in an empty pipeline."""
    out = [0.0] * len(chain.hosts)
    after = 0.0
    for k in range(len(chain.hosts) - 1, -1, -1):
        out[k] = after + score.stage_s[k]
        if k:
            i, j = chain.hosts[k - 1], chain.hosts[k]
            size = chain.rungs[k - 1].byte_share * float(costs.w.cut_bytes[chain.cuts[k - 1]])
            after = out[k] + float(costs.both_latency_s[i, j]) + size * float(costs.both_s_per_byte[i, j])
    return out

"""How many steps between complete sets: from the state's size, the way it travels, and how often hosts are lost. Pure.

A loss costs half an interval of steps done again, a set costs the copying, hashing and writing of the state. The least
of both together is at sqrt(2 x cost / rate of losses) seconds (Young 1974). A set must also be through before the next
one begins.
"""

from __future__ import annotations

import math

SET_S = 0.05  # round trips and fsyncs of a set, however small
COPY_BYTES_PER_S = 300e6  # copied, hashed and written beside the training; 280-450 MB/s on the CI machine
PRIOR_S = 3600.0  # as if one host had been lost in this time before the run began
SLACK = 1.25  # of the time that a set takes to travel


def losses_per_s(losses: int, elapsed_s: float) -> float:
    """The rate of losses in the whole run, `losses` of them seen in `elapsed_s`."""
    return (1 + losses) / (PRIOR_S + max(0.0, elapsed_s))


def mark_interval(*, step_s: float, state_bytes: int, bytes_per_s: float, rate: float, most: int) -> int:
    """Steps from one set to the next, 1 to `most`; `state_bytes`: of the largest stage, which travels at `bytes_per_s`.

    `rate`: losses per second. `most` where nothing is known of the steps yet.
    """
    if most < 1:
        return 0
    if step_s <= 0 or rate <= 0:
        return most
    best_s = math.sqrt(2 * (SET_S + state_bytes / COPY_BYTES_PER_S) / rate)
    through_s = SLACK * state_bytes / bytes_per_s if bytes_per_s > 0 else 0.0
    return max(1, min(most, math.ceil(max(best_s, through_s) / step_s)))

"""Swarm time: this machine's clock plus the offset measured against other peers. One for the whole process.

Records expire in swarm time, and hivemind drops peers whose clock is more than 3 s off, so its own clock is replaced
by this one (`dht._hivemind`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

log = logging.getLogger("dht.clock")

MAX_OFFSET_S = 95.0  # 90 are promised, and measuring errs a little
_NOISE_S = 1.0  # differences below this are not corrected: they are mostly the way the answer took
_WARN_S = 3.0


class SwarmClock:
    """This machine's clock plus `offset_s`, what it lacks to the swarm's."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        """Swarm time, unix seconds."""
        return time.time() + self.offset_s

    def correct(self, samples_s: Sequence[float]) -> None:
        """`samples_s`: other peers' time minus this machine's, one per peer. Their median becomes the offset.

        Beyond MAX_OFFSET_S it is not believed: then either this clock is plainly wrong or the others are.
        """
        if not samples_s:
            return
        median = statistics.median(samples_s)
        if abs(median) > MAX_OFFSET_S:
            log.warning(
                "this clock differs by %.0f s from %d peers', too much to correct; set it: timedatectl set-ntp true",
                median,
                len(samples_s),
            )
            return
        offset = median if abs(median) > _NOISE_S else 0.0
        if abs(offset) > _WARN_S and abs(offset - self.offset_s) > _NOISE_S:
            log.warning(
                "this clock is %.1f s %s the swarm's, corrected; set it: timedatectl set-ntp true",
                abs(offset),
                "behind" if offset > 0 else "ahead of",
            )
        self.offset_s = offset


swarm_clock = SwarmClock()

"""One line of a kind and no more: who repeats itself is counted, not printed."""

from __future__ import annotations

from collections.abc import Hashable

QUIET_S = 60.0
LONG_WAIT_S = 5.0  # a wait beyond it is told
MOST_KEYS = 4096  # remembered; the longest silent are forgotten


class Quiet:
    """Pure: `now` is any clock's, which may go back."""

    def __init__(self, every_s: float = QUIET_S) -> None:
        self._every_s = every_s
        self._told: dict[Hashable, tuple[float, int]] = {}  # when last, and how often not since

    def may_tell(self, key: Hashable, now: float) -> int | None:
        """None: `key` was told within `every_s`. Else how often it was not since it was."""
        last, left_out = self._told.pop(key, (float("-inf"), 0))
        if abs(now - last) <= self._every_s:
            self._told[key] = last, left_out + 1
            return None
        if len(self._told) >= MOST_KEYS:
            del self._told[next(iter(self._told))]
        self._told[key] = now, 0
        return left_out

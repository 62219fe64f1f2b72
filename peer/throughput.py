"""How fast a channel's stream takes bytes, seen from its own traffic: a better figure than any probe, at no cost. Pure.

A busy spell lasts from the first byte put on the way until all is acknowledged, or LONG_S; its rate counts where it is
telling (`dht.rates`).
"""

from __future__ import annotations

from dht.rates import LONG_S, is_telling


class Throughput:
    """`pushed` and `acknowledged` are called as it happens, with the caller's clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._done = 0  # bytes of this spell that are acknowledged
        self._waiting = 0

    def pushed(self, count: int, now: float) -> None:
        if self._since is None:
            self._since, self._done = now, 0
        self._waiting += count

    def acknowledged(self, waiting: int, now: float) -> tuple[int, float] | None:
        """`waiting`: bytes not acknowledged yet. (bytes, seconds) of a spell that ends now and is worth counting."""
        self._done += max(0, self._waiting - waiting)
        self._waiting = waiting
        if self._since is None or (waiting and now - self._since < LONG_S):
            return None
        found = self._done, now - self._since
        self._since, self._done = (now if waiting else None), 0
        return found if is_telling(*found) else None

    def broke(self) -> None:
        """The stream ended: what a spell with a hole in it says is nothing."""
        self._since, self._done, self._waiting = None, 0, 0

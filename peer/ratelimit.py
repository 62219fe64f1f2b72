"""A volunteer's upload cap as a token bucket. Pure: the clock is passed in; `Limiter.take` sleeps on asyncio."""

from __future__ import annotations

import asyncio

SLICE_S = 0.05  # streams that share a cap wait for one another: tens of them stay within a heartbeat
MIN_SLICE_BYTES = 1 << 10
BURST_S, BURST_BYTES = 0.25, 256 << 10  # that may go at once after a rest: what BURST_S brings, at most BURST_BYTES


class Bucket:
    """`bytes_per_s` on average, at most `burst` bytes at once."""

    def __init__(self, bytes_per_s: float, *, burst: int, now: float) -> None:
        self._rate, self._burst, self._tokens, self._at = bytes_per_s, float(burst), float(burst), now

    def delay(self, count: int, now: float) -> float:
        """Take `count` bytes; the seconds to wait before they may be sent (debt is paid by later callers too)."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate) - count
        self._at = max(now, self._at)
        return max(0.0, -self._tokens / self._rate)


class Limiter:
    """`bytes_per_s` None: no cap. `burst` 0: what BURST_S brings, at most BURST_BYTES."""

    def __init__(self, bytes_per_s: float | None, *, burst: int = 0) -> None:
        self._rate, self._burst = bytes_per_s, burst
        self._bucket: Bucket | None = None

    def slice_bytes(self, most: int) -> int:
        """How much to put on a stream at once: so little that a capped sender never falls silent in between."""
        return most if self._rate is None else max(MIN_SLICE_BYTES, min(most, int(self._rate * SLICE_S)))

    async def take(self, count: int) -> None:
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        if self._bucket is None:
            burst = self._burst or int(min(BURST_BYTES, max(MIN_SLICE_BYTES, self._rate * BURST_S)))
            self._bucket = Bucket(self._rate, burst=burst, now=now)
        wait = self._bucket.delay(count, now)
        if wait > 0:
            await asyncio.sleep(wait)

    def set(self, bytes_per_s: float | None) -> None:
        """Another cap from now on."""
        if bytes_per_s != self._rate:
            self._rate, self._bucket = bytes_per_s, None

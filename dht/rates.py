"""Measuring a rate with few bytes: how much may be in flight, and what arrivals say. Pure; times are passed in.

A sender fills at most `Window.size` unacknowledged bytes, so that a slow link holds little when the probe ends, and
doubles it while acknowledgements come back fast. The receiver takes the rate from the later part of what arrived: the
first part shows slow start and the bursts that shapers let through.
"""

from __future__ import annotations

MAX_BYTES = 32 << 20
MAX_SEND_S = 2.0
CHUNK_BYTES = 32 << 10
_FIRST_WINDOW, _MAX_WINDOW = 64 << 10, 8 << 20
_QUICK_S = 0.1
_MIN_SPAN_S = 0.02
_MAX_SAMPLES = 4096
LONG_S = 5.0  # of own traffic
_LEAST_S, _LEAST_BYTES, _LEAST_BYTES_OF_LONG = 0.05, 256 << 10, 32 << 10


def is_telling(passed_bytes: int, seconds: float) -> bool:
    """Whether own traffic without a pause was long and large enough to say something about the link rather than about
    one frame's latency. In a whole LONG_S fewer bytes suffice: a link of 100 kbit/s passes no more."""
    return seconds >= _LEAST_S and passed_bytes >= (_LEAST_BYTES if seconds < LONG_S else _LEAST_BYTES_OF_LONG)


class Window:
    """What a sender may have in flight, and with `most_bytes_per_s` how fast it may send."""

    def __init__(self, now: float, most_bytes_per_s: float | None = None) -> None:
        self._most_bytes_per_s = most_bytes_per_s
        self.size, self.sent, self.acked, self.start = _FIRST_WINDOW, 0, 0, now
        self._mark, self._marked_at = 0, now
        self._least_s = float("inf")

    def room(self, now: float) -> bool:
        """Whether one more chunk may go out now."""
        return self.sent - self.acked + CHUNK_BYTES <= self.size and not self.over(now) and self.wait_s(now) <= 0

    def wait_s(self, now: float) -> float:
        """Until the rate allows another chunk; the first one is free."""
        return 0.0 if self._most_bytes_per_s is None else self.start + self.sent / self._most_bytes_per_s - now

    def over(self, now: float) -> bool:
        """Whether the probe has sent all that it may."""
        return self.sent + CHUNK_BYTES > MAX_BYTES or now - self.start > MAX_SEND_S

    def sending(self, count: int) -> None:
        self.sent += count

    def acknowledged(self, count: int, now: float) -> None:
        """`count` more bytes were acknowledged. A whole window acknowledged quickly doubles it."""
        self.acked = min(self.sent, self.acked + count)
        if self.acked < self._mark + self.size:
            return
        took_s = now - self._marked_at
        self._least_s = min(self._least_s, took_s)
        if took_s < max(_QUICK_S, 1.5 * self._least_s) and self._least_s < 0.4:
            self.size = min(_MAX_WINDOW, 2 * self.size)
        self._mark, self._marked_at = self.acked, now


class RateMeter:
    """Arrivals at the receiver."""

    def __init__(self) -> None:
        self.total = 0
        self._samples: list[tuple[float, int]] = []

    def arrived(self, count: int, now: float) -> None:
        self.total += count
        if len(self._samples) < _MAX_SAMPLES:
            self._samples.append((now, self.total))
        else:
            self._samples[-1] = (now, self.total)

    def bytes_per_s(self) -> float:
        """The rate of the later half of the time, and at least a third of the bytes; 0 if too little arrived."""
        if len(self._samples) < 3:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        middle_s = (first[0] + last[0]) / 2
        begin = next((s for s in self._samples if s[0] >= middle_s), last)
        if last[1] - begin[1] < self.total / 3 or last[0] - begin[0] < _MIN_SPAN_S:
            begin = next((s for s in self._samples if s[1] >= self.total / 3), first)
        span_s = last[0] - begin[0]
        return (last[1] - begin[1]) / span_s if span_s > 0 else 0.0

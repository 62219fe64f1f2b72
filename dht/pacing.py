"""A cap on what a process takes in: its streams are read no faster, so that libp2p's flow control slows the senders."""

from __future__ import annotations

import asyncio

from dht.transport import Stream

_BURST_S = 0.25


class Pacer:
    """All streams together take `bytes_per_s` on average. One per process and loop."""

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self._free_at = float("-inf")

    def pace(self, stream: Stream) -> None:
        """From now on what this stream brings counts; its socket rests while the process is over its rate."""
        reader, transport = stream.reader, stream.writer.transport
        take = reader.feed_data
        pending: list[asyncio.TimerHandle] = []

        def resume() -> None:
            pending.clear()
            if not transport.is_closing() and not getattr(reader, "_paused", False):
                transport.resume_reading()  # type: ignore[attr-defined]

        def counted(data: bytes) -> None:
            take(data)
            loop = asyncio.get_running_loop()
            now = loop.time()
            self._free_at = max(self._free_at, now - _BURST_S) + len(data) / self.rate
            wait_s = self._free_at - now
            if wait_s > 0 and not pending and not transport.is_closing():
                transport.pause_reading()  # type: ignore[attr-defined]
                pending.append(loop.call_later(wait_s, resume))

        reader.feed_data = counted  # type: ignore[method-assign,assignment]

"""What the stages report between ticks: bytes per link, waits. A wait over 5 s is told once per peer and minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peer.events import LinkBytes, RunEvent, Sink
from peer.protocol import StageStatus

LONG_WAIT_S = 5.0
QUIET_S = 60.0


class Watch:
    """Sums up StageStatus messages for the sink."""

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        self._sink, self._clock = sink, clock
        self._sent: dict[str, int] = {}
        self._waiting: dict[int, str] = {}
        self._held_up_s: dict[int, float] = {}
        self._heard: dict[int, asyncio.Event] = {}
        self._told: dict[int, float] = {}
        self._before: dict[str, int] = {}  # of streams that are over: new cuts count anew
        self.bytes_sent: dict[str, int] = {}

    def status(self, status: StageStatus, own: dict[str, int]) -> None:
        """One stage's report; `own` are the trainer's links."""
        stage = status.stage
        self._sent.update(status.bytes_sent)
        self._waiting[stage] = status.waiting_for
        self._held_up_s[stage] = status.held_up_s
        sent = self._sent | own
        self.bytes_sent = {k: sent.get(k, 0) + self._before.get(k, 0) for k in self._before | sent}
        self._heard.setdefault(stage, asyncio.Event()).set()
        self._sink(LinkBytes(self.bytes_sent, {k: w for k, w in self._waiting.items() if w}, dict(self._held_up_s)))
        now = self._clock()
        if status.waited_s > LONG_WAIT_S and abs(now - self._told.get(stage, float("-inf"))) > QUIET_S:  # may go back
            self._told[stage] = now
            text = f"stage {stage} has waited {status.waited_s:.0f} s for {status.waiting_for}"
            self._sink(RunEvent(kind="waiting", text=text, time_s=now, stage=stage))

    def begin(self) -> None:
        """The stages are others now."""
        self._before, self._sent, self._waiting, self._held_up_s = self.bytes_sent, {}, {}, {}

    async def news(self, stages: int, timeout_s: float) -> None:
        """Until every stage has reported once more, `timeout_s` at most."""
        events = [self._heard.setdefault(k, asyncio.Event()) for k in range(stages)]
        for event in events:
            event.clear()
        try:
            async with asyncio.timeout(timeout_s):
                for event in events:
                    await event.wait()
        except TimeoutError:
            return

"""What the stages report between ticks: bytes per link, waits, frames that came again with other bytes.

That the run is exact to rounding only is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fusion_p2p.frame import TRAINER
from peer.events import LinkBytes, RunEvent, Sink
from peer.protocol import StageStatus


class Watch:
    """Sums up StageStatus messages for the sink."""

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        self._sink, self._clock = sink, clock
        self._sent: dict[str, int] = {}
        self._waiting: dict[int, str] = {}
        self._held_up_s: dict[int, float] = {}
        self._heard: dict[int, asyncio.Event] = {}
        self._before: dict[str, int] = {}  # of streams that are over: new cuts count anew
        self._differing: dict[int, tuple[int, int]] = {}  # stage or TRAINER -> which of its incarnations, frames
        self._begun = self._differed = 0  # the latter: of incarnations that are over
        self.bytes_sent: dict[str, int] = {}

    def status(self, status: StageStatus, stages: int, own: dict[str, int], own_differing: int = 0) -> None:
        """The report of one of `stages` stages; `own` are the trainer's links, with `own_differing` frames that came
        again otherwise."""
        stage = status.stage
        own_links = {f"{stage}-{dst}" for dst in (TRAINER, *range(stages))}  # of others a stage may say nothing
        self._sent.update((k, count) for k, count in status.bytes_sent.items() if k in own_links)
        self._waiting[stage] = status.waiting_for
        self._held_up_s[stage] = status.held_up_s
        sent = self._sent | own
        self.bytes_sent = {k: sent.get(k, 0) + self._before.get(k, 0) for k in self._before | sent}
        self._heard.setdefault(stage, asyncio.Event()).set()
        before = self.differing
        self._differs(TRAINER, self._begun, own_differing)
        self._differs(stage, status.incarnation, status.differing)
        waiting = {k: w for k, w in self._waiting.items() if w}
        self._sink(LinkBytes(self.bytes_sent, waiting, dict(self._held_up_s), self.differing))
        if self.differing and not before:
            self._exact_to_rounding("the trainer" if own_differing else f"stage {stage}", stage)

    def apart(self, stage: int) -> None:
        """A frame into `stage` goes by what the sender had of an earlier host of it, which computed otherwise."""
        before, self._differed = self.differing, self._differed + 1
        if not before:
            self._exact_to_rounding(f"stage {stage}", stage)

    def _exact_to_rounding(self, whom: str, stage: int) -> None:
        text = (
            f"exact to rounding, not to the bit: frames that {whom} had came again with other bytes; a host that took "
            "over computes on other hardware or in another framework"
        )
        self._sink(RunEvent(kind="notice", text=text, time_s=self._clock(), stage=stage))

    @property
    def differing(self) -> int:
        """Frames that came again and were not the same bytes, in the whole session."""
        return self._differed + sum(count for _, count in self._differing.values())

    def _differs(self, stage: int, incarnation: int, count: int) -> None:
        known, counted = self._differing.get(stage, (incarnation, 0))
        if known != incarnation:
            self._differed += counted
        self._differing[stage] = incarnation, count

    def begin(self) -> None:
        """The stages are others now."""
        self._begun += 1
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

"""Ticks as the trainer sees them: what was released, which losses and reports have come. Pure.

A tick ends when every micro-batch's loss and every stage's report are in. After a stage is rebuilt it repeats ticks;
the trainer's channels drop what they have already, so a tick never ends twice.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import msgspec

from fusion_p2p.adatopk import observe
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import Frame, Kind, StepHeader, TickReport
from fusion_p2p.sent import DIGEST_BYTES
from peer.errors import WireError
from peer.events import StepResult

MAX_REPORT_BYTES = 1 << 16  # some 45 for each stage that it exchanges frames with
_LOSS = struct.Struct("<f")
_REPORT = msgspec.msgpack.Decoder(TickReport)


@dataclass(frozen=True, slots=True)
class TickResult:
    """`loss` is the mean over the samples; `time_s` from the tick before, or from its release if that was later."""

    tick: int
    header: StepHeader
    loss: float
    tokens: int
    reports: dict[int, TickReport]
    time_s: float


@dataclass(slots=True)
class _Open:
    header: StepHeader
    tokens: int
    released_s: float
    losses: dict[int, float] = field(default_factory=dict)
    reports: dict[int, TickReport] = field(default_factory=dict)


class TickBook:
    """`stages` report in each tick, `loss_stage` sends the losses. FrameError on a frame that no released tick
    expects."""

    def __init__(self, stages: int, loss_stage: int, first_tick: int) -> None:
        self._stages, self._loss_stage = stages, loss_stage
        self.next_tick = first_tick
        self._open: dict[int, _Open] = {}
        self._last_s = float("-inf")

    @property
    def open_ticks(self) -> int:
        return len(self._open)

    def release(self, header: StepHeader, tokens: int, now_s: float) -> int:
        """Open the next tick; its number."""
        tick, self.next_tick = self.next_tick, self.next_tick + 1
        self._open[tick] = _Open(header, tokens, now_s)
        return tick

    def missing(self) -> str:
        """What the oldest open tick waits for, in words; "" when nothing is open."""
        if not self._open:
            return ""
        tick = min(self._open)
        held = self._open[tick]
        stages = [s for s in range(self._stages) if s not in held.reports]
        losses = len(held.header.sizes) - len(held.losses)
        return f"tick {tick}: {losses} losses, reports of stages {stages}"

    def take(self, frame: Frame, now_s: float) -> TickResult | None:
        """Account for a LOSS or DONE frame; the result if it was the tick's last."""
        held = self._open.get(frame.tick)
        if held is None:
            raise FrameError(f"{frame.kind.name} of stage {frame.src} for tick {frame.tick}, which is not open")
        if frame.kind is Kind.LOSS:
            if frame.src != self._loss_stage:
                raise FrameError(f"loss of stage {frame.src}; stage {self._loss_stage} has it")
            if len(frame.payload) != _LOSS.size or not 0 <= frame.micro_batch < len(held.header.sizes):
                raise FrameError(
                    f"loss of stage {frame.src}: micro-batch {frame.micro_batch}, {len(frame.payload)} bytes"
                )
            held.losses[frame.micro_batch] = _LOSS.unpack(frame.payload)[0]
        elif frame.kind is Kind.DONE:
            if not 0 <= frame.src < self._stages:
                raise FrameError(f"report of stage {frame.src}; this run has {self._stages}")
            held.reports[frame.src] = _report(frame, self._stages)
        else:
            raise FrameError(f"stage {frame.src} sent a {frame.kind.name} frame to the trainer")
        if len(held.losses) < len(held.header.sizes) or len(held.reports) < self._stages:
            return None
        del self._open[frame.tick]
        sizes = held.header.sizes
        loss = sum(held.losses[m] * size for m, size in enumerate(sizes)) / sum(sizes)
        time_s, self._last_s = now_s - max(held.released_s, self._last_s), now_s
        return TickResult(frame.tick, held.header, loss, held.tokens, held.reports, time_s)


def step_result(result: TickResult) -> StepResult:
    """A training tick as watchers see it."""
    seen = observe(result.header.step, result.loss, result.reports)
    return StepResult(
        step=result.header.step,
        loss=result.loss,
        step_time_s=result.time_s,
        samples=sum(result.header.sizes),
        tokens=result.tokens,
        stages={s: (r.forward_s + r.backward_s + r.update_s, r.wait_s) for s, r in result.reports.items()},
        sent={s: r.sent.hex() for s, r in sorted(result.reports.items())},
        cuts={f"{a}-{b}": (norm, seen.biases.get((a, b), 0.0)) for (a, b), norm in seen.norms.items()},
    )


def bound(src: int, kind: Kind, value: int) -> int:
    """What stages may send to the trainer."""
    if kind not in (Kind.LOSS, Kind.DONE):
        raise WireError(f"stage {src} sends a {kind.name} frame to the trainer")
    return 4 if kind is Kind.LOSS else MAX_REPORT_BYTES


def _report(frame: Frame, stages: int) -> TickReport:
    try:
        report = _REPORT.decode(frame.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"report of stage {frame.src} is malformed: {error}") from None
    seconds = (report.forward_s, report.backward_s, report.update_s, report.wait_s)
    if not all(math.isfinite(s) and s >= 0 for s in seconds):  # they are summed, shown and planned with
        raise FrameError(f"report of stage {frame.src} names {seconds} seconds")
    if len(report.sent) not in (0, DIGEST_BYTES):
        raise FrameError(f"report of stage {frame.src} holds a hash of {len(report.sent)} bytes")
    pairs = {(c.src, c.dst) for c in report.cuts if 0 <= c.src < c.dst < stages and frame.src in (c.src, c.dst)}
    if len(pairs) != len(report.cuts):
        raise FrameError(f"report of stage {frame.src} names pairs of stages that are not its own, or one twice")
    for c in report.cuts:  # a norm or a bias may be any number, or none: the gate reads them so
        if min(c.sent_bytes, c.elements) < 0 or not (math.isfinite(c.codec_s) and c.codec_s >= 0) or c.rms < 0:
            raise FrameError(f"report of stage {frame.src} on {c.src}-{c.dst} holds a figure below 0")
    return report

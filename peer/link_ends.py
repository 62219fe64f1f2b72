"""The two ends that `Links` holds: outgoing channels that reconnect, incoming channels that are replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from dht.transport import Stream
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import Frame, Kind
from peer.channel import Inbox, Kept, Outbox
from peer.channel_io import STREAM_ERRORS, Refusal, run_receiver, run_sender
from peer.errors import ResumeGap, StaleError, WireError
from peer.protocol import Endpoint, data_protocol
from peer.spill import Spill
from peer.throughput import Throughput
from peer.wire import WIRE_VERSION, Open

if TYPE_CHECKING:
    from peer.links import Links


log = logging.getLogger(__name__)


class LinkEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something the trainer wants to know about the channel with `stage` at `peer`.

    `code`: broken (a stream ended), lost (none for `dead_s`), back (there is one again), frame (bytes that do not
    fit), apart (bytes by a mask or axes that this end no longer has: the stage ended), stale (this host has been
    replaced), gap (frames are asked for that are no longer held), refused (the other end finds that ours do not fit).
    """

    code: str
    stage: int
    peer: str
    reason: str


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What the channel to `stage` waits for (connect, acknowledgement), and the bytes it holds."""

    phase: str
    stage: int
    peer: str
    waited_s: float
    held_bytes: int
    reason: str


class Sender:
    """One outgoing channel: its outbox, and the task that keeps a stream to wherever the other end lives."""

    def __init__(self, links: Links, outbox: Outbox) -> None:
        self._links, self.outbox = links, outbox
        self.wake, self.room = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._endpoint: Endpoint | None = None
        self._epoch = -1
        self._down_since: float | None = _now()
        self._lost = False
        self._reason = "the plan names no host yet"
        self._full_since = 0.0
        self._moving: asyncio.Task[None] | None = None  # frames on their way to disk
        self.bytes_sent = 0
        self._throughput = Throughput()

    def push(self, frame: Frame) -> None:
        was_full = self.full
        self.outbox.push(frame)
        if self._down_since is None:
            self._throughput.pushed(len(frame.payload), _now())
        self.wake.set()
        self.spill_if_due()
        if self.full and not was_full:
            self._full_since = _now()

    @property
    def full(self) -> bool:
        moving = self._moving is not None and self.outbox.crowded
        return moving or self.outbox.unacked_bytes > self._links.settings.unacked_bytes

    def spill_if_due(self) -> None:
        """Let the disk have what memory should not hold."""
        if self._moving is None and self._links.spill is not None and (frames := self.outbox.spillable()):
            self._moving = asyncio.ensure_future(self._move_to_disk(self._links.spill, frames))

    async def _move_to_disk(self, spill: Spill, frames: list[Kept]) -> None:
        payloads = [k.payload if isinstance(k.payload, bytes) else b"" for k in frames]
        try:
            stored = await asyncio.to_thread(spill.write, payloads)
        except OSError as error:
            stored, why = None, str(error)
        else:
            why = f"{spill.used_bytes} of {spill.most_bytes} bytes are taken"
        self._moving = None
        if stored is None:
            log.warning("stage %d keeps no more on disk for stage %d: %s", self.outbox.src, self.outbox.dst, why)
            self.outbox.disk_is_full()
        else:
            self.outbox.spilled(frames, stored)
            self.spill_if_due()
        if not self.full:
            self.room.set()
            self._links.check_room()

    def move(self, endpoint: Endpoint | None, epoch: int) -> None:
        """Go on sending to `endpoint` (None: nowhere), under the trainer's `epoch`. Other addresses of the same count
        from the next try on: a stream that stands is not cut for them."""
        same = epoch == self._epoch and _who(endpoint) == _who(self._endpoint)
        self._endpoint, self._epoch = endpoint, epoch
        if same:
            return
        self._task = asyncio.ensure_future(self._run(self._task, endpoint, epoch))

    async def close(self) -> None:
        self.room.set()
        await _end(self._task)
        if self._moving is not None:
            await asyncio.wait({self._moving})
        await asyncio.to_thread(self.outbox.clear)

    async def _run(self, before: asyncio.Task[None] | None, endpoint: Endpoint | None, epoch: int) -> None:
        await _end(before)
        if endpoint is None:
            self._down("the plan names no host")
            return
        limits, backoff_s = self._links.settings, 0.05
        while True:
            try:
                await self._stream(endpoint, epoch)
            except ResumeGap as error:
                return self._links.report("gap", self.outbox.dst, str(error))
            except Refusal as refusal:
                self._down(str(refusal))
                if refusal.code in ("stale", "frame"):
                    code = "refused" if refusal.code == "frame" else refusal.code
                    return self._links.report(code, self.outbox.dst, str(refusal))
            except STREAM_ERRORS as error:
                if self._down_since is None:
                    backoff_s = 0.05
                    self._links.report("broken", self.outbox.dst, str(error))
                self._down(str(error) or "no answer in time")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, limits.backoff_max_s)

    async def _stream(self, endpoint: Endpoint, epoch: int) -> None:
        links, outbox = self._links, self.outbox
        transport, open_s = links.transport, links.settings.open_s
        newest = self._endpoint if _who(self._endpoint) == _who(endpoint) else None
        await transport.connect(endpoint.peer, (newest or endpoint).addresses, timeout_s=open_s)
        stream = await transport.open_stream(endpoint.peer, data_protocol(endpoint.endpoint), timeout_s=open_s)
        opening = Open(
            WIRE_VERSION, links.run, epoch, links.plan, outbox.src, outbox.dst,
            outbox.incarnation, endpoint.incarnation,
        )  # fmt: skip
        try:
            await run_sender(
                stream, outbox, opening, settings=links.settings, limiter=links.limiter, wake=self.wake,
                gate=links.gate, progress=self._progress, counted=self._counted,
            )  # fmt: skip
        finally:
            stream.writer.close()

    def _down(self, reason: str) -> None:
        self._reason = reason
        self._throughput.broke()
        now = _now()
        if self._down_since is None:
            self._down_since = now
        if not self._lost and now - self._down_since > self._links.settings.dead_s:
            self._lost = True
            self._links.report("lost", self.outbox.dst, reason)

    def _progress(self) -> None:
        if self._lost:
            self._links.report("back", self.outbox.dst, "")
        self._down_since, self._lost = None, False
        spell = self._throughput.acknowledged(self.outbox.unacked_bytes, _now())
        if spell is not None and self._endpoint is not None:
            self._links.observed(self._endpoint.peer, *spell)
        self.spill_if_due()
        if not self.full:
            self.room.set()
            self._links.check_room()

    def _counted(self, count: int) -> None:
        self.bytes_sent += count

    def wait(self) -> Wait | None:
        peer = self._endpoint.peer if self._endpoint else ""
        if self._down_since is not None:
            phase, waited_s, reason = "connect", _now() - self._down_since, self._reason
        elif self.full and self._moving is not None and self.outbox.crowded:
            phase, waited_s = "spill", _now() - self._full_since
            reason = f"{self.outbox.memory_bytes} bytes are kept for stage {self.outbox.dst} and go to disk"
        elif self.full:
            phase, waited_s = "acknowledgement", _now() - self._full_since
            reason = f"{self.outbox.unacked_bytes} bytes not acknowledged by stage {self.outbox.dst}"
        else:
            return None
        return Wait(
            phase=phase, stage=self.outbox.dst, peer=peer, waited_s=waited_s, held_bytes=self.outbox.held_bytes,
            reason=reason,
        )  # fmt: skip


class Receiver:
    """One incoming channel: its inbox, and the task that reads the stream it has now."""

    def __init__(self, links: Links, inbox: Inbox) -> None:
        self._links, self.inbox = links, inbox
        self.room = asyncio.Event()
        self.room.set()
        self.queued_bytes = 0
        self.frames_accepted, self.bytes_accepted, self.micro_batches_accepted = 0, 0, 0
        self._micro_batch = (-1, -1)
        self._came: dict[int, int] = {}  # tick that has not ended here -> micro-batches of which a tensor came
        self._count_lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    async def run(self, stream: Stream) -> None:
        await _end(self._task)
        task = self._task = asyncio.ensure_future(
            run_receiver(stream, self.inbox, settings=self._links.settings, room=self.room, deliver=self._deliver)
        )
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, WireError | FrameError) and not isinstance(error, StaleError):
            self._links.report("frame", self.inbox.src, str(error))
        if error is not None:
            raise error

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        await _end(self._task)

    def _deliver(self, frame: Frame) -> None:
        self.frames_accepted += 1
        self.bytes_accepted += len(frame.payload)
        if frame.kind in (Kind.ACT, Kind.GRAD) and (frame.tick, frame.micro_batch) != self._micro_batch:
            self._micro_batch = (frame.tick, frame.micro_batch)
            self._came[frame.tick] = self._came.get(frame.tick, 0) + 1
        with self._count_lock:
            self.queued_bytes += len(frame.payload)
            if self.queued_bytes > self._links.settings.queue_bytes:
                self.room.clear()
        self._links.deliver(frame)

    def settle(self, tick: int, training: bool) -> None:
        """The tick has ended: what came of it counts as work if it was trained on."""
        came = self._came.pop(tick, 0)
        self.micro_batches_accepted += came * training

    def taken(self, count: int) -> bool:
        """Whether the reader, having been full, may go on."""
        with self._count_lock:
            before = self.queued_bytes
            self.queued_bytes -= count
            limit = self._links.settings.queue_bytes
            return before > limit >= self.queued_bytes


def _who(endpoint: Endpoint | None) -> Endpoint | None:
    """Without where it can be reached now."""
    return endpoint and msgspec.structs.replace(endpoint, addresses=())


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

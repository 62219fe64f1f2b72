"""All channels of one endpoint: a stage in an executor, or the trainer (stage -1). DESIGN sections 2 and 7.

`Links` lives on one asyncio loop. `post`, `wait_room` and `get_nowait` may be called from any thread: they are the
hand-over between a compute thread and the loop. The sender of a channel opens its stream; a stream that breaks is
opened again, with back-off, to wherever the plan says that stage lives now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Self

import msgspec

from dht.errors import TransportError
from dht.transport import Stream, Transport
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader
from peer.channel import Bound, Inbox, Outbox
from peer.channel_io import STREAM_ERRORS, ChannelSettings, answer_open, read_open
from peer.errors import ChannelClosed, WireError
from peer.link_ends import LinkEvent, Receiver, Sender, Wait
from peer.protocol import Endpoint, Took, data_protocol
from peer.ratelimit import Limiter
from peer.spill import Spill
from peer.wire import Answer, Cursor, Open

log = logging.getLogger(__name__)

MAX_INCOMING = 64  # streams that have not yet said who they are


class Links:
    """`run` is the run id (hex). `bound` says how large a frame that comes in may be, `logged` whether the edge to a
    stage is logged; `start_tick` is the first tick that this stage handles here. `on_event` is called on the loop,
    and so is `notify`, whenever a frame has come or a full channel has room again; `observed` hears how many bytes a
    peer took in how many seconds.
    """

    def __init__(
        self,
        transport: Transport,
        me: Endpoint,
        run: str,
        epoch: int,
        *,
        bound: Bound,
        logged: Callable[[int], bool] = lambda dst: False,
        start_tick: int = 0,
        settings: ChannelSettings | None = None,
        limiter: Limiter | None = None,
        spill: Spill | None = None,
        on_event: Callable[[LinkEvent], None] = lambda event: None,
        observed: Callable[[str, int, float], None] = lambda peer, count, seconds: None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport, self.me, self.run, self.epoch, self.plan = transport, me, bytes.fromhex(run), epoch, 0
        self.settings, self.limiter, self.on_event = settings or ChannelSettings(), limiter or Limiter(None), on_event
        self.spill = spill
        self.observed = observed
        self.gate = asyncio.Event()
        self.gate.set()
        self._bound, self._logged, self._start, self._notify = bound, logged, Cursor(start_tick, 0), notify
        self._endpoints: dict[int, Endpoint] = {}
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()
        self._arrived: dict[int, deque[Frame]] = {}  # by source: a source's frames come in the order of their ticks
        self._training: dict[int, bool] = {}  # of the ticks that have not ended here
        self._news = asyncio.Event()
        self._room = threading.Event()
        self._room.set()
        self._incoming = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self.transport.serve(data_protocol(self.me.endpoint), self._on_stream)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._room.set()
        self._news.set()
        with contextlib.suppress(TransportError):
            await self.transport.stop_serving(data_protocol(self.me.endpoint))
        ends: list[Sender | Receiver] = [*self._senders.values(), *self._receivers.values()]
        for end in ends:
            await end.close()

    # --- who is where

    def update(self, endpoints: Iterable[Endpoint], plan: int, *, epoch: int | None = None) -> None:
        """The plan's word on who lives where. An older plan or epoch is ignored (DESIGN 'Fencing')."""
        epoch = self.epoch if epoch is None else epoch
        if (epoch, plan) < (self.epoch, self.plan):
            log.warning("plan %d of epoch %d comes after plan %d of %d: ignored", plan, epoch, self.plan, self.epoch)
            return
        self.plan, self.epoch = plan, epoch
        self._endpoints = {e.stage: e for e in endpoints if e.stage != self.me.stage}
        for stage, sender in self._senders.items():
            sender.move(self._endpoints.get(stage), epoch)
        for stage, receiver in self._receivers.items():
            known = self._endpoints.get(stage)
            inbox = receiver.inbox
            if known is None or (inbox.epoch, inbox.src_incarnation) != (epoch, known.incarnation):
                receiver.stop()

    def hold(self) -> None:
        """Send nothing until `release`: this host's lease ran out (DESIGN 'Fencing')."""
        self.gate.clear()

    def release(self) -> None:
        self.gate.set()

    # --- sending

    async def send(self, frame: Frame) -> None:
        """Number the frame and queue it; waits while its channel holds more than it may."""
        sender = self._push(frame)
        while sender.full and not self._closed:
            sender.room.clear()
            await sender.room.wait()

    def post(self, frame: Frame) -> None:
        """Queue a frame from another thread. A frame that cannot be numbered is reported as an event."""
        if self._loop is None or self._closed:
            raise ChannelClosed(f"stage {self.me.stage} is closed on this host")
        self._loop.call_soon_threadsafe(self._push_or_report, frame)

    def wait_room(self, timeout_s: float) -> bool:
        """Block a compute thread while any channel is full; False if one still is after `timeout_s`."""
        return self._room.wait(timeout_s)

    def _push_or_report(self, frame: Frame) -> None:
        if self._closed:
            return  # since it was posted
        try:
            self._push(frame)
        except WireError as error:
            self.report("gap", frame.dst, str(error))  # our own fault: the receiver has done nothing

    def _push(self, frame: Frame) -> Sender:
        if self._closed:
            raise ChannelClosed(f"stage {self.me.stage} is closed on this host")
        sender = self._senders.get(frame.dst)
        if sender is None:
            me, log_bytes = self.me, self.settings.log_bytes if self._logged(frame.dst) else 0
            outbox = Outbox(
                self.run,
                me.stage,
                frame.dst,
                me.incarnation,
                log_bytes=log_bytes,
                start=self._start,
                spill_bytes=self.settings.spill_bytes if self.spill is not None else 0,
            )
            sender = self._senders[frame.dst] = Sender(self, outbox)
            sender.move(self._endpoints.get(frame.dst), self.epoch)
        sender.push(frame)
        self.check_room()
        if frame.kind is Kind.DONE:  # the stage has taken everything of the tick
            training = self._training.pop(frame.tick, False)
            for receiver in self._receivers.values():
                receiver.inbox.advance(frame.tick + 1)
                receiver.settle(frame.tick, training)
        return sender

    def check_room(self) -> None:
        if any(s.full for s in self._senders.values()):
            self._room.clear()
        elif not self._room.is_set():
            self._room.set()
            self._notify()

    def trim(self, tick: int) -> None:
        """A complete set at `tick` exists: no frame of an earlier tick is asked for again."""
        for sender in self._senders.values():
            sender.outbox.trim(tick)
            sender.spill_if_due()
            sender.room.set()
        for receiver in self._receivers.values():
            receiver.inbox.trim(tick)
        self.check_room()

    # --- receiving

    def get_nowait(self, last_tick: int | None = None) -> Frame | None:
        """A frame that has come, the oldest of its source, of a tick up to `last_tick`; None if there is none.

        From any thread. What is not taken counts against its channel: a source far ahead is slowed down, not kept.
        """
        with self._lock:
            queues = self._arrived.values()
            queue = next((q for q in queues if q and (last_tick is None or q[0].tick <= last_tick)), None)
            if queue is None:
                return None
            frame = queue.popleft()
        receiver = self._receivers[frame.src]
        if receiver.taken(len(frame.payload)) and self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(receiver.room.set)
        return frame

    async def frames(self, last_tick: Callable[[], int | None] = lambda: None) -> AsyncIterator[Frame]:
        """Frames as they come, until the links are closed; later ones than `last_tick` wait (see `look_again`)."""
        while not self._closed:
            self._news.clear()
            while (frame := self.get_nowait(last_tick())) is not None:
                yield frame
            await self._news.wait()

    def look_again(self) -> None:
        """`last_tick` of `frames` has changed."""
        self._news.set()

    def deliver(self, frame: Frame) -> None:
        if frame.kind is Kind.STEP and frame.src == TRAINER:
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # the stage says what is wrong with it
                self._training[frame.tick] = msgspec.msgpack.decode(frame.payload, type=StepHeader).training
        with self._lock:
            self._arrived.setdefault(frame.src, deque()).append(frame)
        self._news.set()
        self._notify()

    async def _on_stream(self, stream: Stream) -> None:
        """An incoming stream: who is it, is it the plan's host of that stage, then take its frames."""
        try:
            if self._incoming >= MAX_INCOMING or self._closed:
                return
            self._incoming += 1
            try:
                opening = await read_open(stream, self.settings)
                receiver, answer = await self._admit(opening, stream.remote)
                await answer_open(stream, answer, self.settings)
            finally:
                self._incoming -= 1
            if receiver is not None:
                await receiver.run(stream)
        except STREAM_ERRORS as error:
            log.info("stream from %s to stage %d: %s", stream.remote, self.me.stage, error)
        finally:
            stream.writer.close()

    async def _admit(self, opening: Open, remote: str) -> tuple[Receiver | None, Answer]:
        known = self._endpoints.get(opening.src)
        if known is None or known.peer != remote:
            reason = f"plan {self.plan} does not name {remote} as the host of stage {opening.src}"
            return None, Answer(Cursor(), "not-yet", reason)
        receiver = self._receivers.get(opening.src)
        if receiver is None:
            inbox = Inbox(
                self.run, opening.src, self.me.stage, self.me.incarnation, bound=self._bound, start=self._start
            )
            receiver = self._receivers[opening.src] = Receiver(self, inbox)
        answer = receiver.inbox.open(opening, expected_incarnation=known.incarnation, epoch=self.epoch)
        if answer.refused:
            return None, answer
        await receiver.close()
        return receiver, Answer(receiver.inbox.cursor)

    # --- what can be seen

    def report(self, code: str, stage: int, reason: str) -> None:
        known = self._endpoints.get(stage)
        self.on_event(LinkEvent(code=code, stage=stage, peer=known.peer if known else "", reason=reason))

    def bytes_sent(self) -> dict[str, int]:
        """ "src-dst" -> bytes put on streams since the start, re-sent ones and envelopes included."""
        return {f"{self.me.stage}-{dst}": s.bytes_sent for dst, s in self._senders.items()}

    def accepted(self, flops: Mapping[int, float]) -> dict[int, Took]:
        """What was accepted from each neighbouring stage; duplicates do not count. `flops`: of a micro-batch there."""
        return {
            src: Took(r.frames_accepted, r.bytes_accepted, r.micro_batches_accepted * flops.get(src, 0.0))
            for src, r in self._receivers.items()
            if src != TRAINER
        }

    def outbox_share(self) -> float:
        """How full the fullest logged outbox is, of what it may hold in memory; over 1 some of it lies on disk."""
        return max((s.outbox.held_bytes / self.settings.log_bytes for s in self._senders.values()), default=0.0)

    def held_bytes(self) -> int:
        """Payload bytes in memory: in outboxes and in frames not yet taken."""
        senders, receivers = list(self._senders.values()), list(self._receivers.values())  # any thread may ask
        return sum(s.outbox.memory_bytes for s in senders) + sum(r.queued_bytes for r in receivers)

    def differing(self) -> int:
        """Frames that came again with other bytes than those accepted: their sender computes on other hardware."""
        return sum(r.inbox.differing for r in self._receivers.values())

    def cursors(self) -> dict[int, Cursor]:
        """What is expected next from each stage that has opened a channel."""
        return {src: r.inbox.cursor for src, r in self._receivers.items()}

    def waits(self) -> list[Wait]:
        return [w for s in self._senders.values() if (w := s.wait()) is not None]

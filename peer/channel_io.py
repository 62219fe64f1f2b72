"""Moves the bytes of one channel over one libp2p stream: frames one way, cursors back, heartbeats both ways.

Any received byte is a sign of life. The watchdog counts its own ticks while it waits for a byte, not seconds: a
process that was frozen itself finds the bytes that came meanwhile before it calls the other end dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dht.errors import DhtError, TransportError
from dht.transport import Stream
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import Frame
from fusion_p2p.outboxes import log_bytes, under_way_bytes
from peer import wire
from peer.channel import Inbox, Outbox, Stored, Take
from peer.errors import ResumeGap, StaleError, WireError
from peer.ratelimit import Limiter
from peer.wire import CHUNK_BYTES, Answer, Header, Open, Tag

_TAGS = {tag: bytes([tag]) for tag in Tag}
STREAM_ERRORS = (OSError, EOFError, DhtError, WireError, FrameError, TimeoutError)  # DhtError: a bad address too


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """`beat_s`: a heartbeat when nothing else was sent; `dead_s`: silence after which the other end is lost.

    `unacked_bytes`: a sender waits beyond this much sent but unacknowledged; `queue_bytes`: a receiver reads no
    further beyond this much received but not taken; `log_bytes`: a logged outbox keeps this much for a
    replay in memory and, once that is half full, `spill_bytes` on disk. All per channel.
    """

    beat_s: float = 2.0
    dead_s: float = 8.0
    open_s: float = 10.0
    backoff_max_s: float = 4.0
    ack_every_s: float = 0.02
    unacked_bytes: int = 256 << 20
    queue_bytes: int = 256 << 20
    log_bytes: int = 1 << 30
    spill_bytes: int = 0


def executor_settings(memory_bytes: int, spill_bytes: int, beat_s: float, dead_s: float) -> ChannelSettings:
    """What streams may hold of an executor's memory: per channel a thirty-second part under way at either end, and a
    sixteenth for a replay. A stage has two or three channels that carry tensors."""
    under_way = under_way_bytes(memory_bytes)
    return ChannelSettings(
        beat_s=beat_s,
        dead_s=dead_s,
        unacked_bytes=under_way,
        queue_bytes=under_way,
        log_bytes=log_bytes(memory_bytes),
        spill_bytes=spill_bytes,
    )


class Silence(TransportError):
    """No byte from the other end for `dead_s`."""


class LiveReader:
    """Reads a stream under the watchdog: every wait for a byte ends after `dead_s` of silence."""

    def __init__(self, stream: Stream, settings: ChannelSettings) -> None:
        self._stream, self._settings = stream, settings
        self._ticks = 0
        self._waiting: asyncio.Task[object] | None = None
        self._silent = False
        self.bytes_received = 0

    def tick(self) -> None:
        """Called every `beat_s` by the channel's watch loop."""
        if self._waiting is None:
            self._ticks = 0
            return
        self._ticks += 1
        if self._ticks * self._settings.beat_s > self._settings.dead_s:
            self._silent = True
            self._waiting.cancel()

    async def read_some(self, most: int) -> bytes:
        self._waiting = asyncio.current_task()
        self._ticks = 0
        try:
            data = await self._stream.reader.read(most)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._silent and task is not None and task.uncancel() == 0:
                raise Silence(f"no byte from {self._stream.remote} for {self._settings.dead_s:g} s") from None
            raise
        finally:
            self._waiting = None
        if not data:
            raise EOFError(f"{self._stream.remote} ended the stream")
        self.bytes_received += len(data)
        return data

    async def read_exactly(self, count: int) -> bytes:
        """Memory taken grows with the bytes that came, not with the length that was announced."""
        data = await self.read_some(min(count, CHUNK_BYTES))
        if len(data) == count:
            return data
        parts, missing = [data], count - len(data)
        while missing:
            data = await self.read_some(min(missing, CHUNK_BYTES))
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    async def message(self) -> bytes:
        return await self.read_exactly(wire.message_length(await self.read_exactly(2)))


class LiveWriter:
    """Writes whole records, one task at a time, and remembers whether anything went out since the last beat."""

    def __init__(self, stream: Stream, limiter: Limiter) -> None:
        self._writer, self._limiter = stream.writer, limiter
        self._lock = asyncio.Lock()
        self._wrote = False
        self.bytes_sent = 0

    async def write(self, head: bytes, payload: bytes = b"") -> None:
        async with self._lock:
            await self._put(head)
            view, step = memoryview(payload), self._limiter.slice_bytes(CHUNK_BYTES)
            for at in range(0, len(payload), step):
                await self._put(view[at : at + step])

    async def _put(self, data: bytes | memoryview) -> None:
        await self._limiter.take(len(data))
        self._writer.write(data)
        self._wrote = True
        self.bytes_sent += len(data)
        await self._writer.drain()

    async def beat(self) -> None:
        """A heartbeat, unless something was written since the last one or a record is on its way."""
        if not self._wrote and not self._lock.locked():
            await self.write(_TAGS[Tag.BEAT])
        self._wrote = False


async def _watch(reader: LiveReader, settings: ChannelSettings) -> None:
    while True:
        await asyncio.sleep(settings.beat_s)
        reader.tick()


async def _beats(writer: LiveWriter, settings: ChannelSettings) -> None:
    """Apart from `_watch`, for a write to a frozen peer may wait as long as it likes."""
    while True:
        await asyncio.sleep(settings.beat_s)
        await writer.beat()


class Refusal(WireError):
    """The acceptor refuses the stream. `code` as in `wire.Answer.refused`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


async def run_sender(
    stream: Stream,
    outbox: Outbox,
    opening: Open,
    *,
    settings: ChannelSettings,
    limiter: Limiter,
    wake: asyncio.Event,
    gate: asyncio.Event,
    progress: Callable[[], None],
    counted: Callable[[int], None],
) -> None:
    """Open, resume, then send until the stream breaks or the task is cancelled.

    `wake` is set when the outbox has something new, `gate` is clear while the host may not send; `progress` is called
    once the stream is accepted and after each acknowledgement, `counted` with the bytes put on the stream.
    """
    reader, writer = LiveReader(stream, settings), LiveWriter(stream, limiter)
    async with asyncio.timeout(settings.dead_s):
        await writer.write(wire.pack_message(opening))
        answer = wire.unpack_answer(await reader.message())
    if answer.refused:
        raise Refusal(answer.refused[:32], answer.reason[:200])
    outbox.resume(answer.cursor)
    progress()

    async def send() -> None:
        while True:
            wake.clear()
            while gate.is_set() and (record := outbox.take(opening.epoch)) is not None:
                head = wire.pack_header(record.header)
                before = writer.bytes_sent
                payload = record.payload
                if payload is None:
                    await writer.write(_TAGS[Tag.DIGEST] + head)
                else:
                    data = payload if isinstance(payload, bytes) else await _read_back(outbox, record.header, payload)
                    await writer.write(_TAGS[Tag.FRAME] + head, data)
                counted(writer.bytes_sent - before)
            await (wake if gate.is_set() else gate).wait()

    async def listen() -> None:
        while True:
            tag = (await reader.read_exactly(1))[0]
            if tag == Tag.ACK:
                outbox.ack(wire.unpack_cursor(await reader.read_exactly(wire.CURSOR_BYTES)))
                progress()
            elif tag == Tag.REFUSE:
                refused = wire.unpack_answer(await reader.message())
                raise Refusal(refused.refused[:32], refused.reason[:200])
            elif tag != Tag.BEAT:
                raise WireError(f"record of unknown tag {tag} from {stream.remote}")

    await _together(send(), listen(), _watch(reader, settings), _beats(writer, settings))


async def _read_back(outbox: Outbox, header: Header, payload: Stored) -> bytes:
    """What was put on disk. ResumeGap if it is not there as it was: no neighbour's fault, and no other try helps."""

    def read() -> bytes:
        data = payload.read()
        if wire.digest(data) != header.digest:
            raise OSError("its bytes are not what was written")
        return data

    try:
        return await asyncio.to_thread(read)
    except OSError as error:
        if not outbox.has(header.cursor):  # acknowledged meanwhile, and let go
            raise
        what = f"what stage {outbox.src} kept on disk for stage {outbox.dst} cannot be read: {error}"
        raise ResumeGap(what) from None


async def read_open(stream: Stream, settings: ChannelSettings) -> Open:
    """The first message of an incoming stream, within `dead_s`."""
    async with asyncio.timeout(settings.dead_s):
        return wire.unpack_open(await LiveReader(stream, settings).message())


async def answer_open(stream: Stream, answer: Answer, settings: ChannelSettings) -> None:
    async with asyncio.timeout(settings.dead_s):
        await LiveWriter(stream, Limiter(None)).write(wire.pack_message(answer))


async def run_receiver(
    stream: Stream,
    inbox: Inbox,
    *,
    settings: ChannelSettings,
    room: asyncio.Event,
    deliver: Callable[[Frame], None],
) -> None:
    """Take frames until the stream breaks. `room` is clear while the reader must not take more."""
    reader, writer = LiveReader(stream, settings), LiveWriter(stream, Limiter(None))
    news = asyncio.Event()

    async def take() -> None:
        while True:
            await room.wait()
            tag = (await reader.read_exactly(1))[0]
            if tag == Tag.BEAT:
                continue
            if tag not in (Tag.FRAME, Tag.DIGEST):
                raise WireError(f"record of unknown tag {tag} from {stream.remote}")
            header = wire.unpack_header(await reader.read_exactly(wire.HEADER_BYTES))
            verdict = inbox.header(header)
            if tag == Tag.DIGEST:
                if verdict is Take.NEW:
                    raise WireError(f"{stream.remote} offers {header.cursor} by hash, which has not come yet")
                inbox.compare(header)
                continue
            payload = await reader.read_exactly(header.length) if header.length else b""
            frame = inbox.accept(header, payload)
            if frame is not None:
                deliver(frame)
                news.set()

    async def acknowledge() -> None:
        while True:
            await news.wait()
            news.clear()
            await writer.write(_TAGS[Tag.ACK] + wire.pack_cursor(inbox.cursor))
            await asyncio.sleep(settings.ack_every_s)

    try:
        await _together(take(), acknowledge(), _watch(reader, settings), _beats(writer, settings))
    except (WireError, FrameError) as error:
        code = "stale" if isinstance(error, StaleError) else "frame"
        refusal = wire.pack_message(Answer(inbox.cursor, code, str(error)))
        async with asyncio.timeout(1.0):
            await writer.write(_TAGS[Tag.REFUSE] + refusal)
        raise


async def _together(*parts: object) -> None:
    """Run the parts until the first ends; its error alone is raised, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(p) for p in parts]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

"""The trainer's end of one control stream: hello, offers, marks, heartbeats; says once when the volunteer is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dht.errors import DhtError
from dht.transport import Transport
from peer.channel_io import ChannelSettings
from peer.control_io import MessageStream
from peer.errors import PeerError, RefusedError, WireError
from peer.protocol import (
    CONTROL,
    PROTOCOL_VERSION,
    Accepted,
    Drop,
    Heartbeat,
    Hello,
    Keep,
    Kept,
    Mark,
    Marked,
    Refused,
    Signed,
    Snapshotted,
    StageFault,
    StageOffer,
    StageStatus,
    Suspect,
    ToTrainer,
    Welcome,
)

OPEN_TIMEOUT_S = 20.0
OFFER_TIMEOUT_S = 600.0  # a trial step of a large stage, its state fetched first; heartbeats go on meanwhile
MARK_TIMEOUT_S = 600.0
NOTED_S = 30.0  # an executor's loop answers, whatever its stages compute

K = TypeVar("K")
R = TypeVar("R")
_DECODER: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


class HostLost(PeerError):
    """A volunteer is gone: its stream ended, it fell silent, or it said that a stage stopped."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer[-8:]}: {reason}")
        self.peer, self.reason = peer, reason


class RunPaused(PeerError):
    """The run cannot go on now; what the trainer has is saved. Exit code 4."""

    exit_code = 4


class Host:
    """One volunteer. `serve` runs until the link ends and always ends by raising HostLost (or by cancellation)."""

    def __init__(
        self,
        transport: Transport,
        peer: str,
        *,
        on_status: Callable[[str, StageStatus], None],
        on_fault: Callable[[str, StageFault | Suspect], None],
        is_successor: Callable[[Signed], bool],
        channels: ChannelSettings,
    ) -> None:
        self.peer = peer
        self._beat_s, self._dead_s = channels.beat_s, channels.dead_s
        self.welcome: Welcome | None = None
        self._transport, self._on_status, self._on_fault = transport, on_status, on_fault
        self._is_successor = is_successor
        self._stream: MessageStream[ToTrainer] | None = None
        self._offers: dict[int, asyncio.Future[Accepted]] = {}
        self._keeps: dict[tuple[int, int], asyncio.Future[Kept]] = {}
        self._noted: dict[tuple[int, int], asyncio.Future[Marked]] = {}
        self._marks: dict[tuple[int, int], asyncio.Future[Snapshotted]] = {}
        self._gone: HostLost | None = None

    async def open(self, hello: Hello) -> Welcome:
        """Connect and be admitted. RefusedError, HostLost or TransportError."""
        stream = await self._transport.open_stream(self.peer, CONTROL, timeout_s=OPEN_TIMEOUT_S)
        self._stream = MessageStream(stream.reader, stream.writer, _DECODER)
        await self._send(hello)
        try:
            answer = await self._stream.receive(timeout_s=OPEN_TIMEOUT_S)
            while isinstance(answer, Heartbeat):
                answer = await self._stream.receive(timeout_s=OPEN_TIMEOUT_S)
        except TimeoutError:
            raise self._lose(f"no answer to our hello within {OPEN_TIMEOUT_S:.0f} s") from None
        if isinstance(answer, Refused):
            raise RefusedError(answer.code, answer.reason, needed=answer.needed, cap=answer.cap)
        if not isinstance(answer, Welcome):
            raise self._lose("the stream ended instead of a welcome" if answer is None else "answered out of turn")
        if answer.version != PROTOCOL_VERSION:
            raise RefusedError("version", f"it speaks protocol {answer.version}, this trainer {PROTOCOL_VERSION}")
        self.welcome = answer
        return answer

    async def serve(self) -> None:
        """Read and beat until the link ends; then every waiter and the caller get the same HostLost.

        RunPaused if another session of this run took over, and its certificate is the proof.
        """
        beats = asyncio.create_task(self._beat())
        try:
            await self._read()
        except TimeoutError:
            self._lose(f"silent for {self._dead_s:g} s")
        except (WireError, ConnectionError) as error:
            self._lose(str(error))
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats
        raise self._lose("its control stream ended")

    async def offer(self, offer: StageOffer, stage: int) -> Accepted:
        """RefusedError with the volunteer's reason, HostLost if it is gone."""
        return await self._ask(self._offers, stage, offer, OFFER_TIMEOUT_S, f"its answer on stage {stage}")

    async def mark(self, mark: Mark) -> asyncio.Future[Snapshotted]:
        """Once the mark is noted, so that its tick may be released: the snapshot to come, or HostLost."""
        key, made = (mark.stage, mark.tick), asyncio.get_running_loop().create_future()
        made.add_done_callback(lambda made: made.cancelled() or made.exception())  # seen, if nobody waits any more
        self._marks[key] = made
        try:
            await self._ask(self._noted, key, mark, NOTED_S, f"stage {mark.stage}'s word on the mark at {mark.tick}")
        except HostLost:
            self._marks.pop(key, None)
            raise
        return made

    async def keep(self, keep: Keep) -> Kept:
        """Its answer, once the snapshot is there."""
        what = f"stage {keep.stage}'s set at tick {keep.tick}"
        return await self._ask(self._keeps, (keep.stage, keep.tick), keep, MARK_TIMEOUT_S, what)

    def abandon(self, reason: str) -> None:
        """Nobody waits for this host's snapshots any more."""
        gone = HostLost(self.peer, reason)
        self._settle_marks(gone)

    def _settle_marks(self, gone: HostLost) -> None:
        for made in self._marks.values():
            _settle(made, gone)
        for noted in self._noted.values():
            _settle(noted, gone)
        self._marks.clear()

    async def send(self, message: msgspec.Struct) -> None:
        """Connect, Trim or Drop. HostLost if it is gone."""
        await self._send(message)

    async def leave(self, run: str, stages: tuple[int, ...], reason: str) -> None:
        """Drop these stages and close; never raises for a volunteer that is gone already."""
        with contextlib.suppress(PeerError, DhtError, OSError, TimeoutError):
            for stage in stages:
                await self._send(Drop(run=run, stage=stage, reason=reason))
        self.close("left")

    def close(self, reason: str) -> None:
        self._lose(reason)
        if self._stream is not None:
            self._stream.close()

    async def _send(self, message: msgspec.Struct) -> None:
        if self._gone is not None or self._stream is None:
            raise self._gone or HostLost(self.peer, "not connected")
        try:
            await self._stream.send(message, timeout_s=self._dead_s)
        except TimeoutError:
            raise self._lose(f"takes no messages for {self._dead_s:g} s") from None
        except (ConnectionError, RuntimeError) as error:  # uvloop: RuntimeError on a closed transport
            raise self._lose(f"its control stream broke ({error})") from None

    async def _ask(
        self, table: dict[K, asyncio.Future[R]], key: K, message: msgspec.Struct, timeout_s: float, what: str
    ) -> R:
        waiter: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        table[key] = waiter
        try:
            await self._send(message)
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise self._lose(f"{what} did not come within {timeout_s:.0f} s") from None
        finally:
            table.pop(key, None)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, if sending failed already

    async def _read(self) -> None:
        assert self._stream is not None
        while (message := await self._stream.receive(timeout_s=self._dead_s)) is not None:
            match message:
                case StageStatus():
                    self._on_status(self.peer, message)
                case Accepted(stage=stage):
                    _settle(self._offers.get(stage), message)
                case Refused(stage=stage) if stage in self._offers:
                    refusal = RefusedError(message.code, message.reason, needed=message.needed, cap=message.cap)
                    _settle(self._offers.get(stage), refusal)
                case Marked(stage=stage, tick=tick):
                    _settle(self._noted.get((stage, tick)), message)
                case Snapshotted(stage=stage, tick=tick):
                    _settle(self._marks.pop((stage, tick), None), message)
                case Kept(stage=stage, tick=tick):
                    _settle(self._keeps.get((stage, tick)), message)
                case StageFault() | Suspect():
                    self._on_fault(self.peer, message)
                case Refused(code="lease", cert=Signed() as cert) if self._is_successor(cert):
                    raise RunPaused(f"paused: {message.reason}; this session was replaced and ends")
                case Refused():
                    raise WireError(f"refuses ({message.code}): {message.reason}")
                case _:
                    pass

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._send(Heartbeat())
            except HostLost:
                return

    def _lose(self, reason: str) -> HostLost:
        if self._gone is None:
            self._gone = HostLost(self.peer, reason)
            for offer in self._offers.values():
                _settle(offer, self._gone)
            self._settle_marks(self._gone)
            for keep in self._keeps.values():
                _settle(keep, self._gone)
        return self._gone


def _settle(waiter: asyncio.Future[Any] | None, outcome: object) -> None:
    if waiter is None or waiter.done():
        return
    if isinstance(outcome, Exception):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)

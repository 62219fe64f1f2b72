"""One trainer's control stream at the volunteer: hello, then offers and commands, heartbeats both ways.

Everything before the hello is checked is bounded: how many streams, how long, how many bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from dht.transport import Stream
from peer.control_io import MessageStream
from peer.control_seats import MAX_STREAMS, Seat, Seats
from peer.errors import RefusedError, SignatureError, WireError
from peer.protocol import (
    PROTOCOL_VERSION,
    Connect,
    Drop,
    Heartbeat,
    Hello,
    Keep,
    Mark,
    Pass,
    Refused,
    Renew,
    RunSpec,
    SessionCert,
    Signed,
    StageOffer,
    ToVolunteer,
    Trim,
    Welcome,
)
from peer.signing import check_session, open_signed
from peer.volunteer import Volunteer

log = logging.getLogger("peer.daemon")

MAX_HELLO = 64 << 10
HELLO_S = 10.0
SEND_S = 8.0
MAX_QUEUED = 10_000
IDLE_S = 60.0  # with nothing of its run here, where streams are scarce; a spare is greeted again
CROWDED = MAX_STREAMS // 2
_DECODER: msgspec.msgpack.Decoder[ToVolunteer] = msgspec.msgpack.Decoder(ToVolunteer)


class TrainerSession:
    """See `volunteer.Session`."""

    def __init__(
        self,
        stream: MessageStream[ToVolunteer],
        spec: RunSpec,
        cert: SessionCert,
        signed: Signed,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spec, self.cert, self.signed_cert, self._clock = spec, cert, signed, clock
        self._stream = stream
        self._queue: asyncio.Queue[msgspec.Struct | None] = asyncio.Queue()

    def post(self, message: msgspec.Struct) -> None:
        self._queue.put_nowait(message)
        if self._queue.qsize() > MAX_QUEUED:
            self._stream.close()  # it takes no messages

    def end(self, code: str, reason: str, cert: Signed) -> None:
        """Tell the trainer why and whose certificate says so, then close."""
        self.post(Refused(code=code, reason=reason, cert=cert))
        self._queue.put_nowait(None)

    async def run(self, volunteer: Volunteer, beat_s: float, dead_s: float, crowded: Callable[[], bool]) -> None:
        """Until the stream ends, or is needed for others (`crowded`) while nothing of the run is here."""
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(w) for w in (self._send(), self._beat(beat_s), self._idle(volunteer, crowded))]
            try:
                await self._receive(volunteer, dead_s)
            finally:
                for task in others:
                    task.cancel()

    async def _idle(self, volunteer: Volunteer, crowded: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            await asyncio.sleep(IDLE_S / 8)
            now = loop.time()
            if volunteer.holds(self.spec.run):
                since = now
            elif now - since > IDLE_S and crowded():
                raise WireError(f"nothing of its run here for {IDLE_S:g} s; others need the control stream")

    async def _receive(self, volunteer: Volunteer, dead_s: float) -> None:
        while (message := await self._stream.receive(timeout_s=dead_s)) is not None:
            if not self.cert.expires > self._clock():
                raise WireError("its session certificate has run out and was not renewed")
            volunteer.heard(self)
            match message:
                case Renew():
                    self.renew(message.cert)
                case StageOffer():
                    await self._offer(volunteer, message)
                case Connect() | Mark() | Trim() | Pass() | Drop():
                    await volunteer.command(self, message)
                case Keep():
                    await volunteer.keep(self, message)
                case Hello():
                    raise WireError("a second hello on one control stream")
                case Heartbeat():
                    pass

    def renew(self, signed: Signed) -> None:
        """Go on under a certificate that ends later. WireError if it is not the same session's."""
        try:
            cert = open_signed(signed, SessionCert, self.spec.owner)
        except SignatureError as error:
            raise WireError(str(error)) from None
        if msgspec.structs.replace(cert, expires=self.cert.expires) != self.cert:
            raise WireError(f"a certificate of another session (epoch {cert.epoch}) where ours is renewed")
        self.cert, self.signed_cert = cert, signed

    async def _offer(self, volunteer: Volunteer, offer: StageOffer) -> None:
        try:
            await volunteer.offer(self, offer)
        except RefusedError as error:
            self.post(_refused(error, _stage_of(offer)))
        except SignatureError as error:
            self.post(Refused(code="signature", reason=str(error), stage=_stage_of(offer)))

    async def _send(self) -> None:
        while (message := await self._queue.get()) is not None:
            await self._stream.send(message, timeout_s=SEND_S)
        self._stream.close()

    async def _beat(self, beat_s: float) -> None:
        while True:
            await asyncio.sleep(beat_s)
            self.post(Heartbeat())


async def _no_range(peer: str) -> str:
    return ""


class ControlServer:
    """Handles streams of protocol CONTROL. `range_of`: the address range that a peer is connected from, "" unknown."""

    def __init__(
        self,
        volunteer: Volunteer,
        *,
        beat_s: float,
        dead_s: float,
        range_of: Callable[[str], Awaitable[str]] = _no_range,
    ) -> None:
        self._volunteer, self._beat_s, self._dead_s = volunteer, beat_s, dead_s
        self._range_of = range_of
        self._seats = Seats(volunteer.holds)

    async def handle(self, stream: Stream) -> None:
        remote = stream.remote
        seat = Seat(remote, await self._range_of(remote), time.monotonic(), stream.writer.close)
        if reason := self._seats.take(seat):
            log.warning("a control stream of %s is refused: %s", remote, reason)
            return
        try:
            await self._serve(stream, seat)
        except* (OSError, TimeoutError, WireError, RuntimeError) as group:
            log.info("trainer %s: %s", remote, group.exceptions[0])
        finally:
            self._seats.give_up(seat)
            stream.writer.close()

    async def _serve(self, stream: Stream, seat: Seat) -> None:
        first = MessageStream(stream.reader, stream.writer, _DECODER, limit=MAX_HELLO)
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await first.receive(timeout_s=HELLO_S)
            if not isinstance(hello, Hello):
                raise WireError("a control stream begins with a hello")
            if hello.version != PROTOCOL_VERSION:
                reason = f"trainer speaks protocol {hello.version}, this volunteer {PROTOCOL_VERSION}: update the older"
                raise RefusedError("version", reason)
            spec, cert = check_session(hello.spec, hello.cert, remote_peer=stream.remote, now=time.time())
            session = TrainerSession(MessageStream(stream.reader, stream.writer, _DECODER), spec, cert, hello.cert)
            self._volunteer.admit(session)
            seat.run = spec.run
        except SignatureError as error:
            return await first.send(Refused(code="signature", reason=str(error)), timeout_s=SEND_S)
        except RefusedError as error:
            return await first.send(_refused(error, -1), timeout_s=SEND_S)
        log.info("run %s (%s) of owner %s: trainer %s", spec.run, spec.name[:40], spec.owner.hex()[:16], stream.remote)
        try:
            session.post(
                Welcome(
                    version=PROTOCOL_VERSION, peer=self._volunteer.peer_id, devices=tuple(self._volunteer.executors),
                    have_opdags=self._volunteer.have_opdags(), held=self._volunteer.held(spec.run),
                )
            )  # fmt: skip
            await session.run(self._volunteer, self._beat_s, self._dead_s, lambda: len(self._seats) > CROWDED)
        finally:
            self._volunteer.part(session)


def _refused(error: RefusedError, stage: int) -> Refused:
    return Refused(code=error.code, reason=str(error), stage=stage, needed=error.needed, cap=error.cap)


def _stage_of(offer: StageOffer) -> int:
    """The stage number that an offer claims, for the refusal only; -1 if it cannot be read."""
    try:
        return int(msgspec.msgpack.decode(offer.assignment.body, type=_Claim).stage)
    except (msgspec.MsgspecError, RecursionError):
        return -1


class _Claim(msgspec.Struct):
    stage: int

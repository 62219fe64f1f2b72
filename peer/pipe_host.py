"""A public peer that offers itself (`--relay-mbps`) joins the streams of two peers that cannot reach one another.

libp2p's relays reset bulk streams after some 100 KiB, so tensors take this way. A peer that cannot be dialled *rests*
here: it keeps one stream open, on which it is rung. Who wants to reach it *calls*; it answers by opening a stream of
its own, and the two are joined. If the caller can be dialled, the rung peer dials it instead, and nothing is piped.
What passes is sealed end to end (`pipe_seal`). All pipes together share the rate on offer; bytes are counted by peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dht.errors import TransportError
from dht.transport import Stream, Transport
from peer.control_io import MessageStream
from peer.errors import WireError
from peer.ratelimit import Limiter
from peer.wire import CHUNK_BYTES

log = logging.getLogger("peer.pipes")

PIPE = "/fusion/1/pipe"
MAX_MESSAGE = 4096
MAX_RESTING, MAX_PIPES, MAX_PER_PEER = 256, 128, 16
RESTING_PER_RANGE, PIPES_PER_RANGE = MAX_RESTING // 4, MAX_PIPES // 4  # a /24 of IPv4, a /48 of IPv6
FIRST_S, RING_S, SEND_S = 5.0, 10.0, 5.0
ALIVE_S, SILENT_S = 5.0, 16.0
IDLE_S = 60.0
_COUNTED = 1024  # peers

PeerText = Annotated[str, Meta(min_length=46, max_length=64)]
Where = Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """Ring me on this stream."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Every ALIVE_S, both ways, on a stream that rests."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Join me with `peer`. `addresses`: where the caller can be dialled, () if it cannot."""

    peer: PeerText
    addresses: Where = ()


class Ring(msgspec.Struct, frozen=True, tag="ring"):
    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    caller: PeerText
    addresses: Where = ()


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`direct`: the called peer has connected to the caller, which no longer needs a pipe."""

    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    direct: bool = False


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """From here on every byte is the other end's."""


class Direct(msgspec.Struct, frozen=True, tag="direct"):
    """The called peer has connected to you: open the stream yourself."""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    reason: Annotated[str, Meta(max_length=300)]


ToHost = Rest | Alive | Call | Answer
FromHost = Ring | Alive | Joined | Direct | Refuse
_DECODER: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


@dataclass(slots=True)
class _Resting:
    talk: MessageStream[ToHost]
    range: str


@dataclass(slots=True)
class _Waiting:
    """A caller that waits for `peer` to answer."""

    peer: str
    answered: asyncio.Future[Stream | None]  # None: it connected to the caller
    over: asyncio.Event = field(default_factory=asyncio.Event)


async def _no_range(peer: str) -> str:
    return ""


class PipeHost:
    """`refuses`: why nothing is carried now ("" if it is), as over a cap. `range_of`: the address range that a peer is
    connected from; identities are free, addresses are not. Those of whom it is unknown ("") count as one range."""

    def __init__(
        self,
        transport: Transport,
        bytes_per_s: float,
        *,
        refuses: Callable[[], str] = lambda: "",
        range_of: Callable[[str], Awaitable[str]] = _no_range,
    ) -> None:
        self._transport, self._refuses, self._range_of = transport, refuses, range_of
        self._limiter = Limiter(bytes_per_s)
        self._resting: dict[str, _Resting] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._open: Counter[str] = Counter()  # pipes by peer
        self._open_from: Counter[str] = Counter()  # and by range
        self.carried: Counter[str] = Counter()  # bytes by the peer that sent them

    async def start(self) -> None:
        await self._transport.serve(PIPE, self.handle)

    @property
    def pipes(self) -> int:
        return self._open.total() // 2

    @property
    def resting(self) -> int:
        return len(self._resting)

    async def handle(self, stream: Stream) -> None:
        """One stream of PIPE, until it ends."""
        talk = MessageStream(stream.reader, stream.writer, _DECODER, limit=MAX_MESSAGE)
        try:
            match await talk.receive(timeout_s=FIRST_S):
                case Rest():
                    await self._rest(stream.remote, talk)
                case Call() as wanted:
                    await self._call(stream, talk, wanted)
                case Answer() as given:
                    await self._answer(stream, given)
                case _:
                    return
        except (OSError, TimeoutError, WireError, RuntimeError, TransportError) as error:
            log.info("pipe of peer %s: %s", stream.remote, error or type(error).__name__)
        finally:
            stream.writer.close()

    # --- who can be rung

    async def _rest(self, peer: str, talk: MessageStream[ToHost]) -> None:
        seat = _Resting(talk, await self._range_of(peer))
        before = self._resting.pop(peer, None)
        if before is not None:
            before.talk.close()
        elif why := self._crowded(seat.range):
            return await talk.send(Refuse(why), timeout_s=SEND_S)
        self._resting[peer] = seat
        beats = asyncio.ensure_future(beat(talk, Alive()))
        try:
            while isinstance(await talk.receive(timeout_s=SILENT_S), Alive):
                pass
        finally:
            beats.cancel()
            if self._resting.get(peer) is seat:
                del self._resting[peer]

    def _crowded(self, from_range: str) -> str:
        """ "" if one more may rest from there, whose seat is free now: where all are taken, that of a peer without a
        pipe of the fullest range. Else why not."""
        taken = Counter(s.range for s in self._resting.values())
        if taken[from_range] >= RESTING_PER_RANGE:
            return f"{taken[from_range]} peers of {from_range or 'unknown addresses'} rest here"
        if len(self._resting) < MAX_RESTING:
            return ""
        idle = [p for p, s in self._resting.items() if not self._open[p] and taken[s.range] > taken[from_range] + 1]
        if not idle:
            return f"{MAX_RESTING} peers rest here"
        self._resting.pop(max(idle, key=lambda p: taken[self._resting[p].range])).talk.close()
        return ""

    # --- who calls

    async def _call(self, stream: Stream, talk: MessageStream[ToHost], wanted: Call) -> None:
        caller, ticket = stream.remote, secrets.token_bytes(16)
        target, ranges = self._resting.get(wanted.peer), {await self._range_of(caller)}
        if target is not None:
            ranges.add(target.range)
        why = self._why_not(caller, wanted.peer, ranges)
        if target is None or why:
            reason = why or f"peer {wanted.peer} does not rest here"
            return await talk.send(Refuse(reason), timeout_s=SEND_S)
        waiting = self._waiting[ticket] = _Waiting(wanted.peer, asyncio.get_running_loop().create_future())
        self._open.update((caller, wanted.peer))
        self._open_from.update(ranges)
        try:
            await target.talk.send(Ring(ticket, caller, wanted.addresses), timeout_s=SEND_S)
            try:
                async with asyncio.timeout(RING_S):
                    other = await waiting.answered
            except TimeoutError:
                return await talk.send(Refuse(f"peer {wanted.peer} does not answer"), timeout_s=SEND_S)
            if other is None:
                return await talk.send(Direct(), timeout_s=SEND_S)
            for end in (stream, other):
                await MessageStream(end.reader, end.writer, _DECODER).send(Joined(), timeout_s=SEND_S)
            await self._splice(stream, other)
        finally:
            del self._waiting[ticket]
            waiting.over.set()
            self._open.subtract((caller, wanted.peer))
            self._open_from.subtract(ranges)
            self._open += Counter()  # drops the zeros
            self._open_from += Counter()

    def _why_not(self, caller: str, target: str, ranges: set[str]) -> str:
        if reason := self._refuses():
            return reason[:300]
        if self.pipes >= MAX_PIPES:
            return f"{MAX_PIPES} pipes are open here"
        crowded = next((p for p in (caller, target) if self._open[p] >= MAX_PER_PEER), "")
        if crowded:
            return f"peer {crowded} has {MAX_PER_PEER} pipes here"
        full = next((r for r in sorted(ranges) if self._open_from[r] >= PIPES_PER_RANGE), None)
        return "" if full is None else f"{full or 'unknown addresses'} have {PIPES_PER_RANGE} pipes here"

    async def _answer(self, stream: Stream, given: Answer) -> None:
        waiting = self._waiting.get(given.ticket)
        if waiting is None or waiting.peer != stream.remote or waiting.answered.done():
            return  # too late, or not the peer that was rung
        waiting.answered.set_result(None if given.direct else stream)
        await waiting.over.wait()

    async def _splice(self, a: Stream, b: Stream) -> None:
        """Until either ends, or neither sends for IDLE_S: who fetches a snapshot says nothing for long."""
        passed: Counter[str] = Counter()
        parts = self._copy(a, b, passed), self._copy(b, a, passed), _until_idle(passed)
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            b.writer.close()

    async def _copy(self, source: Stream, sink: Stream, passed: Counter[str]) -> None:
        step = self._limiter.slice_bytes(CHUNK_BYTES)
        while data := await source.reader.read(step):
            await self._limiter.take(len(data))
            passed[source.remote] += len(data)
            self._count(source.remote, len(data))
            sink.writer.write(data)
            await sink.writer.drain()

    def _count(self, peer: str, count: int) -> None:
        self.carried[peer] += count
        if len(self.carried) > _COUNTED:
            least = min(self.carried, key=lambda p: (p == peer, self.carried[p]))
            del self.carried[least]


async def _until_idle(passed: Counter[str]) -> None:
    """Until the same bytes have passed as IDLE_S before."""
    before = -1
    while passed.total() != before:
        before = passed.total()
        await asyncio.sleep(IDLE_S)


async def beat(talk: MessageStream[Any], first: Rest | Alive) -> None:
    """`first`, then a sign of life every ALIVE_S, until the stream fails."""
    with contextlib.suppress(OSError, TimeoutError, RuntimeError):
        await talk.send(first, timeout_s=SEND_S)
        while True:
            await asyncio.sleep(ALIVE_S)
            await talk.send(Alive(), timeout_s=SEND_S)

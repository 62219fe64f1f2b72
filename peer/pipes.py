"""The two ends of a pipe (`pipe_host`): resting where one can be rung, calling who rests, joining both to streams.

One `Pipes` per peer, in the process that owns its p2pd and identity. `SelfDial` of any process of that peer asks it,
over a Unix socket in p2pd's private folder, for a stream to a peer that cannot be dialled; a stream that comes through
a pipe is handed to whichever process serves its protocol. When a host dies the streams through it end, are opened
again by their channels, and go by another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dht import addresses
from dht.door import Door
from dht.errors import DhtError, PeerUnreachable, TransportError
from dht.identity import Identity
from dht.transport import Stream, Transport
from peer import pipe_seal
from peer.control_io import MessageStream
from peer.errors import WireError
from peer.pipe_host import (
    MAX_MESSAGE,
    PIPE,
    RING_S,
    SEND_S,
    SILENT_S,
    Answer,
    Call,
    Direct,
    FromHost,
    Joined,
    Refuse,
    Rest,
    Ring,
    beat,
)
from peer.pipe_seal import Sealed
from peer.protocol import data_protocol

log = logging.getLogger("peer.pipes")

HOSTS = 2  # rested at, so that one may die
LOOK_S = 5.0  # between looks for hosts while there are too few
OPEN_S = 5.0
REVERSE_S = 3.0
MAX_PROTOCOL = 200
MAX_AT_ONCE = 32  # calls answered at a time
MAX_SILENT = 64  # hosts remembered for not answering
FAREWELL_S = 1.0
DOOR, CALL = "pipe", "call through a pipe"
_FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
_FAILURES = (OSError, EOFError, TimeoutError, DhtError, WireError, RuntimeError)  # DhtError: an address that is none


class Through(msgspec.Struct, frozen=True, tag="through"):
    """A process of this peer asks for a stream of `protocol` at `peer`, which rests at `hosts` (addresses)."""

    peer: str
    protocol: Annotated[str, Meta(max_length=MAX_PROTOCOL)]
    hosts: Annotated[tuple[str, ...], Meta(max_length=16)]


_THROUGH = msgspec.msgpack.Decoder(Through)
FROM_DOOR: msgspec.msgpack.Decoder[Joined | Direct | Refuse] = msgspec.msgpack.Decoder(Joined | Direct | Refuse)


def circuit(host: str, peer: str) -> str:
    """The address of `peer` by way of `host` (an address that ends in /p2p/HOST)."""
    return f"{host}{addresses.CIRCUIT}/p2p/{peer}"


def hosts_of(known: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts (as addresses) in a peer's addresses; of malformed ones none."""
    return tuple(dict.fromkeys(a.partition(addresses.CIRCUIT)[0] for a in known if addresses.is_relayed(a)))


class Pipes:
    """`find`: addresses of peers that offer pipes, best first. `deliver(protocol)`: a local stream to whoever serves it
    here, NoSuchProtocol if nobody does. `changed` is called when this peer rests at other hosts than before. Who comes
    through a pipe passes `gate` as who dials does."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        folder: Path,
        *,
        find: Callable[[], Awaitable[list[str]]],
        deliver: Callable[[str, str], Awaitable[Stream]],
        changed: Callable[[], None] = lambda: None,
        gate: Door | None = None,
    ) -> None:
        self._gate = gate or Door(identity.peer_id)
        self._transport, self._identity, self._door = transport, identity, folder / DOOR
        self._find, self._deliver, self._changed = find, deliver, changed
        self.dialled_at: tuple[str, ...] = ()  # where this peer can be dialled, once that is known
        self._rested: dict[str, str] = {}  # host -> its address
        self._trying: set[str] = set()
        self._failures: Counter[str] = Counter()  # by host: who failed least is tried first
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering = 0
        self._silent: dict[str, int] = {}  # host -> calls that it did not answer; who has the most is asked last
        self._talks: Counter[str] = Counter()  # streams through pipes now, either way, by peer
        self._calls: dict[asyncio.Task[None], str] = {}  # those of tensors that this peer opened, to whom
        self._server: asyncio.Server | None = None
        self._resting: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Takes requests of this peer's processes from now on."""
        self._server = await asyncio.start_unix_server(self._at_door, path=str(self._door), limit=1 << 20)

    def rest(self) -> None:
        """This peer cannot be dialled: keep resting at HOSTS hosts from now on."""
        if self._resting is None:
            self._resting = asyncio.create_task(self._keep_resting(), name="resting at pipe hosts")

    @property
    def resting(self) -> bool:
        return self._resting is not None

    def addresses(self) -> tuple[str, ...]:
        """This peer's addresses by way of the hosts it rests at."""
        return tuple(circuit(host, self._transport.peer_id) for host in self._rested.values())

    async def until_rested(self, timeout_s: float) -> bool:
        """Whether it rests somewhere, after `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._rested:
                    self._news.clear()
                    await self._news.wait()
        return bool(self._rested)

    @property
    def talking(self) -> frozenset[str]:
        """Peers that streams go to, or come from, through pipes now."""
        return frozenset(self._talks)

    def end_calls(self, peer: str) -> int:
        """End the tensor streams to `peer` that this peer opened, and how many; their channels open others."""
        calls = [task for task, to in self._calls.items() if to == peer]
        for task in calls:
            task.cancel()
        return len(calls)

    @contextlib.contextmanager
    def _talk_with(self, peer: str) -> Iterator[None]:
        self._talks[peer] += 1
        try:
            yield
        finally:
            self._talks[peer] -= 1
            self._talks += Counter()  # drops what is zero

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._door.unlink(missing_ok=True)
        if self._resting is not None:
            self._resting.cancel()
        calls = [t for t in self._tasks if t.get_name() == CALL]
        if calls:  # what was written last, as a farewell, still passes
            await asyncio.wait(calls, timeout=FAREWELL_S)
        tasks = [*self._tasks, *([self._resting] if self._resting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- resting

    async def _keep_resting(self) -> None:
        while True:
            wanted = HOSTS - len(self._rested) - len(self._trying)
            if wanted > 0:
                try:
                    found = await self._find()
                except DhtError as error:
                    log.info("looking for pipe hosts: %s", error)
                    found = []
                for address in self._best(found)[:wanted]:
                    self._trying.add(_host_id(address))
                    self._spawn(self._rest_at(address))
            await asyncio.sleep(LOOK_S)

    def _best(self, found: list[str]) -> list[str]:
        """Where to rest next: a host that is full, or no host at all, does not stand before others for ever."""
        hosts = {_host_id(a) for a in found}
        self._failures = Counter({h: n for h, n in self._failures.items() if h in hosts})
        new = [a for a in found if _host_id(a) not in self._rested.keys() | self._trying]
        return sorted(new, key=lambda a: self._failures[_host_id(a)])

    async def _rest_at(self, address: str) -> None:
        host = _host_id(address)
        try:
            stream = await self._open(address)
            talk: MessageStream[FromHost] = MessageStream(stream.reader, stream.writer, _FROM_HOST, limit=MAX_MESSAGE)
            beats = asyncio.ensure_future(beat(talk, Rest()))
            try:
                while (message := await talk.receive(timeout_s=SILENT_S)) is not None:
                    if isinstance(message, Ring):
                        self._ring(address, message)
                    elif isinstance(message, Refuse):
                        raise TransportError(message.reason)
                    if host not in self._rested:
                        self._rest(host, address)
            finally:
                beats.cancel()
                stream.writer.close()
            log.info("pipe host %s ended the stream", host)
        except _FAILURES as error:
            log.info("resting at pipe host %s: %s", host, error or type(error).__name__)
        finally:
            self._trying.discard(host)
            self._failures[host] += 1
            if self._rested.pop(host, None) is not None:
                self._changed()

    def _rest(self, host: str, address: str) -> None:
        self._rested[host] = address
        self._trying.discard(host)
        log.info("resting at pipe host %s", host)
        self._news.set()
        self._changed()

    def _ring(self, address: str, ring: Ring) -> None:
        if self._answering < MAX_AT_ONCE and not self._gate.banned(ring.caller):
            self._spawn(self._answer(address, ring))

    async def _answer(self, address: str, ring: Ring) -> None:
        """Dial the caller where it can be dialled, else meet it at the host."""
        self._answering += 1
        try:
            if ring.addresses and await self._reaches(ring):
                stream = await self._open(address)
                await _talk(stream).send(Answer(ring.ticket, direct=True), timeout_s=SEND_S)
                stream.writer.close()
                return
            stream = await self._open(address)
            try:
                talk = _talk(stream)
                await talk.send(Answer(ring.ticket), timeout_s=SEND_S)
                if not isinstance(await talk.receive(timeout_s=RING_S), Joined):
                    return
                sealed = await pipe_seal.answer(stream, self._identity, ring.caller)
                async with asyncio.timeout(RING_S):
                    protocol = (await sealed.read()).decode("utf-8", "replace")[:MAX_PROTOCOL]
                if why := self._gate.enter(ring.caller, "", asyncio.get_running_loop().time()):
                    raise TransportError(why)
                try:
                    local = await self._deliver(protocol, ring.caller)
                except BaseException:
                    self._gate.leave(ring.caller, "")
                    raise
            except BaseException:
                stream.writer.close()
                raise
        except _FAILURES as error:
            log.info("the call of peer %s by way of %s: %s", ring.caller, _host_id(address), error or "no answer")
            return
        finally:
            self._answering -= 1
        try:
            with contextlib.suppress(*_FAILURES), self._talk_with(ring.caller):
                await pipe_seal.pump(sealed, local.reader, local.writer)
        finally:
            self._gate.leave(ring.caller, "")

    async def _reaches(self, ring: Ring) -> bool:
        try:
            await self._transport.connect(ring.caller, ring.addresses, timeout_s=REVERSE_S)
            found = (await self._transport.connected()).get(ring.caller, ())
        except DhtError:
            return False
        return any(not addresses.is_relayed(a) for a in found)

    # --- calling

    async def _at_door(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process of this peer wants a stream."""
        task = asyncio.current_task()
        if task is not None:
            task.set_name(CALL)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        talk = MessageStream(reader, writer, _THROUGH, limit=MAX_MESSAGE)
        try:
            wanted = await talk.receive(timeout_s=SEND_S)
            if wanted is None:
                return
            found = await self._call(wanted)
            if isinstance(found, Sealed):
                try:
                    await talk.send(Joined(), timeout_s=SEND_S)
                except BaseException:  # who asked has gone
                    found.close()
                    raise
                if task is not None and wanted.protocol.startswith(data_protocol("")):
                    self._calls[task] = wanted.peer
                with self._talk_with(wanted.peer):
                    await pipe_seal.pump(found, reader, writer)
            else:
                await talk.send(found, timeout_s=SEND_S)
        except asyncio.CancelledError:
            pass  # this peer leaves, or there is a better way
        except _FAILURES as error:
            log.info("a stream through a pipe ended: %s", error or type(error).__name__)
        finally:
            if task is not None:
                self._calls.pop(task, None)
            writer.close()

    async def _call(self, wanted: Through) -> Sealed | Direct | Refuse:
        failures = []
        for address in sorted(wanted.hosts, key=lambda a: self._silent.get(_host_id(a), 0)):
            host = _host_id(address)
            try:
                found = await self._call_at(address, wanted)
            except _FAILURES as error:
                failures.append(f"{host[-8:]}: {error or 'no answer'}")
                if isinstance(error, TimeoutError | PeerUnreachable):
                    self._silent[host] = self._silent.pop(host, 0) + 1
                    if len(self._silent) > MAX_SILENT:
                        del self._silent[next(iter(self._silent))]
            else:
                self._silent.pop(host, None)
                return found
        return Refuse("; ".join(failures)[:300] or "it names no host")

    async def _call_at(self, address: str, wanted: Through) -> Sealed | Direct:
        stream = await self._open(address)
        try:
            talk = _talk(stream)
            await talk.send(Call(wanted.peer, self.dialled_at), timeout_s=SEND_S)
            match await talk.receive(timeout_s=RING_S + SEND_S):
                case Joined():
                    try:
                        sealed = await pipe_seal.call(stream, self._identity, wanted.peer)
                        await sealed.write(wanted.protocol.encode())
                    except TimeoutError:  # not the host's fault
                        raise TransportError(f"peer {wanted.peer} says nothing in the pipe") from None
                    return sealed
                case Direct():
                    stream.writer.close()
                    return Direct()
                case Refuse(reason):
                    raise TransportError(reason)
                case _:
                    raise TransportError("it ended the stream")
        except BaseException:
            stream.writer.close()
            raise

    async def _open(self, address: str) -> Stream:
        found = addresses.parse_swarm_address(address)
        await self._transport.connect(found.peer_id, (found.transport,), timeout_s=OPEN_S)
        return await self._transport.open_stream(found.peer_id, PIPE, timeout_s=OPEN_S)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def through(folder: Path, peer: str, protocol: str, hosts: tuple[str, ...], timeout_s: float) -> Stream | None:
    """A stream to `peer` by way of `hosts`, from any process of this peer; None: open it directly, it has connected
    here. PeerUnreachable says in plain words what is missing."""
    what = f"peer {peer} cannot be dialled from here"
    writer: asyncio.StreamWriter | None = None
    reply: Joined | Direct | Refuse | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(folder / DOOR), limit=1 << 20)
            talk = MessageStream(reader, writer, FROM_DOOR, limit=MAX_MESSAGE)
            await talk.send(Through(peer, protocol, hosts[:16]), timeout_s=timeout_s)
            reply = await talk.receive(timeout_s=timeout_s)
        if isinstance(reply, Joined):
            return Stream(peer, reader, writer)
    except (OSError, TimeoutError, WireError) as error:
        raise PeerUnreachable(f"{what}, and its pipes do not answer: {error or f'{timeout_s:g} s'}") from error
    finally:
        if writer is not None and not isinstance(reply, Joined):
            writer.close()
    if isinstance(reply, Direct):
        return None
    reason = reply.reason if isinstance(reply, Refuse) else "the door closed"
    raise PeerUnreachable(
        f"{what}; two peers that cannot be dialled need a public one that offers a pipe (fusion-peer join --relay-mbps "
        f"50): {reason}"
    )


def _talk(stream: Stream) -> MessageStream[FromHost]:
    return MessageStream(stream.reader, stream.writer, _FROM_HOST, limit=MAX_MESSAGE)


def _host_id(address: str) -> str:
    return address.rpartition("/p2p/")[2]

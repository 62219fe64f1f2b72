"""`dht.transport.Transport` in memory: one loop, no sockets, with streams that tests can cut or stall."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

from dht.errors import NoSuchProtocol, PeerUnreachable
from dht.transport import Stream, StreamHandler

HIGH_WATER = 256 << 10


class _Reader(asyncio.StreamReader):
    """Sets `drained` whenever somebody has read, so that the writer's `drain` need not poll."""

    def __init__(self) -> None:
        super().__init__(limit=64 << 20)
        self.drained = asyncio.Event()
        self.held = 0

    def feed_data(self, data: bytes) -> None:
        self.held += len(data)
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        data = await super().read(n)
        self.held -= len(data)
        self.drained.set()
        return data

    async def readexactly(self, n: int) -> bytes:
        data = await super().readexactly(n)
        self.held -= len(data)
        self.drained.set()
        return data


class _Writer:
    """The writing end of a pipe; feeds the other end's reader and waits in `drain` while that one is full."""

    def __init__(self, pipe: Pipe, theirs: _Reader) -> None:
        self._pipe, self._theirs = pipe, theirs

    def write(self, data: bytes | memoryview) -> None:
        if not self._pipe.closed and not self._pipe.mute:
            self._pipe.network.wire += data
            self._theirs.feed_data(bytes(data))
            self._pipe.bytes += len(data)

    @property
    def transport(self) -> _Writer:
        return self

    def get_write_buffer_size(self) -> int:
        return self._theirs.held

    async def drain(self) -> None:
        if self._pipe.closed:
            raise ConnectionResetError("stream closed")
        while not self._pipe.closed and self._theirs.held > HIGH_WATER:
            self._theirs.drained.clear()
            await self._theirs.drained.wait()
        await self._pipe.flow.wait()

    def close(self) -> None:
        self._pipe.cut()

    def is_closing(self) -> bool:
        return self._pipe.closed

    async def wait_closed(self) -> None:
        return


class Pipe:
    """Both directions of one stream."""

    def __init__(self, network: Network, opener: str, acceptor: str, protocol: str) -> None:
        self.opener, self.acceptor, self.protocol = opener, acceptor, protocol
        self.closed = False
        self.mute = False  # what is written is lost, as with a cut cable
        self.bytes = 0
        self.flow = asyncio.Event()  # clear: nothing gets through, as with a frozen peer
        self.flow.set()
        self.a, self.b = _Reader(), _Reader()
        self.network = network

    def ends(self) -> tuple[Stream, Stream]:
        a = cast(asyncio.StreamWriter, _Writer(self, self.b))
        b = cast(asyncio.StreamWriter, _Writer(self, self.a))
        return Stream(self.acceptor, self.a, a), Stream(self.opener, self.b, b)

    def cut(self) -> None:
        if not self.closed:
            self.closed = True
            self.network.pipes.discard(self)
            for reader in (self.a, self.b):
                reader.feed_eof()
                reader.drained.set()
            self.flow.set()


@dataclass
class Network:
    """Peers by id; `dead` peers cannot be dialled, `private` ones only over a connection that they made themselves."""

    peers: dict[str, MemoryTransport] = field(default_factory=dict)
    pipes: set[Pipe] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    linked: set[frozenset[str]] = field(default_factory=set)
    opened: int = 0
    wire: bytearray = field(default_factory=bytearray)  # every byte that passed

    def transport(self, peer_id: str) -> MemoryTransport:
        self.peers[peer_id] = MemoryTransport(self, peer_id)
        return self.peers[peer_id]

    def cut(self, peer_id: str) -> None:
        """End every stream of this peer, as when its process dies."""
        for pipe in [p for p in self.pipes if peer_id in (p.opener, p.acceptor)]:
            pipe.cut()


class MemoryTransport:
    def __init__(self, network: Network, peer_id: str) -> None:
        self._network, self._peer_id = network, peer_id
        self._handlers: dict[str, StreamHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def control_address(self) -> str:
        return "/unix/none"

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        if peer_id in self._network.dead or peer_id not in self._network.peers:
            raise PeerUnreachable(f"connecting to peer {peer_id}: no such peer")
        pair = frozenset((self._peer_id, peer_id))
        if peer_id in self._network.private and pair not in self._network.linked:
            raise PeerUnreachable(f"connecting to peer {peer_id}: it cannot be dialled")
        self._network.linked.add(pair)

    async def connected(self) -> dict[str, tuple[str, ...]]:
        pairs = [p for p in self._network.linked if self._peer_id in p]
        return {other: ("/ip4/192.0.2.1/tcp/1",) for p in pairs for other in p - {self._peer_id}}

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        await self.connect(peer_id, ())
        handler = self._network.peers[peer_id]._handlers.get(protocol)
        if handler is None:
            raise NoSuchProtocol(f"peer {peer_id} serves no {protocol}")
        pipe = Pipe(self._network, self._peer_id, peer_id, protocol)
        self._network.pipes.add(pipe)
        self._network.opened += 1
        mine, theirs = pipe.ends()

        async def run() -> None:
            try:
                await handler(theirs)
            finally:
                pipe.cut()

        task = asyncio.ensure_future(run())
        self._network.peers[peer_id]._tasks.add(task)
        task.add_done_callback(self._network.peers[peer_id]._tasks.discard)
        return mine

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    async def stop_serving(self, protocol: str) -> None:
        self._handlers.pop(protocol, None)

    async def close(self) -> None:
        self._network.cut(self._peer_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

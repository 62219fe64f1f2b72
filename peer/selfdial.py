"""A transport that also reaches its own peer, which libp2p refuses to dial, and peers that nobody can dial.

Streams to this very peer go over a Unix socket beside p2pd's own, in its private folder, so that also two executor
processes of one peer reach each other. Bulk streams to a peer without a direct connection go through a pipe (`pipes`),
whose ends come and go over such sockets too. Everything else goes to the transport inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

from dht import addresses
from dht.errors import NoSuchProtocol, PeerUnreachable, TransportError
from dht.transport import Stream, StreamHandler, Transport
from peer.pipes import hosts_of, through
from peer.protocol import BLOBS, data_protocol

_LIMIT_BYTES = 1 << 20
_BULK = (BLOBS, data_protocol(""))  # not over libp2p's relays, which reset such streams
_KNOWN = 4096
_HEADER_S = 5.0


class SelfDial:
    """`folder`: private to this user, the same for all processes of this peer (that of p2pd's control socket)."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hosts: dict[str, tuple[str, ...]] = {}  # peer -> where it rests, if it cannot be dialled

    @property
    def peer_id(self) -> str:
        return self._inner.peer_id

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def control_address(self) -> str:
        return self._inner.control_address

    async def connected(self) -> dict[str, tuple[str, ...]]:
        return await self._inner.connected()

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        if peer_id == self.peer_id:
            return
        if addresses:  # else what is known stays
            self._hosts.pop(peer_id, None)
            if hosts := hosts_of(addresses):
                self._hosts[peer_id] = hosts
            if len(self._hosts) > _KNOWN:
                del self._hosts[next(iter(self._hosts))]
        hosts = self._hosts.get(peer_id, ())
        try:
            await self._inner.connect(peer_id, addresses, timeout_s=timeout_s / 2 if hosts else timeout_s)
        except PeerUnreachable:
            if not hosts:
                raise

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        if peer_id == self.peer_id:
            return await self.local(protocol, peer_id, timeout_s=timeout_s)
        hosts = self._hosts.get(peer_id, ())
        if not hosts:
            return await self._inner.open_stream(peer_id, protocol, timeout_s=timeout_s)
        if await self._direct(peer_id):
            with contextlib.suppress(PeerUnreachable):
                return await self._inner.open_stream(peer_id, protocol, timeout_s=timeout_s / 2)
        try:
            found = await through(self._folder, peer_id, protocol, hosts, timeout_s)
        except PeerUnreachable:
            if protocol.startswith(_BULK):
                raise
            found = None
        return found or await self._inner.open_stream(peer_id, protocol, timeout_s=timeout_s)

    async def _direct(self, peer_id: str) -> bool:
        """Whether there is a connection to this peer that no relay carries."""
        try:
            where = (await self._inner.connected()).get(peer_id, ())
        except TransportError:
            return False
        return any(not addresses.is_relayed(a) for a in where)

    async def local(self, protocol: str, remote: str, *, timeout_s: float = 10.0) -> Stream:
        """A stream to whichever process of this peer serves `protocol`, as one from `remote`."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self._path(protocol)), limit=_LIMIT_BYTES)
        except FileNotFoundError as error:
            raise NoSuchProtocol(f"this peer itself serves no {protocol}") from error
        except (OSError, TimeoutError) as error:
            raise TransportError(f"opening {protocol} at this peer itself: {error or 'no answer'}") from error
        name = remote.encode()
        writer.write(bytes((len(name),)) + name)
        return Stream(remote, reader, writer)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            try:
                async with asyncio.timeout(_HEADER_S):  # whom the stream is from: only this user's processes get here
                    remote = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
                await handler(Stream(remote, reader, writer))
            except (asyncio.CancelledError, asyncio.IncompleteReadError, TimeoutError):
                pass
            finally:
                writer.close()

        if protocol not in self._servers:
            self._servers[protocol] = await asyncio.start_unix_server(
                accept, path=str(self._path(protocol)), limit=_LIMIT_BYTES
            )
        await self._inner.serve(protocol, handler)

    async def stop_serving(self, protocol: str) -> None:
        self._stop(protocol)
        await self._inner.stop_serving(protocol)

    async def close(self) -> None:
        for protocol in list(self._servers):
            self._stop(protocol)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()

    def _stop(self, protocol: str) -> None:
        server = self._servers.pop(protocol, None)
        if server is not None:
            server.close()
            self._path(protocol).unlink(missing_ok=True)

    def _path(self, protocol: str) -> Path:
        return self._folder / f"d{hashlib.blake2b(protocol.encode(), digest_size=8).hexdigest()}"

"""A transport that can also reach itself: libp2p refuses to dial its own peer id, yet two stages may share a peer.

Streams to this very peer go over a Unix socket beside p2pd's own, in its private folder, so that also two executor
processes of one peer reach each other. Everything else goes to the transport inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

from dht.errors import NoSuchProtocol, TransportError
from dht.transport import Stream, StreamHandler, Transport

_LIMIT_BYTES = 1 << 20


class SelfDial:
    """`folder`: private to this user, the same for all processes of this peer (that of p2pd's control socket)."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> str:
        return self._inner.peer_id

    @property
    def control_address(self) -> str:
        return self._inner.control_address

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        if peer_id != self.peer_id:
            await self._inner.connect(peer_id, addresses, timeout_s=timeout_s)

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        if peer_id != self.peer_id:
            return await self._inner.open_stream(peer_id, protocol, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(self._path(protocol)), limit=_LIMIT_BYTES)
        except FileNotFoundError as error:
            raise NoSuchProtocol(f"this peer itself serves no {protocol}") from error
        except (OSError, TimeoutError) as error:
            raise TransportError(f"opening {protocol} at this peer itself: {error or 'no answer'}") from error
        return Stream(peer_id, reader, writer)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):
                await handler(Stream(self.peer_id, reader, writer))
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

"""What the rest of the project needs of libp2p: authenticated raw byte streams between peers, by protocol name.

`dht.p2p` implements it over p2pd; tests may implement it in memory. Addresses and peer ids are strings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Stream:
    """One bidirectional byte stream. `remote` is the peer id that libp2p authenticated. No half-close."""

    remote: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


StreamHandler: TypeAlias = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """Every wait has a deadline; errors are `dht.errors.TransportError` with the peer and protocol named."""

    @property
    def peer_id(self) -> str: ...

    @property
    def control_address(self) -> str:
        """p2pd's control socket as a multiaddr string, for `dht.p2p.attach` in another process of this host."""
        ...

    async def connected(self) -> dict[str, tuple[str, ...]]:
        """Peers with a live connection, and the addresses of it: those with /p2p-circuit go over a relay."""
        ...

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None: ...

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream: ...

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Register (or, after p2pd restarts, register again) the handler of incoming streams of this protocol."""
        ...

    async def stop_serving(self, protocol: str) -> None:
        """Refuse incoming streams of `protocol` from now on; running ones go on."""
        ...

    async def close(self) -> None: ...

"""Pipes as a daemon or a trainer runs them: finds hosts on the board, rests where this peer cannot be dialled, offers
pipes where it can (`--relay-mbps`)."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from dht import addresses, door
from dht.errors import DhtError
from dht.fence_records import Beat
from dht.fencing import seen_at
from dht.node import Board
from dht.p2p import P2PTransport
from dht.probe import Prober, Reach
from dht.records import PeerRecord
from peer.caps import PAYLOAD
from peer.errors import PeerError
from peer.pipe_host import PipeHost
from peer.pipes import Pipes
from peer.punching import Punching
from peer.selfdial import SelfDial

ReachWord = Literal["", "direct", "relay", "none"]
MAX_DIRECT, MAX_PIPED = 5, 2  # addresses in a record
ENOUGH_MBPS = 100.0  # what an offer beyond promises counts for nothing: anybody can promise
_ASKED = 3  # peers that try to dial this one
REACH_S = 5.0  # between tries, while nobody is there to do so


class PipeService:
    """Made by `start`. `host` is there where this peer offers pipes."""

    def __init__(self, transport: P2PTransport, board: Board, pipes: Pipes, host: PipeHost | None) -> None:
        self._transport, self._board = transport, board
        self.pipes, self.host = pipes, host
        self._punching = Punching(transport, pipes, find=self._relayed)

    @classmethod
    async def start(
        cls,
        transport: P2PTransport,
        board: Board,
        dial: SelfDial,
        *,
        offer_bytes_per_s: float | None = None,
        refuses: Callable[[], str] = lambda: "",
        changed: Callable[[], None] = lambda: None,
    ) -> PipeService:
        """`dial` serves what comes through a pipe; `offer_bytes_per_s` None: carries nothing for others."""
        if transport.identity is None:
            raise PeerError("pipes need the peer's identity: start them in the process that owns its p2pd")

        async def range_of(peer: str) -> str:
            return door.range_of(await seen_at(board, peer))

        async def find() -> list[str]:
            return pipe_hosts(await board.peers(timeout_s=5.0), transport.peer_id)

        pipes = Pipes(
            transport,
            transport.identity,
            dial.folder,
            find=find,
            deliver=dial.local,
            changed=changed,
            gate=transport.door,
        )
        await pipes.start()
        host = None
        if offer_bytes_per_s is not None:
            host = PipeHost(transport, offer_bytes_per_s * PAYLOAD, refuses=refuses, range_of=range_of)
            await host.start()
        return cls(transport, board, pipes, host)

    def found(self, reach: ReachWord, own: Sequence[str]) -> None:
        """How others reach this peer is known now; `own`: its addresses."""
        if reach == "direct":
            self.pipes.dialled_at = public_addresses(own)[:4]
        elif reach:
            self.pipes.rest()
            self._punching.start()
            self._board.keep_nothing()  # others would wait for this node in vain

    def addresses(self, own: Iterable[str]) -> tuple[str, ...]:
        """What to publish: where this peer listens, then the hosts by way of which it is reached."""
        direct = [a for a in own if not addresses.is_relayed(a)]
        relayed = [a for a in own if addresses.is_relayed(a)]
        piped = dict.fromkeys((*self.pipes.addresses(), *relayed))
        return (*direct[:MAX_DIRECT], *list(piped)[:MAX_PIPED])

    async def _relayed(self, peer: str) -> tuple[str, ...]:
        """Addresses of `peer` by way of others, as it has published them."""
        known = next((p for p in await self._board.peers(timeout_s=5.0) if p.peer == peer), None)
        return () if known is None else tuple(a for a in known.addresses if addresses.is_relayed(a))

    async def close(self) -> None:
        await self._punching.close()
        await self.pipes.close()


def pipe_hosts(peers: Iterable[PeerRecord], me: str) -> list[str]:
    """Addresses of peers that offer pipes: the largest offers first, equal ones, as all from ENOUGH_MBPS on, in an
    order of this peer's own."""
    offering = [p for p in peers if p.relay_mbps > 0 and p.reach == "direct" and p.state != "left" and p.peer != me]
    offering.sort(key=lambda p: (-min(p.relay_mbps, ENOUGH_MBPS), hashlib.blake2b(f"{me} {p.peer}".encode()).digest()))
    firsts = ((public_addresses(p.addresses) or p.addresses)[:1] for p in offering)
    return [a for first in firsts for a in first]


def public_addresses(known: Iterable[str]) -> tuple[str, ...]:
    """Those that can be dialled from anywhere, or from the same local network; not loopback, not by way of others."""
    return tuple(a for a in known if not addresses.is_relayed(a) and "/127." not in a and "/::1/" not in a)


# --- can this peer be dialled?


async def try_reach(transport: P2PTransport, prober: Prober, port: int) -> list[Reach]:
    """What up to three connected peers find when they dial this one's TCP `port`."""

    async def one(peer: str) -> Reach | None:
        try:
            return await prober.reach(peer, port)
        except DhtError:
            return None

    peers = list(await transport.connected())[: 2 * _ASKED]
    found = await asyncio.gather(*map(one, peers))
    return telling([r for r in found if r is not None])[:_ASKED]


def telling(reaches: Sequence[Reach]) -> list[Reach]:
    """Peers of one's own network reach what others do not: where anybody sees a public address, only those count."""
    outside = [r for r in reaches if _is_public(r.seen)]
    return outside or list(reaches)


def _is_public(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_global
    except ValueError:
        return False


async def reach_of(transport: P2PTransport) -> tuple[ReachWord, tuple[str, ...]]:
    """(how others reach this peer, its addresses), for a trainer; "" if nobody is there to try."""
    own = await transport.addresses()
    port = next((p for p in map(addresses.tcp_port, own) if p), 0)

    async def seen_at(peer: str) -> str:
        return ""

    found = await try_reach(transport, Prober(transport, Beat, seen_at=seen_at), port) if port else []
    if not found:
        return "", own
    if any(r.result == "open" for r in found):
        return "direct", own
    return "relay" if any(addresses.is_relayed(a) for a in own) else "none", own

"""Holes through two routers: a direct connection between peers that nobody can dial, in place of the pipe between them.

libp2p punches once, whenever a connection by way of a relay begins. Right after joining that mostly fails. Peers have
just dialled each other where others see them, and a router that keeps ports remembers a dial that nobody answered for
two minutes (Linux: nf_conntrack_tcp_timeout_syn_sent). What the other then sends gets in by that memory and meets a
socket that listens, not one that dials; the answer does not fit what the router remembers and is lost. So it is tried
again after a silence, by ending the relayed connection and making it anew. A try that fails spoils the next two minutes
too: one of the two peers tries, and ever more rarely. Routers that give each connection a port at random let nobody
through; the pipe stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from dht import addresses
from dht.errors import DhtError
from dht.p2p import P2PTransport
from peer.pipes import Pipes

log = logging.getLogger("peer.punching")

QUIET_S = 150.0
TRIES = 4
LOOK_S = 5.0
CONNECT_S = 10.0


def is_due(waited_s: float, tries: int) -> bool:
    """Whether to try once more: after QUIET_S, then after twice as long each time."""
    return tries < TRIES and waited_s >= QUIET_S * (2 ** (tries + 1) - 1)


def is_direct(where: Iterable[str]) -> bool:
    """Whether one of the connections at these addresses leads by way of nobody."""
    return any(not addresses.is_relayed(a) for a in where)


class Punching:
    """`find`: a peer's addresses by way of others. `start` once this peer is known to be one that nobody can dial."""

    def __init__(
        self, transport: P2PTransport, pipes: Pipes, *, find: Callable[[str], Awaitable[tuple[str, ...]]]
    ) -> None:
        self._transport, self._pipes, self._find = transport, pipes, find
        self._tries: dict[str, tuple[float, int]] = {}  # peer -> since when it is spoken to, tries so far
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="punching")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look(time.monotonic())
            except DhtError as error:
                log.info("punching: %s", error)
            except Exception:  # the top of this task: pipes go on without it
                log.exception("punching failed")

    async def _look(self, now: float) -> None:
        talking = self._pipes.talking
        self._tries = {p: t for p, t in self._tries.items() if p in talking}
        if not talking:
            return
        connected = await self._transport.connected()
        for peer in talking:
            if is_direct(connected.get(peer, ())):
                if count := self._pipes.end_calls(peer):
                    log.info("peer %s is connected directly: %d streams leave the pipe", peer, count)
                continue
            since, tries = self._tries.setdefault(peer, (now, 0))
            if self._transport.peer_id < peer and is_due(now - since, tries):
                self._tries[peer] = since, tries + 1
                await self._try(peer)

    async def _try(self, peer: str) -> None:
        """A new relayed connection; both p2pd then punch by themselves, which takes seconds."""
        ways = await self._find(peer)
        if not ways:
            return
        log.info("trying to punch a hole to peer %s", peer)
        with contextlib.suppress(DhtError):
            await self._transport.client.disconnect(peer)
        await self._transport.connect(peer, ways, timeout_s=CONNECT_S)

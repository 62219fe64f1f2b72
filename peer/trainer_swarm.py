"""The swarm as a trainer sees it: devices on offer, and its own run on the board."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dht.errors import DhtError
from dht.fence_records import FenceView
from dht.identity import Identity
from dht.node import Board
from dht.records import Delegation, PeerRecord, Signer
from dht.runs import RunView
from fusion_p2p.errors import InputError
from peer.offers import DeviceOffer, SwarmLinks
from peer.swarm_network import offers_of, read_links

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 0.5  # between looks at the board while volunteers are awaited
_REMEMBERED = 4096  # peers that were on the board before; more where more are on it now
_LINKS_S = 30.0  # to read what was measured; a plan does without rather than wait longer


class Swarm:
    """`allow_peers`: only these may be given stages; empty: any. `links`: where they are known, else as measured."""

    def __init__(
        self, board: Board, *, allow_peers: Sequence[str] = (), links: Callable[[], SwarmLinks | None] = lambda: None
    ) -> None:
        self._board, self._allowed, self._links = board, frozenset(allow_peers), links
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.known: list[DeviceOffer] = []
        self._fence_of: dict[str, str] = {}
        self._views: dict[str, FenceView] = {}

    async def offers(self, patience_s: float = 0.0) -> list[DeviceOffer]:
        """Every measured device of every peer that may be asked, by peer id; remembered in `known`.

        After a death this may take seconds: the dead node is asked too. DhtError if the board does not answer and is
        not to be asked again, within `patience_s`.
        """
        return await _again(self._look, patience_s)

    async def _look(self) -> list[DeviceOffer]:
        self.known = [o for record in await self._present() for o in offers_of(record)]
        self._views = {view.id: view for view in await self._board.fences()}
        return self.known

    def nominees(self, lost: frozenset[str]) -> list[str]:
        """Whom the leaders of the lost peers' fences propose, as read last: by name, then their other spares."""
        views = [v for peer in sorted(lost) if (v := self._views.get(self._fence_of.get(peer, ""))) is not None]
        named = [n.spare for v in views for n in v.nominees if n.dead in lost]
        return [p for p in dict.fromkeys((*named, *(s for v in views for s in v.spares))) if p not in lost]

    async def _present(self) -> list[PeerRecord]:
        found = []
        for record in await self._board.peers():
            if record.state not in ("left", "paused") and (not self._allowed or record.peer in self._allowed):
                _remember(self.addresses, record.peer, record.addresses)
                _remember(self._fence_of, record.peer, record.fence)
                found.append(record)
        most = max(_REMEMBERED, 2 * len(found))
        _forget(self.addresses, most)
        _forget(self._fence_of, most)
        return found

    async def wait_for(self, peers: int, timeout_s: float, seen: Callable[[int], None]) -> list[DeviceOffer]:
        """The offers once `peers` peers are there and all that are have measured their devices.

        After `timeout_s` those of whoever is ready; InputError if nobody is. `seen` hears their number as it changes.
        """
        ready: dict[str, list[DeviceOffer]] = {}
        count = -1
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    present = await _again(self._present, math.inf)  # it is waited for as volunteers are
                    ready = {r.peer: offers for r in present if (offers := offers_of(r))}
                    if len(ready) != count:
                        count = len(ready)
                        seen(count)
                    if len(ready) >= max(peers, len(present)):
                        break
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            if not ready:
                raise InputError(
                    f"no volunteer came within {timeout_s:.0f} s; start one with: fusion-peer join ADDRESS"
                ) from None
        return [o for offers in ready.values() for o in offers]

    async def links(self) -> SwarmLinks:
        """What is measured between the peers that may be asked; nothing if the board does not say in time."""
        known = self._links()
        if known is not None:
            return known
        try:
            async with asyncio.timeout(_LINKS_S):
                return await read_links(self._board, await self._present())
        except (TimeoutError, DhtError) as error:
            log.warning("planning without measured links: %s", str(error) or f"no answer in {_LINKS_S:.0f} s")
            return SwarmLinks()

    def publish(self, view: RunView, signer: Signer) -> None:
        """The run's progress, hosts, links and events, onto the board."""
        self._board.publish_run(view, signer)

    async def flush(self) -> None:
        await self._board.flush()

    def now(self) -> float:
        return self._board.clock.now()


async def _again(ask: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """What `ask` finds; a board that does not answer, as on a busy machine, is asked again for `patience_s`."""
    now = asyncio.get_running_loop().time
    until = now() + patience_s
    while True:
        try:
            return await ask()
        except DhtError as error:
            if now() >= until:
                raise
            log.info("the board is asked again: %s", error)
        await asyncio.sleep(_LOOK_S)


def _remember(known: dict[str, T], peer: str, value: T) -> None:
    """The newest comes last."""
    known.pop(peer, None)
    known[peer] = value


def _forget(known: dict[str, T], most: int) -> None:
    """Who was not seen for longest."""
    for peer in list(known)[: max(0, len(known) - most)]:
        del known[peer]


def signer_for(owner: Identity, run: str, session: Identity, expires: float) -> Signer:
    """Records of `run` signed by the session key that its owner delegated to."""
    return Signer(session, Delegation.sign(owner, run, session.public_key, expires))

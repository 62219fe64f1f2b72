"""Spares: who could take a stage now is known before it is needed (DESIGN sections 2 and 7).

The board is read in the background, for after a death a look-up takes seconds; to a few volunteers without a stage a
control stream is kept open, so that a dead or frozen one is not tried first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from dht.errors import DhtError
from peer.errors import RefusedError
from peer.plan_rates import steady
from peer.trainer_adopt import note_hosts
from peer.trainer_host import HostLost
from peer.trainer_live import AFTER_LOSS_S, Live

log = logging.getLogger(__name__)

LOOK_S = 4.0
LINKS_EVERY = 5  # looks between readings of what links are measured to carry
GREETED = 4  # spares with an open control stream


class Spares:
    """`serve` runs as long as the session."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._greeting: set[str] = set()  # who has not answered yet

    async def serve(self) -> None:
        """Whoever does not answer a greeting holds up neither the others' nor the next look."""
        live = self._live
        async with asyncio.TaskGroup() as group:
            telling: asyncio.Task[None] | None = None
            for look in itertools.count():
                try:
                    await live.swarm.offers()
                    if look % LINKS_EVERY == LINKS_EVERY - 1:
                        live.links = steady(live.links, await live.swarm.links())
                except DhtError as error:
                    log.info("the board: %s", error)
                if live.placed is not None and live.assembly.moved and (telling is None or telling.done()):
                    telling = group.create_task(self._tell_addresses())
                for peer in self._missing():
                    self._greeting.add(peer)
                    group.create_task(self._greet(peer))
                await asyncio.sleep(LOOK_S)

    async def _tell_addresses(self) -> None:
        """Hosts that rest at other pipe hosts now, or have another address: the others hear of it, as a stream that
        breaks is opened again by what they know; and the run folder, for a trainer that starts again. A change of
        plan that is under way tells it anyway."""
        live = self._live
        async with live.placing:
            if live.lost or live.anew or not live.assembly.moved:
                return
            await note_hosts(live, live.now.plan)
            live.now.links.update(live.assembly.endpoints(), live.now.plan.number)
            for lost in await live.assembly.connect(live.now.plan):
                live.lose(lost.peer, lost.reason)

    def _missing(self) -> list[str]:
        """Spares to be greeted, buddies of the plan first; those that are no longer on the board are parted from."""
        live = self._live
        there = {o.peer for o in live.swarm.known if live.may_host(o.peer)}
        greeted = [peer for peer in live.assembly.linked if not live.assembly.hosts_stage(peer)]
        for peer in greeted:
            if peer not in there:
                live.assembly.part(peer)
        named = {b for p in live.placed.plan.placement for b in p.buddies} if live.placed is not None else set()
        known = {*live.assembly.linked, *self._greeting}
        new = sorted(there - known, key=lambda peer: (peer not in named, peer))
        return new[: max(0, GREETED - len(greeted) - len(self._greeting))]

    async def _greet(self, peer: str) -> None:
        try:
            await self._live.assembly.greet(peer)
        except (RefusedError, HostLost, DhtError) as error:
            log.info("spare %s: %s", peer, error)
            self._live.exclude(peer, AFTER_LOSS_S)
        finally:
            self._greeting.discard(peer)

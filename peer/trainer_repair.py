"""Losses: a lost stage's recovery group is rebuilt from the newest complete set and fed again (DESIGN section 2).

Where nobody has room for a lost host's stages it is asked itself: a trainer that slept, or whose network was away,
finds its hosts where they were.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from fusion_p2p.plan import Plan
from peer.offers import DeviceOffer
from peer.rehost import NoRoomError, recovery_group, rehost
from peer.trainer_host import RunPaused
from peer.trainer_live import AFTER_LOSS_S, AFTER_REFUSAL_S, Live

RETRY_S = 1.0


class Repair:
    """`adopt(plan)` puts a plan in force. `serve` runs as long as the session and raises RunPaused."""

    def __init__(self, live: Live, adopt: Callable[[Plan], Awaitable[None]]) -> None:
        self._live, self._adopt = live, adopt
        self._back_at: dict[str, float] = {}  # when a host was last taken back, monotonic

    async def serve(self) -> None:
        live, loop = self._live, asyncio.get_running_loop()
        while True:
            await live.broken.wait()
            live.broken.clear()
            until = loop.time() + live.options.recover_s
            look, said = False, ""
            while live.lost or live.anew:
                try:
                    why = await self._rehost(look)
                except NoRoomError as error:
                    why = str(error)
                    if why != said:
                        live.say("wanted", why, stage=error.stage, wanted_peers=1, wanted_bytes=error.need_bytes)
                        said = why
                    await self._take_back()
                look = True
                for peer in [peer for peer in live.lost if why and peer in live.may_stay]:
                    live.say("moving", f"{peer[-8:]} keeps its stages: {why}", peer=peer)
                    live.keep(peer)
                if why and (live.lost or live.anew) and loop.time() >= until:
                    raise RunPaused(self._farewell(why))
                if why and (live.lost or live.anew):
                    await asyncio.sleep(RETRY_S)

    def _stages_of(self, peer: str) -> list[int]:
        return [p.stage for p in self._live.now.plan.placement if p.peer == peer]

    def _farewell(self, why: str) -> str:
        live = self._live
        names = ", ".join(f"peer {peer[-8:]} (stage {k})" for peer in live.lost for k in self._stages_of(peer))
        what = f"{names} was lost ({next(iter(live.lost.values()))})" if live.lost else live.anew
        return (
            f"paused: {what} and {why}; "
            f"saved up to step {live.now.newest.step}, continue with: fusion-run resume {live.folder.root}"
        )

    def _proposed(self, gone: frozenset[str], offers: Sequence[DeviceOffer]) -> list[str]:
        """Who is asked first, of those that answer now: whom the leader of the lost one's fence names, then its other
        spares, which are near the neighbours that the lost one had; buddies, which have the state already; spares, the
        fastest first. Whoever is on the board without an open stream may be dead since a minute."""
        live = self._live
        lost = {k for peer in gone for k in self._stages_of(peer)}
        kept = [peer for e in live.now.newest.stages if e.stage in lost for peer in live.kept.get(e.hash, ())]
        there = live.assembly.linked
        fastest = sorted(offers, key=lambda o: o.correction / o.flops_per_s)
        spares = [o.peer for o in fastest if not live.assembly.hosts_stage(o.peer)]
        return [peer for peer in dict.fromkeys((*live.swarm.nominees(gone), *kept, *spares)) if peer in there]

    async def _rehost(self, look: bool) -> str:
        """One try; why it cannot be done now, or "". `look`: read the board anew, which may take seconds."""
        live = self._live
        if live.options.recover_s <= 0:
            return "recovery is off"
        if look:
            await live.swarm.offers()
        async with live.placing:
            return await self._put_elsewhere(frozenset(live.lost)) if live.lost or live.anew else ""

    async def _take_back(self) -> None:
        """Lost hosts that answer again go on; all begin anew if one has not kept its stages."""
        live = self._live
        async with live.placing:
            plan, now = live.now.plan, asyncio.get_running_loop().time()
            peers = [p for p in live.cut_off() if now - self._back_at.get(p, -math.inf) >= AFTER_LOSS_S]
            found = await asyncio.gather(*(live.assembly.take_back(plan, peer) for peer in peers))
            back = {peer: has for peer, has in zip(peers, found, strict=True) if has is not None}
            for peer, has in back.items():
                if not has:
                    live.begin_anew(f"{peer[-8:]} answers again, without its stages")
                for k in self._stages_of(peer) if has else ():
                    text = f"stage {k} goes on at {peer[-8:]}, which answers again"
                    live.say("recovered", text, peer=peer, stage=k)
                self._back_at[peer] = now
                live.lost.pop(peer, None)
                live.excluded.pop(peer, None)
            if back and not live.lost and not live.anew:
                await self._adopt(plan)

    async def _put_elsewhere(self, gone: frozenset[str]) -> str:
        live, now = self._live, self._live.now
        offers = live.devices()
        moved = [k for peer in gone for k in self._stages_of(peer)]
        anew, stages = bool(live.anew), range(now.plan.numerics.stages)
        group = tuple(stages) if anew else recovery_group(now.plan, {*moved, *live.again}, now.edges())
        base, state = msgspec.structs.replace(now.plan, number=now.number), live.request.state
        plan = rehost(base, gone, group, live.atoms, offers, state, self._proposed(gone, offers))
        before, now.number = now.plan, plan.number
        refusals = await live.assembly.place(plan, group, live.refs(now.newest), now.newest.tick)
        for r in refusals:
            p = r.placement
            live.refused(r, AFTER_REFUSAL_S)
            if r.gone or now.plan.host(p.stage).peer == p.peer:
                live.lose(p.peer, r.reason)
        if refusals:
            return refusals[0].reason
        now.offers = offers
        for peer in gone:
            del live.lost[peer]
            live.may_stay.discard(peer)
        live.again.clear()
        if anew:
            live.anew = ""
        await self._adopt(plan)
        for old in gone:
            await live.assembly.drop(
                old, (k for k in moved if before.host(k).peer == old != plan.host(k).peer), "moved"
            )
        for k in moved:
            peer = plan.host(k).peer
            live.say("recovered", f"stage {k} goes on at {peer[-8:]} from step {now.newest.step}", peer=peer, stage=k)
        if anew:
            live.say("recovered", f"every stage goes on from step {now.newest.step}")
        return ""

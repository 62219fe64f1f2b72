"""Buddies: each stage's newest snapshot is also kept by another volunteer (DESIGN section 2).

So the trainer's uplink is not the only one that a rebuilt stage is fed from, and a buddy that takes the stage over has
its state already. What the run folder holds is complete without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from dht.errors import DhtError
from fusion_p2p.plan import Plan
from peer.errors import RefusedError
from peer.protocol import Keep
from peer.trainer_host import HostLost
from peer.trainer_live import Live
from peer.trainer_state import Manifest, StageFile


class BuddyKeeper:
    """`spread` runs after each complete set; it never raises for a volunteer that does not keep."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._told: tuple[str, ...] = ()
        self._keep: set[str] = set()  # who has kept something in this session

    async def spread(self, manifest: Manifest, hosts: dict[int, str]) -> None:
        """Ask a buddy per stage to keep its snapshot of this set; `hosts`: who made it."""
        live = self._live
        chosen = buddies(live.now.plan, live.assembly.linked)
        readers = tuple(sorted({p.peer for p in live.now.plan.placement} | set(live.assembly.linked)))
        if self._told != readers:  # hosts serve those they were told of, and spares are greeted later
            async with live.placing:
                await live.assembly.connect(live.now.plan)
            self._told = readers

        wanted = {e.hash for e in manifest.stages}
        live.kept = {blob: peers for blob, peers in live.kept.items() if blob in wanted}
        live.keepers = {}
        await asyncio.gather(
            *(self._ask(manifest.tick, e, hosts.get(e.stage, ""), chosen.get(e.stage)) for e in manifest.stages)
        )

    def idle(self, hosts: Collection[str]) -> list[str]:
        """Those that keep something and host nothing."""
        self._keep &= set(self._live.assembly.linked)
        return sorted(self._keep - set(hosts))

    async def _ask(self, tick: int, entry: StageFile, host: str, buddy: str | None) -> None:
        """Ask `buddy`; who cannot keep it is replaced at once by the next best."""
        live, cannot = self._live, set[str]()
        ref = live.ref(entry.hash, entry.size, live.transport.peer_id, *[host] * bool(host))
        message = Keep(run=live.run, stage=entry.stage, tick=tick, state=ref, readers=self._told)
        while buddy is not None:
            live.keepers[entry.hash] = buddy
            try:
                why = (await live.assembly.host(buddy).keep(message)).reason
            except (HostLost, RefusedError, DhtError) as error:
                why = str(error)
            if not why:
                live.kept.setdefault(entry.hash, []).append(buddy)
                self._keep.add(buddy)
                return
            live.say("waiting", f"{buddy[-8:]} does not keep stage {entry.stage}'s set: {why}", peer=buddy)
            cannot.add(buddy)
            buddy = buddies(live.now.plan, [peer for peer in live.assembly.linked if peer not in cannot]).get(
                entry.stage
            )


def buddies(plan: Plan, linked: Sequence[str]) -> dict[int, str]:
    """Per stage a peer that can be reached and is not its host: the one that the plan names, else spares first, then by
    load, far neighbours last.

    A neighbour is likelier to be lost together with the host (one machine, one line), so others are preferred.
    """
    load = dict.fromkeys(linked, 0)
    hosting = {p.peer for p in plan.placement}
    out = {}
    for p in plan.placement:
        near = {q.peer for q in plan.placement if abs(q.stage - p.stage) <= 1}
        free = [peer for peer in sorted(linked) if peer != p.peer]
        named = [peer for peer in p.buddies if peer in free]
        if named:
            out[p.stage] = named[0]
        elif free:
            out[p.stage] = min(free, key=lambda peer: (load[peer] + (peer in hosting), peer in near, peer))
        if free:
            load[out[p.stage]] += 1
    return out

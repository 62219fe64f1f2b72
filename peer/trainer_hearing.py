"""What hosts and links say to the trainer: status, faults, farewells. Whoever speaks of what is over is not heard."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from fusion_p2p.plan import Plan
from peer.accusations import Accusations
from peer.link_ends import LinkEvent
from peer.protocol import StageFault, StageStatus, Suspect
from peer.quiet import LONG_WAIT_S
from peer.rehost import computed_apart
from peer.trainer_complaints import Complaints
from peer.trainer_guard import Guardian
from peer.trainer_live import Live
from peer.trainer_watch import Watch

FATAL_FAULTS = frozenset({"died", "frame", "memory", "cap", "leaving", "gap", "mark"})
HONEST_FAULTS = frozenset({"leaving", "gap"})  # after which the host may be given a stage again
AFTER_DEATH_S = 30.0  # before a host whose executor died is given a stage again
LEAVING_S = 3.0  # below the volunteer's GRACE_S


class Hearing:
    """On the session's loop. What it learns goes to `Live`, `Watch` and `Complaints`."""

    def __init__(self, live: Live, watch: Watch, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._live, self._watch, self._spawn = live, watch, spawn
        accusations = Accusations()
        self._complaints, self._guardian = Complaints(live, spawn, accusations), Guardian(live, spawn, accusations)

    def forget(self) -> None:
        """Every stage begins anew."""
        self._complaints.forget()
        self._guardian.forget()

    def status(self, peer: str, status: StageStatus) -> None:
        placed = self._live.placed
        if placed is None or not self._counts(placed.plan, peer, status) or status.stage >= placed.plan.numerics.stages:
            return
        self._live.outbox_share[status.stage] = status.outbox_share
        stages = placed.plan.numerics.stages
        self._watch.status(status, stages, placed.links.bytes_sent(), placed.links.differing())
        if status.waited_s > LONG_WAIT_S:
            text = f"stage {status.stage} has waited {status.waited_s:.0f} s for {status.waiting_for}"
            self._live.say("waiting", text, peer=peer, stage=status.stage)

    def fault(self, peer: str, fault: StageFault | Suspect) -> None:
        placed = self._live.placed
        if placed is not None and not self._counts(placed.plan, peer, fault):
            return
        if isinstance(fault, Suspect):
            if placed is not None and fault.stage < placed.plan.numerics.stages:
                self._guardian.hear(peer, fault)
            return
        if fault.code == "leaving" and placed is not None:
            self._live.hand_over(peer, fault.reason)
            self._spawn(self._let_go(peer, fault.reason))
        elif fault.code == "apart" and placed is not None:
            self._apart(placed.plan, peer, fault)
        elif (
            fault.code == "gap" and placed is not None and _in_force(placed.plan, fault) and computed_apart(placed.plan)
        ):
            # A stage made later is behind the newest set. Who has its frames no more is not at fault, and would be
            # asked for the same in its next place.
            self._live.begin_anew(f"stage {fault.stage} is asked for what it no longer has: {fault.reason}")
        elif fault.code in FATAL_FAULTS:
            if fault.code not in HONEST_FAULTS:
                self._live.exclude(peer, math.inf if fault.code == "frame" else AFTER_DEATH_S)
            self._live.lose(peer, fault.reason)
        else:
            if fault.code != "back":
                self._live.say("waiting", f"stage {fault.stage}: {fault.reason}", peer=peer, stage=fault.stage)
            if placed is not None:
                self._complaints.hear(peer, fault)

    def _apart(self, plan: Plan, peer: str, fault: StageFault) -> None:
        """Two ends no longer agree. Stages that began together have no such excuse: so all begin together, once."""
        if not _in_force(plan, fault):
            return  # only stages of the plan in force are connected, and have neighbours
        if computed_apart(plan):
            self._watch.apart(fault.stage)
            return self._live.begin_anew(f"stage {fault.stage} no longer agrees with {fault.reason}")
        self._complaints.hear(peer, msgspec.structs.replace(fault, code="peer-frame"))
        self._live.exclude(peer, AFTER_DEATH_S)
        self._live.lose(peer, fault.reason)

    async def _let_go(self, peer: str, reason: str) -> None:
        """A volunteer that leaves waits so long for a complete set and no longer."""
        await asyncio.sleep(LEAVING_S)
        if peer in self._live.leaving:
            self._live.lose(peer, reason)

    def _counts(self, plan: Plan, peer: str, said: StageStatus | StageFault | Suspect) -> bool:
        """Whether this is of the plan's host of the stage, or of one that is being put in its place."""
        if said.incarnation < self._live.fence or said.stage < 0:
            return False
        if said.stage < plan.numerics.stages:
            p = plan.host(said.stage)
            if said.incarnation <= p.incarnation:
                return (p.peer, p.incarnation) == (peer, said.incarnation)
        return self._live.assembly.hosts_stage(peer)  # else of a host, or of cuts, about to be in force

    def link_event(self, event: LinkEvent) -> None:
        if event.code in ("frame", "refused"):
            self.distrust(event.stage, event.reason)
        elif event.code not in ("broken", "back"):
            text = f"the link to stage {event.stage}: {event.reason}"
            self._live.say("waiting", text, peer=event.peer, stage=event.stage)

    def distrust(self, stage: int, reason: str) -> None:
        """A stage sent what it must not: its host is not to be given another."""
        plan = self._live.now.plan
        if 0 <= stage < plan.numerics.stages:
            peer = plan.host(stage).peer
            self._live.exclude(peer)
            self._live.lose(peer, reason)


def _in_force(plan: Plan, fault: StageFault) -> bool:
    """Whether it is told of a stage of this plan, and of its present incarnation."""
    return fault.stage < plan.numerics.stages and plan.host(fault.stage).incarnation == fault.incarnation

"""What a volunteer hosts and for whom: offers, stages, leases, snapshots. The daemon's core, on its loop, no torch.

Executors are reached through `ExecutorProcess`, trainers through `Session`; this knows which stage belongs to whom.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from fusion_p2p.plan import Numerics
from peer.blobs import BlobStore
from peer.buddy import Buddy
from peer.errors import ExecutorDied, RefusedError
from peer.executor_process import Death, ExecutorProcess
from peer.executor_protocol import Adopt, FromExecutor, HostStage, Lease
from peer.policy import OFFER_S, Leases, Policy, check_numerics, check_offer, check_run, check_state
from peer.protocol import (
    Accepted,
    Assignment,
    Connect,
    Drop,
    Held,
    Keep,
    Kept,
    Mark,
    Marked,
    Pass,
    Refused,
    RunSpec,
    SessionCert,
    Signed,
    Snapshotted,
    StageFault,
    StageOffer,
    StageStatus,
    Suspect,
    Trim,
)
from peer.signing import check_assignment
from peer.volunteer_files import KeptFences, OpDags

log = logging.getLogger("peer.daemon")

GRACE_S = 3.5  # for a trainer to take over the stages of a volunteer that leaves; `fusion-peer leave` ends within 10 s
RUNS_SHOWN = 256
KEEPING = 16  # snapshots of others that are fetched at once, for one run
KEEPING_ALL = 64  # and for all
SNAPSHOTS_KEPT = 4  # of a stage: two complete sets, the one under way, one to spare
Key = tuple[str, int]


class Session(Protocol):
    """A trainer's open control stream, after its hello."""

    spec: RunSpec
    cert: SessionCert
    signed_cert: Signed

    def post(self, message: msgspec.Struct) -> None:
        """Queue a message to the trainer."""
        ...

    def end(self, code: str, reason: str, cert: Signed) -> None: ...


@dataclass(slots=True)
class HostedStage:
    """One stage that an executor holds, or that is on offer to it (`accepted` False)."""

    spec: RunSpec
    assignment: Assignment
    numerics: Numerics
    state_hash: str
    offered: float  # monotonic
    accepted: bool = False
    peers: frozenset[str] = frozenset()  # whom the plan names: they may fetch its snapshots
    hosts: dict[int, str] = field(default_factory=dict)  # stage -> peer, as the plan says
    snapshots: dict[int, str] = field(default_factory=dict)
    status: StageStatus | None = None
    suspect: Suspect | None = None  # what it holds back
    told: Session | None = None  # who has heard of it


class Volunteer:
    """`executors` by published device name; `changed` is called when the board's record should be made again."""

    def __init__(
        self,
        peer_id: str,
        home: Path,
        policy: Policy,
        store: BlobStore,
        executors: Mapping[str, ExecutorProcess],
        changed: Callable[[], None],
        buddy: Buddy | None = None,
    ) -> None:
        self.peer_id, self.policy, self.store, self.executors = peer_id, policy, store, executors
        self.leases = Leases()
        self.stages: dict[Key, HostedStage] = {}
        self.sessions: dict[str, Session] = {}
        self.asked: Callable[[RunSpec], None] = lambda spec: None  # a run's trainer is here, before it offers anything
        self._shown: dict[str, None] = {}
        self._changed, self._buddy = changed, buddy
        if buddy is not None:
            buddy.others_want = self._stages_want
        self._keeping: dict[asyncio.Task[None], str] = {}  # -> for which run
        self._empty = asyncio.Event()  # the last stage has gone
        self._going = ""  # why stages are handed over now
        self._left = ""  # why nobody is taken on any more
        self._held_back: set[str] = set()  # runs whose stages send nothing: their trainer is silent
        self._opdags, self._fences = OpDags(home), KeptFences(home)

    # --- what a trainer asks

    def admit(self, session: Session) -> None:
        """A trainer that has shown who it is. RefusedError (policy, lease) if it may not lead its run here."""
        check_run(self.policy, session.spec, minute_of_day())
        run = session.spec.run
        if self._left:
            raise RefusedError("policy", self._left)
        if self.leases.take(session.cert, time.monotonic()) and run in self.sessions:
            reason = f"run {run} is led by trainer {session.cert.trainer_peer} now"
            self.sessions[run].end("lease", reason, session.signed_cert)
        if run not in self.sessions and run not in self._shown:
            self._shown[run] = None
            if len(self._shown) > RUNS_SHOWN:
                del self._shown[next(iter(self._shown))]
            self.asked(session.spec)
        self.sessions[run] = session

    def part(self, session: Session) -> None:
        """The stream ended. Stages stay for the lease and send nothing meanwhile; without any, the run is over here."""
        run = session.spec.run
        if self.sessions.get(run) is session:
            del self.sessions[run]
            if not self.holds(run):
                self.leases.end(run)

    def holds(self, run: str) -> bool:
        """Whether a stage or a snapshot of this run is here."""
        return any(r == run for r, _ in self.stages) or bool(self._buddy and self._buddy.keeps_for(run))

    def have_opdags(self) -> tuple[str, ...]:
        return self._opdags.known()

    def held(self, run: str) -> tuple[Held, ...]:
        """Stages of the run that work here."""
        found = (Held(k, s.assignment.incarnation) for (r, k), s in self.stages.items() if r == run and s.accepted)
        return tuple(sorted(found, key=lambda h: h.stage))

    async def offer(self, session: Session, offer: StageOffer) -> None:
        """Check, then hand to the device's executor, which answers later. RefusedError otherwise."""
        if not self.leases.leads(session.cert):
            raise RefusedError("lease", f"run {session.spec.run} is led by another trainer now")
        if reason := self._going or self._left:
            raise RefusedError("policy", reason)
        a = check_assignment(offer.assignment, session.spec, session.cert, target_peer=self.peer_id, now=time.time())
        others = sum(1 for key in self.stages if key != (a.run, a.stage))
        check_run(self.policy, session.spec, minute_of_day())
        if offer.adopt:
            return await self._adopt(session, a, offer.numerics)
        check_offer(self.policy, a, devices=tuple(self.executors), stages=others, state_bytes=offer.state.size)
        check_numerics(offer.numerics, offer.window)
        check_state(offer.state)
        opdag = self._opdags.checked(a.opdag_hash, offer.opdag)
        self._fences.check(a)
        message = HostStage(
            spec=session.spec, assignment=a, numerics=offer.numerics, window=offer.window, opdag=opdag,
            state=offer.state, first_tick=offer.first_tick, trial=offer.trial, logged=offer.logged,
            watched=offer.watched,
        )  # fmt: skip
        before = self.stages.get((a.run, a.stage))
        self.stages[a.run, a.stage] = HostedStage(
            session.spec,
            a,
            offer.numerics,
            offer.state.hash,
            time.monotonic(),
            peers=frozenset({session.cert.trainer_peer}),
        )
        if before is not None:
            self._discard(*before.snapshots.values(), before.state_hash)
            if before.assignment.device != a.device:
                await self._tell(before.assignment.device, Drop(run=a.run, stage=a.stage, reason="it moves"))
        try:
            await self.executors[a.device].send(message)
        except ExecutorDied as error:
            self._forget((a.run, a.stage))
            raise RefusedError("busy", str(error)) from error

    async def _adopt(self, session: Session, a: Assignment, numerics: Numerics) -> None:
        """A trainer that started again goes on with a stage where it is. RefusedError (gone) unless it is that one."""
        stage = self.stages.get((a.run, a.stage))
        if stage is None or not stage.accepted:
            raise RefusedError("gone", f"stage {a.stage} does not run here (any more)")
        there = stage.assignment
        if (there.incarnation, there.device, stage.numerics) != (a.incarnation, a.device, numerics):
            raise RefusedError(
                "gone", f"stage {a.stage} runs here as incarnation {there.incarnation} on {there.device}, not as asked"
            )
        self._fences.check(a)
        stage.assignment = a
        stage.peers |= {session.cert.trainer_peer}
        await self._tell(a.device, Adopt(run=a.run, stage=a.stage))

    async def command(self, session: Session, message: Connect | Mark | Trim | Pass | Drop) -> None:
        """Pass on what concerns a stage of this session's run; anything else is not its business."""
        key = (message.run, message.stage)
        stage = self.stages.get(key)
        if isinstance(message, Trim) and message.run == session.spec.run and self.leases.leads(session.cert):
            if self._buddy is not None and self._buddy.keeps_for(message.run):
                self._buddy.complete(message.run, message.tick)
            if message.stage < 0:
                return
        if message.run != session.spec.run or stage is None or not self.leases.leads(session.cert):
            log.warning("trainer of run %s speaks of stage %d, which is not here", session.spec.run, message.stage)
            return
        if isinstance(message, Connect):
            message = msgspec.structs.replace(message, epoch=session.cert.epoch)
            named = {e.peer for e in message.endpoints}
            stage.peers = frozenset(named | {session.cert.trainer_peer, *message.buddies})
            stage.hosts = {e.stage: e.peer for e in message.endpoints}
            if stage.suspect is not None and stage.told is not session:  # said to a stream that is no more
                stage.told = session
                session.post(stage.suspect)
        if isinstance(message, Pass):
            stage.suspect = None
        if isinstance(message, Trim):
            for tick in [t for t in stage.snapshots if t < message.tick]:
                self._discard(stage.snapshots.pop(tick))
        if isinstance(message, Drop):
            log.info("stage %d of run %s dropped: %s", message.stage, message.run, message.reason[:200])
            self._forget(key)
        await self._tell(stage.assignment.device, message)

    async def keep(self, session: Session, message: Keep) -> None:
        """Keep a snapshot of another host's stage; the answer comes when it is here."""
        buddy, trainer = self._buddy, session.cert.trainer_peer
        may = message.run == session.spec.run and self.leases.leads(session.cert)
        busy = len(self._keeping) >= KEEPING_ALL or list(self._keeping.values()).count(message.run) >= KEEPING
        if buddy is None or not may or busy:
            reason = "busy" if may else "not this session's run"
            return session.post(Kept(run=message.run, stage=message.stage, tick=message.tick, reason=reason))

        async def fetch() -> None:
            session.post(await buddy.keep(message, trainer))

        task = asyncio.create_task(fetch())
        self._keeping[task] = message.run
        task.add_done_callback(lambda task: self._keeping.pop(task, None))

    def heard(self, session: Session) -> None:
        self.leases.renew(session.cert, time.monotonic())

    # --- what an executor says

    def on_message(self, message: FromExecutor) -> None:
        match message:
            case Accepted():
                stage = self.stages.get((message.run, message.stage))
                if stage is None:
                    return
                stage.accepted = True
                self._discard(stage.state_hash)
                self._post(message.run, message)
                self._changed()
            case Refused():
                stage = self.stages.get((message.run, message.stage))
                if stage is not None and not stage.accepted:
                    self._forget((message.run, message.stage))
                    self._post(message.run, message)
            case Marked():
                self._post(message.run, message)
            case Suspect():
                stage = self.stages.get((message.run, message.stage))
                if stage is not None:
                    stage.suspect, stage.told = message, self.sessions.get(message.run)
                self._post(message.run, message)
            case Snapshotted():
                stage = self.stages.get((message.run, message.stage))
                if stage is None:
                    return self._discard(message.state.hash)
                stage.snapshots[message.tick] = message.state.hash
                while len(stage.snapshots) > SNAPSHOTS_KEPT:
                    self._discard(stage.snapshots.pop(min(stage.snapshots)))
                self._post(message.run, message)
            case StageStatus():
                stage = self.stages.get((message.run, message.stage))
                if stage is not None:
                    stage.status = message
                self._post(message.run, message)
            case StageFault():
                if message.code in ("died", "frame", "memory", "apart"):
                    self._forget((message.run, message.stage))
                self._post(message.run, message)
            case _:
                self._changed()

    def on_death(self, device: str, death: Death) -> None:
        """Every stage of a dead executor is reported; one that was only on offer counts as refused."""
        cap = self.executors[device].start.memory_bytes
        for key, stage in [(k, s) for k, s in self.stages.items() if s.assignment.device == device]:
            run, number = key
            if stage.accepted:
                self._post(
                    run,
                    StageFault(
                        run=run, stage=number, incarnation=stage.assignment.incarnation, code=death.code,
                        reason=f"stage {number}: {death.reason}",
                    ),
                )  # fmt: skip
            else:
                code = "memory" if death.code == "memory" else "busy"
                self._post(
                    run,
                    Refused(
                        code=code, reason=f"stage {number}: {death.reason}", stage=number, run=run,
                        needed=death.resident_bytes, cap=cap if death.code == "memory" else 0,
                    ),
                )  # fmt: skip
            self._forget(key)
        self._changed()

    # --- the daemon's rounds

    async def check_leases(self, dead_s: float, lease_s: float) -> None:
        """A run whose trainer is silent for `dead_s` sends nothing until it is back; after `lease_s` it is dropped."""
        now = time.monotonic()
        for run in {run for run, _ in self.stages} | set(self.leases.runs()):
            silent = self.leases.silent_s(run, now)
            held = silent <= dead_s
            if held == (run in self._held_back):
                self._held_back.symmetric_difference_update({run})
                for device in {s.assignment.device for (r, _), s in self.stages.items() if r == run}:
                    await self._tell(device, Lease(run=run, held=held))
            if silent > lease_s:
                log.info("run %s: nothing heard of its trainer for %.0f s; its stages are dropped", run, silent)
                await self.drop_run(run, "the lease ran out")
                self.leases.end(run)
                self._held_back.discard(run)

    def check_offers(self) -> None:
        """An executor that is at one offer for OFFER_S is ended: `on_death` refuses the offer."""
        now = time.monotonic()
        for (run, number), stage in self.stages.items():
            if not stage.accepted and now - stage.offered > OFFER_S:
                log.warning("run %s: stage %d was not ready within %.0f s; its executor ends", run, number, OFFER_S)
                self.executors[stage.assignment.device].kill()

    async def leave(self, reason: str, grace_s: float) -> None:
        """`evict`, for good. Trainers that only count on this volunteer as a spare are told at once."""
        self._left = reason
        hosted = {run for run, _ in self.stages}
        for session in [session for run, session in self.sessions.items() if run not in hosted]:
            session.end("policy", reason, session.signed_cert)
        await self.evict(reason, grace_s)

    async def evict(self, reason: str, grace_s: float = 0.0) -> None:
        """Give up every stage, telling the trainers: this volunteer pauses or leaves.

        For `grace_s` at most the stages still serve, so that the trainers may hand them over; offers are refused.
        """
        for (run, number), stage in list(self.stages.items()):
            fault = StageFault(
                run=run, stage=number, incarnation=stage.assignment.incarnation, code="leaving", reason=reason
            )
            self._post(run, fault)
        self._going = reason
        try:
            async with asyncio.timeout(grace_s):
                while self.stages:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            log.info("nobody took %d stages within %.0f s", len(self.stages), grace_s)
        finally:
            self._going = ""
        for run in {run for run, _ in self.stages}:
            await self.drop_run(run, reason)

    async def drop_run(self, run: str, reason: str) -> None:
        if self._buddy is not None:
            self._buddy.drop_run(run)
        for (r, number), stage in list(self.stages.items()):
            if r == run:
                self._forget((r, number))
                await self._tell(stage.assignment.device, Drop(run=run, stage=number, reason=reason))

    def may_fetch(self, peer: str, run: str, blob: str) -> bool:
        """Only peers that the run's plan names are served its snapshots."""
        hosted = any(
            r == run and peer in stage.peers and blob in stage.snapshots.values()
            for (r, _), stage in self.stages.items()
        )
        return hosted or (self._buddy is not None and self._buddy.may_fetch(peer, run, blob))

    # ---

    def _forget(self, key: Key) -> None:
        """The stage is gone, and with it its bytes here: nobody is served a snapshot of a stage that is not hosted."""
        stage = self.stages.pop(key, None)
        if stage is not None:
            self._discard(*stage.snapshots.values(), stage.state_hash)
            self._changed()
        if not self.stages:
            self._empty.set()

    def _discard(self, *blobs: str) -> None:
        """Delete those that no stage here has as a snapshot or waits to be built from."""
        for blob in set(blobs):
            if not self._stages_want(blob) and (self._buddy is None or not self._buddy.wants(blob)):
                self.store.delete(blob)

    def _stages_want(self, blob: str) -> bool:
        return any(
            blob in s.snapshots.values() or (blob == s.state_hash and not s.accepted) for s in self.stages.values()
        )

    def _post(self, run: str, message: msgspec.Struct) -> None:
        session = self.sessions.get(run)
        if session is not None:
            session.post(message)

    async def _tell(self, device: str, message: Adopt | Connect | Mark | Trim | Pass | Drop | Lease) -> None:
        try:
            await self.executors[device].send(message)
        except ExecutorDied as error:
            log.info("%s", error)  # its stages are reported by `on_death`


def minute_of_day() -> int:
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min

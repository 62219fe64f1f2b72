"""One trainer session: places the stages, releases ticks, keeps complete sets, repairs the plan (DESIGN section 2).

All of it lives on one asyncio loop. `Trainer` is an async context manager; its holder (`peer.api`) calls `start`, then
`release` for each tick and `save` now and then. A lost stage is rebuilt from the newest complete set and its senders
send again from there; nobody else rolls back. If no volunteer takes it in time the run pauses: RunPaused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
import torch

from dht.errors import DhtError
from dht.transport import Transport
from fusion_p2p.errors import FrameError, FusionError, InputError
from fusion_p2p.frame import Kind, StepHeader
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from fusion_p2p.release import cut_batch, release
from fusion_p2p.split import StageProgram, split
from fusion_p2p.workload import atoms
from peer.blobs import fetch_blob
from peer.errors import BlobError, WireError
from peer.events import PlanAdopted, RunEvent, Sink, StepResult
from peer.links import Links
from peer.placement import DeviceOffer, PlanRequest, recovery_group, rehost
from peer.protocol import BlobRef, Mark, Snapshotted, StageFault, StageStatus, Trim
from peer.signing import sign
from peer.trainer_assembly import Assembly, Refusal, Session
from peer.trainer_host import HostLost, RunPaused
from peer.trainer_state import Manifest, RunFolder, StageFile
from peer.trainer_swarm import Swarm
from peer.trainer_ticks import TickBook, TickResult
from peer.trainer_watch import Watch

log = logging.getLogger(__name__)

AHEAD = 2  # ticks released before the oldest is done: the next one's data is there when a stage is free
MAX_REPORT_BYTES = 4096
MAX_HELD_BYTES = 1 << 30  # of released batches that no complete set covers yet
MAX_SNAPSHOT_BYTES = 1 << 40
SAVE_TRIES = 5
RETRY_S = 1.0
FATAL_FAULTS = frozenset({"died", "frame", "memory", "cap", "leaving"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """`peers`: volunteers to wait for, `gather_s` at most, before
    the plan is made. `recover_s`: how long a lost stage waits for a new host before the run pauses."""

    numerics: Numerics  # its cuts count only in a resumed run
    stages: int | None = None
    peers: int = 1
    gather_s: float = 60.0
    recover_s: float = 60.0
    mark_interval: int = 0  # steps between complete sets, as the holder means to save them


class Trainer:
    """`initial` makes the first snapshot of a stage. `folder` holds the signed spec and the OP-DAG already."""

    def __init__(
        self,
        *,
        transport: Transport,
        swarm: Swarm,
        session: Session,
        folder: RunFolder,
        dag: OpDag,
        options: TrainerOptions,
        initial: Callable[[StageProgram], bytes],
        sink: Sink,
    ) -> None:
        self._transport, self._swarm, self._session, self._folder = transport, swarm, session, folder
        self._dag, self._options, self._initial, self._sink = dag, options, initial, sink
        self._run = session.spec.run
        self._atoms = atoms(dag, options.numerics.micro_batch_size)
        self._assembly = Assembly(
            transport,
            session,
            dag,
            spawn=self.spawn,
            on_lost=self._on_lost,
            on_fault=self._on_fault,
            on_status=self._on_status,
        )
        self.watch = Watch(sink, session.clock)
        self.plan: Plan | None = None
        self.step = 0
        self._number = 0  # of the last plan that was offered to anybody
        self._offers: list[DeviceOffer] = []
        self._excluded: set[str] = set()
        self._lost: dict[str, str] = {}  # peer of the plan -> why it is gone
        self._results: dict[int, asyncio.Future[TickResult]] = {}
        self._turn, self._save_turn = asyncio.Lock(), asyncio.Lock()
        self._slots = asyncio.Semaphore(AHEAD)
        self._whole, self._broken = asyncio.Event(), asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: Links | None = None
        self._book: TickBook | None = None
        self._programs: tuple[StageProgram, ...] = ()

    # --- life

    async def __aenter__(self) -> Self:
        self._failed = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._tasks)
        await self._assembly.leave("the trainer ends")
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._links is not None:
            await self._links.__aexit__(None, None, None)
        if self._failed is not None and self._failed.done():
            self._failed.exception()  # seen

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the session ends; its failure is the session's."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """The top of each task of the session: whatever ends one ends the session, by name."""
        try:
            await work
        except (FusionError, DhtError) as error:
            self._fail(error)
        except Exception as error:
            log.exception("a task of the trainer failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
        for waiter in self._results.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # the one who awaits it sees it; nobody else need

    async def _or_fail(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work`, or the session's failure if that comes first."""
        assert self._failed is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failed.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    # --- starting

    async def start(self, data_state: bytes) -> Plan:
        """Find volunteers, agree on a plan, place every stage. `data_state`: the data's position before the first tick.

        A folder with a complete set goes on from it; a new one begins with the set at tick 0.
        """
        plan: Plan = await self._or_fail(self._start(data_state))
        return plan

    async def _start(self, data_state: bytes) -> Plan:
        resumed = self._folder.manifest() if self._folder.sets() else None
        numerics = resumed.numerics if resumed else self._options.numerics
        first_tick, self.step = (resumed.tick, resumed.step) if resumed else (0, 0)
        self._say("phase", "waiting for volunteers")
        self._offers = await self._swarm.wait_for(
            self._options.peers, self._options.gather_s, frozenset(), lambda n: self._say("waiting", f"{n} volunteers")
        )
        self._assembly.addresses = self._swarm.addresses
        request = PlanRequest(base=numerics, stages=self._options.stages, pinned=resumed is not None)
        request = replace(request, epoch=self._session.epoch, mark_interval=self._options.mark_interval)

        def states(plan: Plan) -> Mapping[int, BlobRef]:
            return self._refs(resumed or self._first_set(plan, data_state))

        self._say("phase", "placing the stages")
        plan = await self._assembly.assemble(self._atoms, self._offers, request, states, first_tick, self._refused)
        if resumed is None:
            entry = NumericLogEntry(first_step=0, numerics=plan.numerics, reason="the first plan")
            await asyncio.to_thread(self._folder.append_numerics, sign(entry, self._session.owner_key))
            await asyncio.to_thread(self._folder.save_set, self._first_set(plan, data_state))
        self.set = self._folder.manifest()
        self._programs = split(self._dag, plan.numerics.cuts)
        self._book = TickBook(plan.numerics.stages, first_tick)
        self._links = await Links(
            self._transport,
            self._assembly.me,
            self._run,
            self._session.epoch,
            bound=_bound,
            logged=lambda dst: True,
            start_tick=first_tick,
        ).__aenter__()
        self.spawn(self._collect(self._links, self._book))
        await self._adopt(plan)
        self.spawn(self._repair())
        return plan

    def _first_set(self, plan: Plan, data_state: bytes) -> Manifest:
        files = []
        for program in split(self._dag, plan.numerics.cuts):
            blob, size = self._folder.blobs.put(self._initial(program))
            files.append(StageFile(stage=program.stage, hash=blob, size=size))
        return self._manifest(0, plan.numerics, files, data_state)

    def _manifest(self, tick: int, numerics: Numerics, files: Sequence[StageFile], data_state: bytes) -> Manifest:
        return Manifest(
            run=self._run,
            opdag_hash=self._session.spec.opdag_hash,
            tick=tick,
            step=self.step,
            epoch=self._session.epoch,
            numerics=numerics,
            stages=tuple(files),
            data_state=data_state,
        )

    def _refs(self, manifest: Manifest) -> dict[int, BlobRef]:
        return {e.stage: BlobRef(e.hash, e.size, (self._transport.peer_id,)) for e in manifest.stages}

    async def _adopt(self, plan: Plan) -> None:
        """From now on `plan` is in force: everybody is told where the others live."""
        assert self._links is not None
        self.plan, self._number = plan, plan.number
        self._links.update(self._assembly.endpoints(), plan.number)
        await self._assembly.connect(plan)
        self._sink(PlanAdopted(plan))
        if not self._lost:
            self._whole.set()

    def _refused(self, refusal: Refusal) -> None:
        p = refusal.placement
        self._say("refused", f"{p.peer[-8:]} refuses stage {p.stage}: {refusal.reason}", peer=p.peer, stage=p.stage)

    # --- ticks

    async def release(self, feed: Mapping[int, torch.Tensor], *, training: bool) -> asyncio.Future[TickResult]:
        """Open the next tick with this batch (value id -> tensor, as `capture.feed` gives it); a future of its result.

        Waits while AHEAD ticks are open. InputError for a batch that is not what was captured.
        """
        future: asyncio.Future[TickResult] = await self._or_fail(self._release(feed, training))
        return future

    async def _release(self, feed: Mapping[int, torch.Tensor], training: bool) -> asyncio.Future[TickResult]:
        assert self._links is not None and self._book is not None
        sizes, parts = cut_batch(self._dag, feed, self._options.numerics.micro_batch_size)
        await self._slots.acquire()
        async with self._turn:
            header = StepHeader(training, self.step, sizes)
            tick = self._book.release(header, _tokens(feed), time.perf_counter())
            future: asyncio.Future[TickResult] = asyncio.get_running_loop().create_future()
            self._results[tick] = future
            self.step += training
            for frame in release(self._dag, self._programs, tick, header, parts):
                await self._links.send(frame)
        return future

    async def wait(self, future: asyncio.Future[TickResult]) -> TickResult:
        """The result of a released tick."""
        result: TickResult = await self._or_fail(_result(future))
        return result

    async def _collect(self, links: Links, book: TickBook) -> None:
        async for frame in links.frames():
            try:
                result = book.take(frame, time.perf_counter())
            except FrameError as error:
                self._exclude(frame.src, str(error))
                continue
            if result is not None:
                self._slots.release()
                if result.header.training:
                    self._sink(step_result(result))
                waiter = self._results.pop(result.tick)
                if not waiter.done():
                    waiter.set_result(result)

    # --- complete sets

    @property
    def set_is_due(self) -> bool:
        """Whether a set should be made soon, lest what is kept for a replay grows out of bounds."""
        assert self._book is not None and self._links is not None and self.plan is not None
        ticks, interval = self._book.next_tick - self.set.tick, self.plan.mark_interval
        return bool(interval and ticks >= 2 * interval) or self._links.held_bytes() > MAX_HELD_BYTES

    async def save(self, data_state: bytes) -> Manifest:
        """A complete set at the next tick, where the data stands at `data_state`; the newest if nothing came since.

        Training goes on while the bytes travel. BlobError when five attempts failed.
        """
        manifest: Manifest = await self._or_fail(self._save(data_state))
        return manifest

    async def _save(self, data_state: bytes) -> Manifest:
        assert self._book is not None and self.plan is not None and self._links is not None
        async with self._save_turn:
            for _ in range(SAVE_TRIES):
                async with self._turn:
                    tick = self._book.next_tick
                    if self.set.tick == tick:
                        return self.set
                    plan = self.plan
                    manifest = self._manifest(tick, plan.numerics, (), data_state)
                    marks = await self._mark(tick)
                try:
                    await asyncio.gather(*(self._fetch(s.state, plan.host(s.stage).peer) for s in marks))
                except BlobError as error:
                    self._say("waiting", f"the set at step {manifest.step} could not be fetched: {error}; trying again")
                    continue
                files = tuple(StageFile(stage=s.stage, hash=s.state.hash, size=s.state.size) for s in marks)
                self.set = msgspec.structs.replace(manifest, stages=files)
                await asyncio.to_thread(self._folder.save_set, self.set)
                await self._trim(tick)
                self._say("saved", f"complete set at step {self.set.step}")
                return self.set
        raise BlobError(
            f"no complete set could be fetched in {SAVE_TRIES} tries; the newest is of step {self.set.step}"
        )

    async def _mark(self, tick: int) -> list[Snapshotted]:
        """Every stage's snapshot at the boundary before `tick`, which is not released yet. Outlives repairs."""
        while True:
            await self._whole.wait()
            assert self.plan is not None
            try:
                return list(
                    await asyncio.gather(
                        *(
                            self._assembly.host(p.peer).mark(Mark(run=self._run, stage=p.stage, tick=tick))
                            for p in self.plan.placement
                        )
                    )
                )
            except HostLost as lost:
                self._on_lost(lost.peer, lost.reason)

    async def _fetch(self, ref: BlobRef, peer: str) -> None:
        await fetch_blob(
            self._transport,
            self._folder.blobs,
            self._run,
            ref,
            max_bytes=MAX_SNAPSHOT_BYTES,
            addresses={peer: self._swarm.addresses.get(peer, ())},
        )

    async def _trim(self, tick: int) -> None:
        assert self.plan is not None and self._links is not None
        self._links.trim(tick)
        for p in self.plan.placement:
            try:
                await self._assembly.host(p.peer).send(Trim(run=self._run, stage=p.stage, tick=tick))
            except HostLost as lost:
                self._on_lost(lost.peer, lost.reason)

    # --- losses

    def hosts_stage(self, peer: str) -> bool:
        """Whether `peer` has, or is being offered, a stage: only such peers are served snapshots."""
        return self._assembly.asked(peer)

    def _on_lost(self, peer: str, reason: str) -> None:
        if self.plan is None or peer in self._lost or peer not in {p.peer for p in self.plan.placement}:
            return
        self._lost[peer] = reason
        self._whole.clear()
        self._broken.set()

    def _on_fault(self, peer: str, fault: StageFault) -> None:
        if fault.code in FATAL_FAULTS:
            self._excluded.add(peer)
            self._on_lost(peer, fault.reason)
        else:
            self._say("waiting", f"stage {fault.stage}: {fault.reason}", peer=peer, stage=fault.stage)

    def _exclude(self, stage: int, reason: str) -> None:
        """A stage sent what it must not: its host is not to be trusted with one."""
        assert self.plan is not None
        peer = self.plan.host(stage).peer
        self._excluded.add(peer)
        self._on_lost(peer, reason)

    def _on_status(self, status: StageStatus) -> None:
        self.watch.status(status, self._links.bytes_sent() if self._links else {})

    async def _repair(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._broken.wait()
            self._broken.clear()
            assert self.plan is not None
            for peer, reason in self._lost.items():
                stages = [p.stage for p in self.plan.placement if p.peer == peer]
                for stage in stages:
                    self._say("lost", f"{peer[-8:]} (stage {stage}) was lost: {reason}", peer=peer, stage=stage)
            until = loop.time() + self._options.recover_s
            while self._lost:
                why = await self._rehost()
                if why and loop.time() >= until:
                    raise RunPaused(self._pause_text(why))
                if why:
                    await asyncio.sleep(RETRY_S)

    def _pause_text(self, why: str) -> str:
        assert self.plan is not None
        lost = [(p.peer, p.stage) for p in self.plan.placement if p.peer in self._lost]
        names = ", ".join(f"peer {peer[-8:]} (stage {stage})" for peer, stage in lost)
        reason = next(iter(self._lost.values()))
        return (
            f"paused: {names} was lost ({reason}) and {why}; "
            f"saved up to step {self.set.step}, continue with: fusion-run resume {self._folder.root}"
        )

    async def _rehost(self) -> str:
        """Rebuild the lost stages elsewhere; why that cannot be done now, or ""."""
        assert self.plan is not None
        gone = frozenset(self._lost)
        if self._options.recover_s <= 0:
            return "recovery is off"
        fresh = {o.peer: o for o in await self._swarm.offers()}
        known = {o.peer: o for o in self._offers}
        offers = [o for o in (fresh | known).values() if o.peer in fresh and o.peer not in self._excluded | gone]
        moved = [p.stage for p in self.plan.placement if p.peer in gone]
        stages = recovery_group(self.plan, moved, _edges(self._programs))
        try:
            factor = PlanRequest(base=self.plan.numerics).state_factor
            base = msgspec.structs.replace(self.plan, number=self._number)
            plan = rehost(base, gone, stages, self._atoms, offers, factor)
        except InputError as error:
            return str(error)
        self._number = plan.number
        refusals = await self._assembly.place(plan, stages, self._refs(self.set), self.set.tick)
        for refusal in refusals:
            self._refused(refusal)
            self._excluded.add(refusal.placement.peer)
        if refusals:
            return refusals[0].reason
        self._offers = offers
        for peer in gone:
            del self._lost[peer]
        try:
            await self._adopt(plan)
        except HostLost as lost:
            self._on_lost(lost.peer, lost.reason)
        for stage in stages:
            p = plan.host(stage)
            text = f"stage {stage} goes on at {p.peer[-8:]} from step {self.set.step}"
            self._say("recovered", text, peer=p.peer, stage=stage)
        return ""

    def _say(self, kind: str, text: str, *, peer: str = "", stage: int = -1) -> None:
        self._sink(RunEvent(kind=kind, text=text, time_s=self._session.clock(), step=self.step, peer=peer, stage=stage))


async def _result(future: asyncio.Future[TickResult]) -> TickResult:
    return await future


def step_result(result: TickResult) -> StepResult:
    """A training tick as watchers see it."""
    return StepResult(
        step=result.header.step,
        loss=result.loss,
        step_time_s=result.time_s,
        samples=sum(result.header.sizes),
        tokens=result.tokens,
    )


def _edges(programs: Sequence[StageProgram]) -> set[tuple[int, int]]:
    """Pairs of stages between which tensors travel. Norms and verdicts are too small to join anybody."""
    pairs = {(e.src, e.dst) for p in programs for e in p.edges_out}
    return pairs | {(a, b) for p in programs for w in p.shared for a in w.stages for b in w.stages if a < b}


def _tokens(feed: Mapping[int, torch.Tensor]) -> int:
    """Elements of the largest integer input with more than one dimension."""
    return max((x.numel() for x in feed.values() if x.dim() > 1 and not x.is_floating_point()), default=0)


def _bound(src: int, kind: Kind, value: int) -> int:
    """What stages may send to the trainer."""
    if kind not in (Kind.LOSS, Kind.DONE):
        raise WireError(f"stage {src} sends a {kind.name} frame to the trainer")
    return 4 if kind is Kind.LOSS else MAX_REPORT_BYTES

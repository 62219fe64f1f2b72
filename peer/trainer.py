"""One trainer session: places the stages, releases ticks, gathers results (DESIGN section 2).

All of it lives on one asyncio loop. `Trainer` is an async context manager; its holder (`peer.api`) calls `start`, then
`release` for each tick and `save` now and then. `trainer_sets` keeps complete sets, `trainer_repair` mends losses; if
no volunteer takes a lost stage in time the run pauses: RunPaused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Self

import torch

from dht.transport import Transport
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import StepHeader
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from fusion_p2p.release import cut_batch, release
from fusion_p2p.split import StageProgram, split
from fusion_p2p.workload import atoms
from peer.events import PlanAdopted, Sink
from peer.links import Links
from peer.numeric_log import ahead, check_builds, in_force
from peer.offers import DeviceOffer
from peer.placement import wanted_bytes
from peer.protocol import BlobRef
from peer.session_tasks import SessionTasks
from peer.signing import sign
from peer.trainer_adopt import Adopted, Replay, adopt, note_hosts, note_release
from peer.trainer_assembly import Assembly
from peer.trainer_balance import Balance
from peer.trainer_gate import Gate
from peer.trainer_hearing import Hearing
from peer.trainer_ladder import ladder_of_run
from peer.trainer_live import Live, Placed, TrainerOptions
from peer.trainer_repair import Repair
from peer.trainer_session import Session
from peer.trainer_sets import SetKeeper, new_manifest
from peer.trainer_spares import Spares
from peer.trainer_state import Manifest, RunFolder, StageFile
from peer.trainer_swarm import Swarm
from peer.trainer_switch import Switch
from peer.trainer_ticks import TickBook, TickResult, bound, step_result
from peer.trainer_watch import Watch

AHEAD = 2  # ticks released before the oldest is done: the next one's data is there when a stage is free


class Trainer:
    """`initial` makes the first snapshot of a stage. `folder` holds the signed spec and the OP-DAG already. `clock` is
    monotonic, in seconds."""

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
        own_addresses: Callable[[], tuple[str, ...]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = SessionTasks(self._fail)
        self.spawn = self._tasks.spawn
        pieces = atoms(dag, options.numerics.micro_batch_size)
        assembly = Assembly(
            transport,
            session,
            dag,
            atoms=len(pieces),
            spawn=self.spawn,
            on_lost=lambda peer, reason: self._live.gone(peer, reason),
            on_offer=lambda peers: self._live.offering(peers),
            on_fault=lambda peer, fault: self._hearing.fault(peer, fault),
            on_status=lambda peer, status: self._hearing.status(peer, status),
            channels=options.channels,
            own_addresses=own_addresses,
        )
        self._live = Live(
            transport=transport,
            swarm=swarm,
            session=session,
            folder=folder,
            dag=dag,
            atoms=pieces,
            options=options,
            sink=sink,
            assembly=assembly,
            clock=clock,
        )
        self._initial = initial
        self.watch = Watch(sink, session.clock)
        self._turn = asyncio.Lock()
        self._balance = Balance(self._live, self.spawn)
        self._gate = Gate(self._live)
        self._hearing = Hearing(self._live, self.watch, self.spawn)
        self.sets = SetKeeper(self._live, self._turn, self.spawn)
        self._switch = Switch(self._live, self._turn, self._install, self._adopt)
        self._slots = asyncio.Semaphore(AHEAD)
        self._new_from = 0  # earlier ticks were released before, by another session
        self._results: dict[int, asyncio.Future[TickResult]] = {}

    @property
    def plan(self) -> Plan:
        """The plan in force, once started."""
        return self._live.now.plan

    @property
    def step(self) -> int:
        """Optimizer steps released so far, over all sessions of the run."""
        return self._live.step

    @property
    def change_due(self) -> bool:
        """Whether the plan changes before the next tick, at a set that stands there."""
        return self._live.change_due

    def may_fetch(self, peer: str, blob: str) -> bool:
        """Only hosts, those that are being offered a stage, and buddies asked to keep it are served a snapshot."""
        return self._live.assembly.hosts_stage(peer) or self._live.keepers.get(blob) == peer

    # --- life

    async def __aenter__(self) -> Self:
        self._tasks.begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = self._tasks.cancel()  # first, so that none of them takes leaving hosts for lost ones
        await self._live.assembly.leave("the trainer ends")
        if tasks:
            await asyncio.wait(tasks)
        if self._live.placed is not None:
            await self._live.placed.links.__aexit__(None, None, None)

    def _fail(self, error: Exception) -> None:
        for waiter in self._results.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # the one who awaits it sees it; nobody else need

    # --- starting

    async def start(self, data_state: bytes, replay: Replay | None = None) -> Plan:
        """Find volunteers, agree on a plan, place every stage. `data_state`: the data's position before the first tick.

        A folder with a complete set goes on from it, with `replay` from where its stages are if they still run; a new
        one begins with the set at tick 0.
        """
        return await self._tasks.or_fail(self._start(data_state, replay))

    async def _start(self, data_state: bytes, replay: Replay | None) -> Plan:
        live = self._live
        resumed = live.folder.manifest() if live.folder.sets() else None
        if resumed is not None and replay is not None and (found := await adopt(live, resumed, replay)) is not None:
            return await self._go_on(resumed, found)
        await asyncio.to_thread(live.folder.forget_releases)
        offers = await self._gather()
        live.step = resumed.step if resumed else 0
        live.links = await live.swarm.links()
        begin = await asyncio.to_thread(self._first_numerics, resumed)
        pinned = resumed is not None or bool(live.options.script)
        live.ladder = await ladder_of_run(live, offers, pinned=pinned)
        request = replace(live.request, base=begin, pinned=pinned)

        def states(plan: Plan) -> Mapping[int, BlobRef]:
            return live.refs(resumed or self._first_set(plan, data_state))

        live.say("phase", "placing the stages")
        first_tick = resumed.tick if resumed else 0
        plan, offers = await live.assembly.assemble(live.atoms, offers, request, states, first_tick, live.refused)
        if resumed is None:
            await asyncio.to_thread(self._log, NumericLogEntry(0, plan.numerics, "the first plan"))
            await asyncio.to_thread(lambda: live.folder.save_set(self._first_set(plan, data_state)))
        await self._install(plan, offers, live.folder.manifest())
        self._begin()
        return plan

    async def _go_on(self, newest: Manifest, found: Adopted) -> Plan:
        """With stages that run already: what was released since the newest set is released again."""
        live, plan = self._live, found.plan
        live.step = newest.step
        await asyncio.to_thread(self._first_numerics, newest)
        offers = await live.swarm.offers(live.options.gather_s)
        live.links = await live.swarm.links()
        live.ladder = await ladder_of_run(live, offers, pinned=True)
        live.early |= {plan.host(stage).peer: why for stage, why in found.missing.items()}
        self._new_from = newest.tick + len(found.feeds)
        await self._install(plan, offers, newest)
        self._begin()
        for feed in found.feeds:
            await self._release(feed, training=True)
        live.say("recovered", f"{plan.numerics.stages - len(found.missing)} stages go on where they were")
        return plan

    def _begin(self) -> None:
        self.spawn(Repair(self._live, self._adopt).serve())
        self.spawn(Spares(self._live).serve())
        self.spawn(self._live.assembly.keep_certified())

    def _first_numerics(self, resumed: Manifest | None) -> Numerics:
        """With what this session begins; what the numeric log prescribes for later goes to `live.script`."""
        live, given = self._live, self._live.options.script
        check_builds(given, live.dag)
        if resumed is None:
            live.script = list(given[1:])
            return given[0].numerics if given else live.options.numerics
        own = [entry for _, entry in live.folder.numeric_log()]
        live.script = ahead(given or own, resumed.step, resumed.numerics)
        if in_force(own, resumed.step) != resumed.numerics and not live.change_due:
            self._log(NumericLogEntry(resumed.step, resumed.numerics, "as the newest complete set has it"))
        return resumed.numerics

    def _log(self, entry: NumericLogEntry) -> None:
        self._live.folder.append_numerics(sign(entry, self._live.session.owner_key))

    async def _install(self, plan: Plan, offers: list[DeviceOffer], manifest: Manifest) -> None:
        """Every stage of `plan` has been accepted and begins at this set; so does the trainer, its old links closed."""
        live = self._live
        links = Links(
            live.transport,
            live.assembly.me,
            live.run,
            live.session.epoch,
            bound=bound,
            logged=lambda dst: True,
            start_tick=manifest.tick,
            settings=live.options.channels,
            on_event=self._hearing.link_event,
        )
        programs = split(live.dag, plan.numerics.cuts)
        live.rates.take(offers)
        live.early |= live.lost
        live.lost.clear()
        live.outbox_share.clear()
        live.placed = Placed(
            plan=plan,
            links=await links.__aenter__(),
            book=TickBook(len(programs), next(p.stage for p in programs if p.has_loss), manifest.tick),
            programs=programs,
            newest=manifest,
            offers=offers,
            number=plan.number,
        )
        self._hearing.forget()
        self.watch.begin()
        self.spawn(self._collect(live.placed))
        await self._adopt(plan)

    async def _gather(self) -> list[DeviceOffer]:
        live = self._live
        live.say("phase", "waiting for volunteers")
        wanted = live.options.peers
        each = wanted_bytes(live.atoms, live.request, wanted)

        def waiting(there: int) -> None:
            more = max(0, wanted - there)
            live.say("wanted", f"{there} volunteers", wanted_peers=more, wanted_bytes=each if more else 0)

        offers = await live.swarm.wait_for(wanted, live.options.gather_s, waiting)
        live.assembly.addresses = live.swarm.addresses
        return offers

    def _first_set(self, plan: Plan, data_state: bytes) -> Manifest:
        files = []
        for program in split(self._live.dag, plan.numerics.cuts):
            blob, size = self._live.folder.blobs.put(self._initial(program))
            files.append(StageFile(stage=program.stage, hash=blob, size=size))
        return new_manifest(self._live, 0, plan.numerics, files, data_state)

    async def _adopt(self, plan: Plan) -> None:
        """From now on `plan` is in force: everybody is told where the others live."""
        live, now = self._live, self._live.now
        now.plan = plan
        there = {p.peer for p in plan.placement}
        live.leaving = {peer: why for peer, why in live.leaving.items() if peer in there}
        await note_hosts(live, plan)
        await self.sets.remark(plan)
        now.links.update(live.assembly.endpoints(), plan.number)
        for lost in await live.assembly.connect(plan):
            live.lose(lost.peer, lost.reason)
        for peer, reason in live.early.items():
            live.lose(peer, reason)
        live.early.clear()
        live.sink(PlanAdopted(plan))
        if not live.lost and not live.anew:
            live.whole.set()

    # --- ticks

    async def release(self, feed: Mapping[int, torch.Tensor], *, training: bool) -> asyncio.Future[TickResult]:
        """Open the next tick with this batch (value id -> tensor, as `capture.feed` gives it); a future of its result.

        Waits while AHEAD ticks are open. InputError for a batch that is not what was captured.
        """
        return await self._tasks.or_fail(self._release(feed, training))

    async def _release(self, feed: Mapping[int, torch.Tensor], training: bool) -> asyncio.Future[TickResult]:
        live = self._live
        sizes, parts = cut_batch(live.dag, feed, live.now.plan.numerics.micro_batch_size, training=training)
        await self._slots.acquire()
        async with self._turn:
            now = live.now
            now.idle.clear()
            header = StepHeader(training, live.step, sizes)
            tick = now.book.release(header, _tokens(feed), live.clock())
            future: asyncio.Future[TickResult] = asyncio.get_running_loop().create_future()
            self._results[tick] = future
            live.step += training
            frames = list(release(live.dag, now.programs, tick, header, parts))
            if tick >= self._new_from:
                await asyncio.to_thread(note_release, live.folder, tick, header, frames)
            now.links.look_again()
            for frame in frames:
                await now.links.send(frame)
        return future

    async def wait(self, future: asyncio.Future[TickResult]) -> TickResult:
        """The result of a released tick."""
        return await self._tasks.or_fail(_result(future))

    async def _collect(self, now: Placed) -> None:
        def last_tick() -> int | None:  # of ticks that an earlier session released: they come before we ask
            return now.book.next_tick - 1 if now.book.next_tick < self._new_from else None

        async for frame in now.links.frames(last_tick):
            try:
                result = now.book.take(frame, self._live.clock())
            except FrameError as error:
                self._hearing.distrust(frame.src, str(error))
                continue
            if result is not None:
                self._slots.release()
                if not now.book.open_ticks:
                    now.idle.set()
                if result.header.training:
                    self._live.sink(step_result(result))
                    if result.tick >= self._new_from:
                        self._balance.tick(result)
                        self.sets.tick(result.time_s)
                    self._gate.tick(result)
                waiter = self._results.pop(result.tick)
                if not waiter.done():
                    waiter.set_result(result)

    async def mark(self, data_state: bytes) -> bool:
        """See `SetKeeper.begin`."""
        return await self._tasks.or_fail(self.sets.begin(data_state))

    async def save(self, data_state: bytes) -> Manifest:
        """See `SetKeeper.save`. A change of plan that is due happens here; then the set is of the new cuts."""
        await self._tasks.or_fail(self.sets.save(data_state))
        before = self.plan
        advice = await self._tasks.or_fail(self._switch.carry_out())
        if self.plan is not before:
            self._balance.changed(advice)
        return self._live.now.newest


async def _result(future: asyncio.Future[TickResult]) -> TickResult:
    return await future


def _tokens(feed: Mapping[int, torch.Tensor]) -> int:
    """Elements of the largest integer input with more than one dimension."""
    return max((x.numel() for x in feed.values() if x.dim() > 1 and not x.is_floating_point()), default=0)

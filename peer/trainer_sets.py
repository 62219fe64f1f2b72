"""Complete sets: every stage's snapshot at one mark, fetched, verified and recorded in the run folder (DESIGN 2).

A mark names a tick that is not released yet; once every host has noted it training goes on, and each stage copies its
state as it passes. Writing, fetching and recording happen beside the training.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics, Plan, StagePlacement
from fusion_p2p.planner.replan import MOVING_AVERAGE
from fusion_p2p.snapshot_check import SnapshotCheck, codec_digests, parted
from peer.blobs import fetch_blob
from peer.errors import BlobError, DiskFull
from peer.mark_interval import losses_per_s, mark_interval
from peer.protocol import BlobRef, Mark, Snapshotted, Trim
from peer.quiet import LONG_WAIT_S
from peer.rehost import computed_apart
from peer.trainer_assembly import Spawn
from peer.trainer_buddies import BuddyKeeper
from peer.trainer_host import MARK_TIMEOUT_S, HostLost
from peer.trainer_live import AFTER_LOSS_S, Live
from peer.trainer_state import Manifest, StageFile

MAX_HELD_BYTES = 1 << 30  # of released batches that no complete set covers yet
HALF_FULL = 0.5  # an outbox's share of its memory from which the next tick is marked
TRIES = 5


_Made = dict[int, tuple[StagePlacement, asyncio.Future[Snapshotted]]]


@dataclass(slots=True)
class _Marked:
    """`manifest`: the set to be, still without its files. `made`: by stage, who was asked and what will come."""

    manifest: Manifest
    made: _Made = field(default_factory=dict)


class SetKeeper:
    """`turn` is held while ticks are released; a mark holds it until all have noted it."""

    def __init__(self, live: Live, turn: asyncio.Lock, spawn: Spawn) -> None:
        self._live, self._turn, self._spawn = live, turn, spawn
        self._buddies = BuddyKeeper(live)
        self._saving = asyncio.Lock()
        self._marking = asyncio.Lock()
        self._marked: _Marked | None = None  # the set that is under way
        self._clock, self._began_s = live.clock, live.clock()
        self._step_s, self._bytes_per_s = 0.0, 0.0  # as measured; 0: not yet
        self._failed = 0  # sets in a row that did not come about

    @property
    def is_due(self) -> bool:
        """Whether a set should be made soon, lest what is kept for a replay grows out of bounds."""
        now = self._live.now
        ticks, interval = now.book.next_tick - now.newest.tick, self.interval
        return (
            bool(self._live.leaving)
            or self._live.change_due
            or bool(self._failed)
            or max(self._live.outbox_share.values(), default=0.0) >= HALF_FULL
            or bool(interval and ticks >= interval)
            or now.links.held_bytes() > MAX_HELD_BYTES
        )

    @property
    def interval(self) -> int:
        """Steps between sets as they pay here, the plan's at most; 0: none are promised."""
        now = self._live.now
        return mark_interval(
            step_s=self._step_s,
            state_bytes=max((e.size for e in now.newest.stages), default=0),
            bytes_per_s=self._bytes_per_s,
            rate=losses_per_s(self._live.losses, self._clock() - self._began_s),
            most=now.plan.mark_interval,
        )

    def tick(self, step_s: float) -> None:
        """One more step has taken this long."""
        self._step_s += (MOVING_AVERAGE if self._step_s else 1.0) * (step_s - self._step_s)

    async def begin(self, data_state: bytes) -> bool:
        """Mark the next tick, where the data stands at `data_state`; the set comes about while training goes on.

        False where a set is under way already: it is waited for only if what is kept grows out of bounds. BlobError
        when TRIES sets in a row did not come about.
        """
        live = self._live
        if self._saving.locked():
            if live.now.links.held_bytes() > MAX_HELD_BYTES:
                live.say("waiting", "for the set that is under way: more batches are held than a set may leave open")
                async with self._saving:
                    pass
            return False
        await self._saving.acquire()
        try:
            marked = await self._mark(data_state)
        except BaseException:
            self._saving.release()
            raise
        if marked is None:
            self._saving.release()
            self._let_go()
        else:
            self._spawn(self._beside(marked))
        return True

    async def _beside(self, marked: _Marked) -> None:
        try:
            await self._complete(marked)
        finally:
            self._saving.release()

    async def save(self, data_state: bytes) -> Manifest:
        """A complete set at the next tick, where the data stands at `data_state`; the newest if nothing came since.

        BlobError when every attempt failed.
        """
        live = self._live
        async with self._saving:
            while (marked := await self._mark(data_state)) is not None:
                if await self._complete(marked):
                    return live.now.newest
            self._let_go()
            return live.now.newest

    async def _complete(self, marked: _Marked) -> bool:
        """Whether the set came about. BlobError if TRIES in a row did not."""
        live, telling = self._live, asyncio.create_task(self._tell_if_long(marked))
        try:
            while not await self._gather(marked):
                pass  # a stage was rebuilt meanwhile, behind the mark: it makes its snapshot again
        except DiskFull:
            raise
        except BlobError as error:
            self._failed += 1
            if self._failed >= TRIES:
                why = f"no set could be fetched in {TRIES} tries; the newest is of step {live.now.newest.step}"
                raise BlobError(f"{why} ({error})") from None
            step = marked.manifest.step
            live.say("waiting", f"the set at step {step} could not be fetched, trying again: {error}")
            return False
        finally:
            self._marked = None
            telling.cancel()
        self._failed = 0
        return True

    async def _gather(self, marked: _Marked) -> bool:
        """Fetch what all have made and record it; False, and nothing recorded, if one who made it was replaced since:
        frames from the last set on are wanted then, and to record a set is to trim them. BlobError if one cannot be
        had."""
        made = await self._all_made(marked)
        snapshots = [self._held_by(*made[k]) for k in sorted(made)]
        digests = await asyncio.gather(*(self._fetch(s, again=self._failed > 0) for s in snapshots))
        self._compare(digests)
        files = tuple(StageFile(stage=s.stage, hash=s.state.hash, size=s.state.size) for s in snapshots)
        async with self._live.placing:  # else a stage may be rebuilt from the last set just now
            if marked.made != made or not self._is_noted(marked):
                return False
            await self._record(msgspec.structs.replace(marked.manifest, stages=files))
        return True

    def _compare(self, digests: Sequence[Mapping[str, bytes]]) -> None:
        """BlobError if the ends of an edge hold different axes, as when one was computed again on other hardware: then
        all begin anew. Hosts whose stages began together have no such excuse: one of the two lies."""
        live, key = self._live, parted(digests)
        if not key:
            return
        ends = [stage for stage, held in enumerate(digests) if key in held]
        what = f"stages {ends} hold different {key}"
        if computed_apart(live.now.plan):
            live.begin_anew(what)
        else:
            for peer in [live.now.plan.host(stage).peer for stage in ends]:
                live.gone(peer, what)
        raise BlobError(what)

    async def _tell_if_long(self, marked: _Marked) -> None:
        """A set that is long in coming is named: who has not made its snapshot, or what is on its way."""
        await asyncio.sleep(LONG_WAIT_S)
        made = {k: f.result() for k, (_, f) in marked.made.items() if f.done() and not f.exception()}
        late = sorted(marked.made.keys() - made.keys())
        size = sum(s.state.size for s in made.values())
        why = f"snapshots of stages {late} are not made" if late else f"{size} bytes of snapshots are on their way"
        self._live.say(
            "waiting", f"the set at step {marked.manifest.step} is not complete after {LONG_WAIT_S:g} s: {why}"
        )

    async def _record(self, manifest: Manifest) -> None:
        live = self._live
        await asyncio.to_thread(live.folder.save_set, manifest)
        await asyncio.to_thread(live.folder.forget_releases, manifest.tick)
        live.now.newest = manifest
        live.now.links.trim(manifest.tick)
        live.outbox_share.clear()  # what was reported before counts no more
        hosts = [(p.peer, p.stage) for p in live.now.plan.placement]
        for peer, stage in (*hosts, *((peer, -1) for peer in self._buddies.idle(dict(hosts)))):
            try:
                await live.assembly.host(peer).send(Trim(run=live.run, stage=stage, tick=manifest.tick))
            except HostLost as lost:
                live.lose(lost.peer, lost.reason)
        live.say("saved", f"complete set at step {manifest.step}")
        self._let_go()
        self._spawn(self._buddies.spread(manifest, {p.stage: p.peer for p in live.now.plan.placement}))

    def _let_go(self) -> None:
        """Hosts that waited for a set may go: nothing of theirs is needed any more."""
        for peer, reason in list(self._live.leaving.items()):
            self._live.lose(peer, reason, moving=True)

    async def _mark(self, data_state: bytes) -> _Marked | None:
        """Every host has noted the mark at the next tick; None if the newest set stands there."""
        live = self._live
        async with self._turn:
            tick = live.now.book.next_tick
            if live.now.newest.tick == tick:
                return None
            marked = _Marked(new_manifest(live, tick, live.now.plan.numerics, (), data_state))
            self._marked = marked
            try:
                while len(marked.made) < live.now.plan.numerics.stages or not self._is_noted(marked):
                    await live.whole.wait()
                    await self._announce(marked, live.now.plan.placement)
            except BaseException:
                self._marked = None
                raise
            return marked

    def _is_noted(self, marked: _Marked) -> bool:
        """By those who host the stages now."""
        return all(_same(marked.made[p.stage][0], p) for p in self._live.now.plan.placement)

    async def remark(self, plan: Plan) -> None:
        """Before a rebuilt stage may compute: it passes the tick of the mark again. `plan` is about to be in force."""
        if self._marked is not None:
            await self._announce(self._marked, plan.placement)

    async def _announce(self, marked: _Marked, placement: Iterable[StagePlacement]) -> None:
        """Tell those who have not been told; a host that is gone is reported as lost."""
        live, tick = self._live, marked.manifest.tick

        async def one(p: StagePlacement) -> None:
            if p.stage in marked.made and _same(marked.made[p.stage][0], p):
                return
            try:
                made = await live.assembly.host(p.peer).mark(Mark(run=live.run, stage=p.stage, tick=tick))
            except HostLost as lost:
                return live.lose(lost.peer, lost.reason)
            before = marked.made.get(p.stage)
            marked.made[p.stage] = p, made
            if before is not None and not before[1].done():
                before[1].set_exception(HostLost(before[0].peer, "its stage was made anew"))

        async with self._marking:
            await asyncio.gather(*map(one, placement))

    async def _all_made(self, marked: _Marked) -> _Made:
        """Every stage's snapshot, and who made it; outlives repairs. BlobError if one will not come."""
        live, tick = self._live, marked.manifest.tick
        while True:
            waiting = dict(marked.made)
            _, late = await asyncio.wait([f for _, f in waiting.values()], timeout=MARK_TIMEOUT_S)
            if late:
                stages = sorted(k for k, (_, f) in waiting.items() if f in late)
                raise BlobError(f"no snapshot at tick {tick} from stages {stages} within {MARK_TIMEOUT_S:.0f} s")
            errors = {k: f.exception() for k, (_, f) in waiting.items()}
            for k, error in errors.items():
                replaced = marked.made[k] is not waiting[k]
                if isinstance(error, HostLost) and not replaced and error.peer not in live.assembly.linked:
                    live.lose(error.peer, error.reason)
            await live.whole.wait()
            if all(marked.made[k] is made for k, made in waiting.items()):
                for k, error in errors.items():
                    if error is not None:
                        raise BlobError(f"stage {k} made no snapshot at tick {tick}: {error}")
                return waiting

    def _held_by(self, p: StagePlacement, made: asyncio.Future[Snapshotted]) -> Snapshotted:
        """What it made, to be had from that host: nobody else is asked on its word."""
        answer = made.result()
        return msgspec.structs.replace(answer, state=self._live.ref(answer.state.hash, answer.state.size, p.peer))

    async def _fetch(self, made: Snapshotted, *, again: bool) -> dict[str, bytes]:
        """`codec_digests` of it. BlobError unless the bytes are here and can be the stage's snapshot.

        A host that lies is given up, and one that does not serve what it made, `again`.
        """
        live, ref, host = self._live, made.state, made.state.holders[0]
        numerics, optimizer = live.now.plan.numerics, live.session.spec.optimizer
        check = SnapshotCheck(live.now.programs[made.stage], live.dag, numerics, optimizer)
        try:
            most = check.most_bytes
            if ref.size > most:
                raise InputError(f"a snapshot of {ref.size} bytes, of this stage at most {most}")
            before_s = self._clock()
            path = await fetch_blob(live.transport, live.folder.blobs, live.run, ref, max_bytes=most)
            self._bytes_per_s = ref.size / max(1e-3, self._clock() - before_s)
            return await asyncio.to_thread(_check, check, path, ref)
        except InputError as error:
            live.exclude(host)
            live.lose(host, f"stage {made.stage}: {error}")
            raise BlobError(f"{host[-8:]}: {error}") from None
        except BlobError as error:
            if again:
                live.exclude(host, AFTER_LOSS_S)
                live.lose(host, f"stage {made.stage}: {error}")
            raise


def _same(a: StagePlacement, b: StagePlacement) -> bool:
    return (a.peer, a.incarnation) == (b.peer, b.incarnation)


def _check(check: SnapshotCheck, path: Path, ref: BlobRef) -> dict[str, bytes]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != ref.size:
            raise InputError(f"a snapshot of {size} bytes, {ref.size} were announced")
        check.check(file, size)
        file.seek(0)
        return codec_digests(file, size)


def new_manifest(live: Live, tick: int, numerics: Numerics, files: Sequence[StageFile], data_state: bytes) -> Manifest:
    """A manifest of this session at the present step."""
    return Manifest(
        run=live.run,
        opdag_hash=live.session.spec.opdag_hash,
        tick=tick,
        step=live.step,
        epoch=live.session.epoch,
        numerics=numerics,
        stages=tuple(files),
        data_state=data_state,
    )

"""Complete sets: every stage's snapshot at one mark, fetched, verified and recorded in the run folder (DESIGN 2)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics, StagePlacement
from fusion_p2p.snapshot_check import SnapshotCheck
from peer.blobs import fetch_blob
from peer.errors import BlobError, DiskFull
from peer.protocol import BlobRef, Mark, Snapshotted, Trim
from peer.trainer_assembly import Spawn
from peer.trainer_buddies import BuddyKeeper
from peer.trainer_host import HostLost
from peer.trainer_live import AFTER_LOSS_S, Live
from peer.trainer_state import Manifest, StageFile

MAX_HELD_BYTES = 1 << 30  # of released batches that no complete set covers yet
TRIES = 5


class SetKeeper:
    """`turn` is held while ticks are released; a mark holds it, so that it names a tick not yet released."""

    def __init__(self, live: Live, turn: asyncio.Lock, spawn: Spawn) -> None:
        self._live, self._turn, self._spawn = live, turn, spawn
        self._buddies = BuddyKeeper(live)
        self._saving = asyncio.Lock()

    @property
    def is_due(self) -> bool:
        """Whether a set should be made soon, lest what is kept for a replay grows out of bounds."""
        now = self._live.now
        ticks, interval = now.book.next_tick - now.newest.tick, now.plan.mark_interval
        return (
            bool(self._live.leaving)
            or self._live.change_due
            or bool(interval and ticks >= 2 * interval)
            or now.links.held_bytes() > MAX_HELD_BYTES
        )

    async def save(self, data_state: bytes) -> Manifest:
        """A complete set at the next tick, where the data stands at `data_state`; the newest if nothing came since.

        Training goes on while the bytes travel. BlobError when every attempt failed.
        """
        live = self._live
        async with self._saving:
            for attempt in range(TRIES):
                async with self._turn:
                    tick = live.now.book.next_tick
                    if live.now.newest.tick == tick:
                        self._let_go()
                        return live.now.newest
                    plan = live.now.plan
                    manifest = new_manifest(live, tick, plan.numerics, (), data_state)
                    marks = await self._mark(tick)
                try:
                    await asyncio.gather(*(self._fetch(s, again=attempt > 0) for s in marks))
                except DiskFull:
                    raise
                except BlobError as error:
                    live.say("waiting", f"the set at step {manifest.step} could not be fetched, trying again: {error}")
                    continue
                files = tuple(StageFile(stage=s.stage, hash=s.state.hash, size=s.state.size) for s in marks)
                await self._record(msgspec.structs.replace(manifest, stages=files))
                return live.now.newest
        raise BlobError(f"no set could be fetched in {TRIES} tries; the newest is of step {live.now.newest.step}")

    async def _record(self, manifest: Manifest) -> None:
        live = self._live
        await asyncio.to_thread(live.folder.save_set, manifest)
        await asyncio.to_thread(live.folder.forget_releases, manifest.tick)
        live.now.newest = manifest
        live.now.links.trim(manifest.tick)
        for p in live.now.plan.placement:
            try:
                await live.assembly.host(p.peer).send(Trim(run=live.run, stage=p.stage, tick=manifest.tick))
            except HostLost as lost:
                live.lose(lost.peer, lost.reason)
        live.say("saved", f"complete set at step {manifest.step}")
        self._let_go()
        self._spawn(self._buddies.spread(manifest, {p.stage: p.peer for p in live.now.plan.placement}))

    def _let_go(self) -> None:
        """Hosts that waited for a set may go: nothing of theirs is needed any more."""
        for peer, reason in list(self._live.leaving.items()):
            self._live.lose(peer, reason, moving=True)

    async def _mark(self, tick: int) -> list[Snapshotted]:
        """Every stage's snapshot at the boundary before `tick`, which is not released yet. Outlives repairs."""
        live = self._live

        async def one(p: StagePlacement) -> Snapshotted:
            made = await live.assembly.host(p.peer).mark(Mark(run=live.run, stage=p.stage, tick=tick))
            state = msgspec.structs.replace(made.state, holders=(p.peer,))  # nobody else is asked on its word
            return msgspec.structs.replace(made, state=state)

        while True:
            await live.whole.wait()
            answers = await asyncio.gather(*map(one, live.now.plan.placement), return_exceptions=True)
            snapshots = [a for a in answers if isinstance(a, Snapshotted)]
            if len(snapshots) == len(answers):
                return snapshots
            for error in answers:
                if isinstance(error, HostLost):
                    live.lose(error.peer, error.reason)
                elif isinstance(error, BaseException):
                    raise error

    async def _fetch(self, made: Snapshotted, *, again: bool) -> None:
        """BlobError unless the bytes are here and can be the stage's snapshot.

        A host that lies is given up, and one that does not serve what it made, `again`.
        """
        live, ref, host = self._live, made.state, made.state.holders[0]
        numerics, optimizer = live.now.plan.numerics, live.session.spec.optimizer
        check = SnapshotCheck(live.now.programs[made.stage], live.dag, numerics, optimizer)
        try:
            most = check.most_bytes
            if ref.size > most:
                raise InputError(f"a snapshot of {ref.size} bytes, of this stage at most {most}")
            path = await fetch_blob(
                live.transport,
                live.folder.blobs,
                live.run,
                ref,
                max_bytes=most,
                addresses=live.swarm.addresses,
            )
            await asyncio.to_thread(_check, check, path, ref)
        except InputError as error:
            live.exclude(host)
            live.lose(host, f"stage {made.stage}: {error}")
            raise BlobError(f"{host[-8:]}: {error}") from None
        except BlobError as error:
            if again:
                live.exclude(host, AFTER_LOSS_S)
                live.lose(host, f"stage {made.stage}: {error}")
            raise


def _check(check: SnapshotCheck, path: Path, ref: BlobRef) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != ref.size:
            raise InputError(f"a snapshot of {size} bytes, {ref.size} were announced")
        check.check(file, size)


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

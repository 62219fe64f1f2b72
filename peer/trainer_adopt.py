"""A trainer that starts again finds its stages where the last session left them (DESIGN section 2, "Fencing").

Volunteers keep stages for the lease and what they sent since the newest set; the run folder says where they are and
which ticks were released. The new session draws the same batches once more and offers them again: stages drop what
they have, and send again the losses and reports that nobody took. So nothing is computed twice, and no step is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.frame import Frame, StepHeader
from fusion_p2p.plan import Plan
from fusion_p2p.release import cut_batch, release
from fusion_p2p.split import split
from peer.trainer_live import Live
from peer.trainer_state import Hosts, Manifest, Released, RunFolder

Feed = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Replay:
    """The data from the newest set on, once more. `draw`: the next training batch, as `Trainer.release` takes it;
    `rewind`: back to the set."""

    draw: Callable[[], Feed]
    rewind: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Adopted:
    """`missing`: stage -> why it could not be adopted. `feeds`: of the ticks since the newest set."""

    plan: Plan
    missing: dict[int, str]
    feeds: Sequence[Feed]


async def adopt(live: Live, newest: Manifest, replay: Replay) -> Adopted | None:
    """The stages of the last session, where at least one still runs; None, said why, if all must be placed anew."""
    hosts = live.folder.hosts()
    if hosts is None or hosts.plan.numerics != newest.numerics:
        return None
    live.say("phase", "looking for the stages where they were")
    try:
        feeds = await asyncio.to_thread(_draw, live, newest, replay)
    except InputError as error:
        await _anew(live, replay, str(error))
        return None
    plan = msgspec.structs.replace(hosts.plan, number=hosts.plan.number + 1, epoch=live.session.epoch)
    for peer, known in hosts.addresses.items():
        live.swarm.addresses.setdefault(peer, known)
    live.assembly.addresses = live.swarm.addresses
    missing = await live.assembly.adopt(plan, live.refs(newest), newest.tick)
    if len(missing) == plan.numerics.stages:
        await _anew(live, replay, f"no stage is where it was: {missing[0]}")
        return None
    return Adopted(plan, missing, feeds)


async def _anew(live: Live, replay: Replay, why: str) -> None:
    live.say("notice", f"every stage is restored from the newest set: {why}")
    await asyncio.to_thread(replay.rewind)


def _draw(live: Live, newest: Manifest, replay: Replay) -> list[Feed]:
    """The batches of the ticks released since the set. InputError if they are not what they were."""
    entries, numerics = live.folder.released(newest.tick), newest.numerics
    programs = split(live.dag, numerics.cuts)
    if any(not e.training for e in entries):
        raise InputError("a loss was evaluated since, and its batches are gone")
    feeds = []
    for step, entry in enumerate(entries, newest.step):
        batch = replay.draw()
        sizes, parts = cut_batch(live.dag, batch, numerics.micro_batch_size, training=True)
        header = StepHeader(True, step, sizes)
        if digest(header, list(release(live.dag, programs, entry.tick, header, parts))) != entry.digest:
            raise InputError(f"the data of step {step} is not what it was")
        feeds.append(batch)
    return feeds


def digest(header: StepHeader, frames: Sequence[Frame]) -> bytes:
    """What makes a released tick the same: its header and every payload, in the order of sending."""
    h = hashlib.blake2b(msgspec.msgpack.encode(header), digest_size=16)
    for frame in frames:
        h.update(len(frame.payload).to_bytes(8, "little"))
        h.update(frame.payload)
    return h.digest()


def note_release(folder: RunFolder, tick: int, header: StepHeader, frames: Sequence[Frame]) -> None:
    """Blocks: it hashes and writes."""
    what = digest(header, frames)
    folder.note_release(Released(tick=tick, step=header.step, training=header.training, digest=what))


async def note_hosts(live: Live, plan: Plan) -> None:
    """Where the stages run from now on."""
    addresses = {p.peer: tuple(live.assembly.addresses.get(p.peer, ())) for p in plan.placement}
    await asyncio.to_thread(live.folder.save_hosts, Hosts(plan=plan, addresses=addresses))

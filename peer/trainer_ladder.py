"""The codecs of a run, measured on its own model at its start, where its first plan would compress at all.

A probe trains a copy for a few steps on the first batch, in a time box: models that would not fit it keep the default
ladder. What was measured is kept in the run folder. It only proposes: the numeric log says what holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fusion_p2p.adatopk import allowed_loss
from fusion_p2p.capture import Captured
from fusion_p2p.errors import InputError
from fusion_p2p.planner import Ladder
from fusion_p2p.probe import Measured, ladder, probe
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.workload import atoms
from peer.offers import DeviceOffer
from peer.placement import make_plan
from peer.trainer_live import Live
from peer.trainer_state import write_atomic

log = logging.getLogger(__name__)

FILE = "ladder.json"
STEPS = 3  # of the probe, a micro-batch each
CORE_FLOPS_PER_S = 30e9  # about: what a model takes at least, before it is tried; its dense steps then say it
CODECS = 8  # about as many as the default ladder has


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderProbe:
    """Called on a thread. `example`: one micro-batch of the run's data. `limit_s`: seconds that it may take."""

    captured: Captured
    example: Any
    optimizer: OptimizerSpec
    micro_batch_size: int
    seed: int
    folder: Path
    limit_s: float
    clock: Callable[[], float] = field(default=time.perf_counter)

    @property
    def fits(self) -> bool:
        """Whether the model is small enough to try; if not, nothing of it need be kept for that."""
        parts = atoms(self.captured.opdag, self.micro_batch_size)
        work = sum(a.forward_flops + a.backward_flops for a in parts) * STEPS * (1 + CODECS)
        return work / CORE_FLOPS_PER_S <= self.limit_s

    def __call__(self) -> Ladder | None:
        """The ladder as measured, None where the default has to do."""
        try:
            measured = probe(
                self.captured,
                [self.example] * STEPS,
                optimizer=self.optimizer,
                micro_batches=1,
                micro_batch_size=self.micro_batch_size,
                clock=self.clock,
                seed=self.seed,
                limit_s=self.limit_s,
            )
        except InputError as error:  # too few parts to cut
            log.info("codecs are not measured: %s", error)
            return None
        if not measured:
            return None
        write_atomic(self.folder / FILE, msgspec.json.encode(measured))
        return ladder(measured)


async def ladder_of_run(live: Live, offers: Sequence[DeviceOffer], *, pinned: bool) -> Ladder | None:
    """As an earlier session measured it; else measured now, if a new plan would compress a link with the default."""
    o = live.options
    found = await asyncio.to_thread(kept, live.folder.root)
    if found is not None or pinned or o.probe is None or allowed_loss(o.compression) is None:
        return found
    try:
        plan = await asyncio.to_thread(make_plan, live.atoms, offers, live.request)
    except InputError:  # said when the plan is made for good
        return None
    if not plan.numerics.codecs:
        return None
    live.say("phase", "measuring codecs on this model")
    found = await asyncio.to_thread(o.probe)
    if found is None:
        live.say("phase", "measuring codecs would take too long here: the default figures count")
    return found


def kept(folder: Path) -> Ladder | None:
    """What an earlier session of the run measured; None where nothing readable is."""
    try:
        return ladder(msgspec.json.decode((folder / FILE).read_bytes(), type=tuple[Measured, ...]))
    except (OSError, msgspec.DecodeError, RecursionError, InputError):
        return None

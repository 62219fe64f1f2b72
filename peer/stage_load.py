"""What stages take of a device, by the planner's own estimate: memory, work, bytes sent. Pure.

A volunteer's trial step knows better; refusals carry its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fusion_p2p.outboxes import log_bytes
from fusion_p2p.plan import Plan
from fusion_p2p.planner import from_atoms
from fusion_p2p.planner.network import MEMORY_SHARE
from fusion_p2p.settings import StateBytes

if TYPE_CHECKING:
    from fusion_p2p.workload import Atom


class Load:
    """Stages of these atoms, each named by its first atom and the one after its last."""

    def __init__(
        self, atoms: Sequence[Atom], micro_batches: int, state: StateBytes, *, recompute: bool = False
    ) -> None:
        self.n = len(atoms)
        self._micro_batches = micro_batches
        self._workload = from_atoms("model", atoms, samples=1, recompute=recompute, state=state)
        self._cuts = [*((a.cut_bytes, a.cut_weight_bytes) for a in atoms), (0, 0)]
        work = [(a.forward_flops + a.backward_flops) * a.heavier for a in atoms]
        self._flops = np.concatenate([[0.0], np.cumsum(work)])

    def window(self, a: int, b: int, memory_bytes: int, wanted: int) -> int:
        """Micro-batches in flight: as many as `wanted`, fewer where memory is short."""
        while wanted > 1 and self.bytes(a, b, wanted) > MEMORY_SHARE * memory_bytes:
            wanted -= 1
        return wanted

    def flops(self, a: int, b: int) -> float:
        return float(self._flops[b] - self._flops[a])

    def sent_bytes(self, a: int, b: int) -> int:
        """What atoms a..b-1 send in a step, dense: activations up, gradients down, shared weights either way."""
        ends = [self._cuts[at] for at in (a, b) if 0 < at < self.n]
        return 1 + sum(self._micro_batches * activations + shared for activations, shared in ends)

    def bytes(self, a: int, b: int, window: int) -> int:
        """Weights, gradients, optimizer state, activations, workspace, frames under way, the snapshot's copy."""
        return math.ceil(self._workload.stage_bytes(a, b, window).total)

    def set_bytes(self, a: int, b: int) -> float:
        """A snapshot, on disk or under way to whoever keeps it."""
        return self._workload.stage_bytes(a, b, 1).snapshot

    def may_log(self, a: int, b: int, mark_interval: int, memory_bytes: int, held_bytes: float) -> bool:
        """Whether an executor's outboxes keep what the stage sends between two marks, beside `held_bytes` of stages."""
        need = mark_interval * self.sent_bytes(a, b)
        return 0 < need <= log_bytes(memory_bytes) and held_bytes + need <= memory_bytes


def stage_bytes(plan: Plan, stage: int, atoms: Sequence[Atom], state: StateBytes) -> int:
    """What this planner thinks that a stage needs; a volunteer's trial step knows better."""
    load = load_of(plan, atoms, state)
    bounds = (0, *plan.numerics.cuts, load.n)
    return load.bytes(bounds[stage], bounds[stage + 1], plan.host(stage).window)


def load_of(plan: Plan, atoms: Sequence[Atom], state: StateBytes) -> Load:
    """The stages that this plan may be cut into."""
    return Load(atoms, plan.numerics.micro_batches, state, recompute=plan.numerics.recompute)


def mib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

"""What stages take of a device, by the planner's own estimate: memory, work, bytes sent. Pure.

A volunteer's trial step knows better; refusals carry its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusion_p2p.plan import Plan
from fusion_p2p.planner.network import MEMORY_SHARE

if TYPE_CHECKING:
    from fusion_p2p.workload import Atom


class Load:
    """Prefix sums over the atoms."""

    def __init__(self, atoms: Sequence[Atom], micro_batches: int, state_factor: float) -> None:
        self.n = len(atoms)
        self._micro_batches = micro_batches
        self._cuts = [*((a.cut_bytes, a.cut_weight_bytes) for a in atoms), (0, 0)]
        self._flops, self._state, self._activations = [0.0], [0.0], [0]
        for a in atoms:
            fixed = max(0, a.weight_bytes - 4 * a.parameters)  # frozen weights and buffers are there once
            self._flops.append(self._flops[-1] + a.forward_flops + a.backward_flops)
            self._state.append(self._state[-1] + 4 * a.parameters * state_factor + fixed)
            self._activations.append(self._activations[-1] + a.stash_bytes)

    def window(self, a: int, b: int, memory_bytes: int, wanted: int) -> int:
        """Micro-batches in flight: as many as `wanted`, fewer where memory is short."""
        stash = self._activations[b] - self._activations[a]
        room = MEMORY_SHARE * memory_bytes - (self._state[b] - self._state[a])
        return max(1, min(wanted, int(room / stash))) if stash else wanted

    def flops(self, a: int, b: int) -> float:
        return self._flops[b] - self._flops[a]

    def sent_bytes(self, a: int, b: int) -> int:
        """What atoms a..b-1 send in a step, dense: activations up, gradients down, shared weights either way."""
        ends = [self._cuts[at] for at in (a, b) if 0 < at < self.n]
        return 1 + sum(self._micro_batches * activations + shared for activations, shared in ends)

    def bytes(self, a: int, b: int, window: int) -> int:
        return math.ceil(self._state[b] - self._state[a]) + (self._activations[b] - self._activations[a]) * window


def stage_bytes(plan: Plan, stage: int, atoms: Sequence[Atom], state_factor: float) -> int:
    """What this planner thinks that a stage needs; a volunteer's trial step knows better."""
    load = Load(atoms, plan.numerics.micro_batches, state_factor)
    bounds = (0, *plan.numerics.cuts, load.n)
    return load.bytes(bounds[stage], bounds[stage + 1], plan.host(stage).window)


def mib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

"""Hyperparameters as data (DESIGN section 2): what a volunteer is told instead of code."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Learning-rate factor as a pure function of the 0-based step; `kind`: constant, linear or cosine.

    `warmup` steps rise linearly from 1/warmup to 1; then linear or cosine decay to `floor` at `total` steps.
    """

    kind: str = "constant"
    warmup: int = 0
    total: int = 0
    floor: float = 0.0


class WeightDecayGroup(msgspec.Struct, frozen=True):
    """Parameters whose name matches the glob `pattern` use this weight decay; the first match wins."""

    pattern: str
    weight_decay: float


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "adamw" or "sgd". Semantics are those of the torch.optim class of that name."""

    kind: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    schedule: Schedule = Schedule()
    groups: tuple[WeightDecayGroup, ...] = ()
    clip_norm: float | None = None


class StateBytes(NamedTuple):
    """Bytes per trainable parameter. `resident`: weight, gradient, optimizer state; `snapshot`: the copy taken at a
    mark, which has no gradient."""

    resident: float
    snapshot: float


ADAMW_BYTES = StateBytes(16.0, 12.0)


def state_bytes(spec: OptimizerSpec) -> StateBytes:
    """What a parameter takes under this optimizer, all of it float32."""
    if spec.kind == "adamw":
        return ADAMW_BYTES
    slots = 1 if spec.momentum else 0
    return StateBytes(4.0 * (2 + slots), 4.0 * (1 + slots))

"""What a run tells whoever watches it: a live view, the logs, the report. Data only; a sink takes each as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from fusion_p2p.plan import Plan
from peer.plain import one_line

MAX_TEXT = 2000


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. `step` counts from 0; `step_time_s` is from the step before it to this one."""

    step: int
    loss: float
    step_time_s: float
    samples: int
    tokens: int = 0  # elements of the largest integer input; 0 where the model reads none
    stages: dict[int, tuple[float, float]] = {}  # stage -> seconds computed and waited, by its own report
    cuts: dict[str, tuple[float, float]] = {}  # "src-dst" -> root mean square of the activation, gradient's bias
    sent: dict[int, str] = {}  # stage -> hash of what it sent, hex

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_time_s if self.step_time_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s if self.step_time_s > 0 else 0.0


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The mean loss over `samples` held-out samples after `step` steps."""

    step: int
    loss: float
    samples: int


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: phase, plan, refused, lost, recovered, saved, waiting, gate, resumed, stopped, wanted (volunteers are),
    suspect (a wild frame is computed again), quarantined (its sender is not trusted again). `text` is one line."""

    kind: str
    text: str
    time_s: float  # unix
    step: int = 0
    peer: str = ""
    stage: int = -1
    wanted_peers: int = 0  # more volunteers that the run waits for, now
    wanted_bytes: int = 0  # device memory that each of them should offer

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "text", one_line(self.text, MAX_TEXT))


class PlanAdopted(msgspec.Struct, frozen=True):
    plan: Plan


class LinkBytes(msgspec.Struct, frozen=True):
    """Bytes sent so far per link, "src-dst" by stage number, -1 the trainer; what each stage waits for.

    `held_up_s`: seconds that a stage has stood still so far because what it sent was not taken. `differing`: frames
    that came again with other bytes; with none the run is exact to the bit, else to rounding.
    """

    sent: dict[str, int]
    waiting: dict[int, str]
    held_up_s: dict[int, float] = {}
    differing: int = 0


Happening: TypeAlias = StepResult | EvalResult | RunEvent | PlanAdopted | LinkBytes
Sink: TypeAlias = Callable[[Happening], None]

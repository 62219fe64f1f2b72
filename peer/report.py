"""The report of a run: a sink that remembers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from fusion_p2p.plan import Plan
from peer.events import EvalResult, Happening, LinkBytes, PlanAdopted, RunEvent, StepResult

MOST_EVENTS = 10_000  # the newest; what a run of months or a talkative swarm says must not fill the memory


class Report:
    """Collects what happened; `as_dict` is what `--report` writes."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.evals: list[EvalResult] = []
        self.events: deque[RunEvent] = deque(maxlen=MOST_EVENTS)
        self._forgotten = 0
        self.plan: Plan | None = None
        self.bytes_sent: dict[str, int] = {}
        self.differing = 0

    def __call__(self, happening: Happening) -> None:
        match happening:
            case StepResult():  # a run may take millions: not what each stage said
                self.steps.append(msgspec.structs.replace(happening, stages={}, cuts={}, sent={}))
            case EvalResult():
                self.evals.append(happening)
            case RunEvent():
                self._forgotten += len(self.events) == MOST_EVENTS
                self.events.append(happening)
            case PlanAdopted(plan=plan):
                self.plan = plan
            case LinkBytes(sent=sent, differing=differing):
                self.bytes_sent, self.differing = dict(sent), differing

    def as_dict(self, weights: str) -> dict[str, Any]:
        return {
            "steps": [{"step": s.step, "loss": s.loss, "step_time_s": s.step_time_s} for s in self.steps],
            "evals": [msgspec.to_builtins(e) for e in self.evals],
            "tokens_per_s": rate(self.steps, "tokens"),
            "samples_per_s": rate(self.steps, "samples"),
            "plan": msgspec.to_builtins(self.plan),
            "bytes_sent": self.bytes_sent,
            "exact_to": "rounding" if self.differing else "bit",
            "differing_frames": self.differing,
            "events": [msgspec.to_builtins(e) for e in self.events],
            "events_left_out": self._forgotten,
            "weights_blake2b": weights,
        }


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `Run.train` did. Rates leave out the first step, which fills the pipeline."""

    steps: int
    first_loss: float
    last_loss: float
    seconds: float
    tokens_per_s: float
    samples_per_s: float


def summary(done: Sequence[StepResult], seconds: float) -> TrainSummary:
    """`seconds`: by the wall clock, all of it."""
    return TrainSummary(
        steps=len(done),
        first_loss=done[0].loss if done else float("nan"),
        last_loss=done[-1].loss if done else float("nan"),
        seconds=seconds,
        tokens_per_s=rate(done, "tokens"),
        samples_per_s=rate(done, "samples"),
    )


def rate(steps: Sequence[StepResult], per_step: str) -> float:
    """`per_step` ("tokens" or "samples") per second over all steps but the first, which fills the pipeline."""
    counted = steps[1:] or steps
    seconds = sum(s.step_time_s for s in counted)
    return float(sum(getattr(s, per_step) for s in counted) / seconds) if seconds > 0 else 0.0

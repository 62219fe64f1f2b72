"""A run on a lab, watched: step times beside the plan's prediction, bytes by link, what stages did with their time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fusion_p2p.plan import Plan
from peer.api import Run
from peer.events import StepResult
from peer.lab.lab_swarm import LabSwarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`steps` are those counted: the first fills the pipeline and warms up. `link_bytes` ("A-B" by site, on the wire)
    and `cpu_s` (by peer) are of the counted steps; `stage_s`: mean seconds that a stage computed and waited in one."""

    plan: Plan
    names: dict[str, str]  # peer id -> the testbed's name
    steps: tuple[StepResult, ...]
    link_bytes: dict[str, int]
    cpu_s: dict[str, float]
    first_step_s: float

    @property
    def step_s(self) -> float:
        return statistics.median(s.step_time_s for s in self.steps)

    @property
    def predicted_s(self) -> float:
        return self.plan.prediction.step_time_s if self.plan.prediction else float("nan")

    @property
    def stage_s(self) -> dict[int, tuple[float, float]]:
        stages = sorted({k for s in self.steps for k in s.stages})
        return {
            k: (
                statistics.fmean(s.stages[k][0] for s in self.steps if k in s.stages),
                statistics.fmean(s.stages[k][1] for s in self.steps if k in s.stages),
            )
            for k in stages
        }

    def as_dict(self) -> dict[str, Any]:
        tokens = sum(s.tokens or s.samples for s in self.steps)
        return {
            "step_s": self.step_s,
            "step_times_s": [s.step_time_s for s in self.steps],
            "first_step_s": self.first_step_s,
            "predicted_s": self.predicted_s,
            "lower_bound_s": self.plan.prediction.lower_bound_s if self.plan.prediction else None,
            "tokens_per_s": tokens / sum(s.step_time_s for s in self.steps),
            "losses": [s.loss for s in self.steps],
            "hosts": [self.names.get(p.peer, p.peer) for p in self.plan.placement],
            "cuts": list(self.plan.numerics.cuts),
            "codecs": {f"{c.src}-{c.dst}": c.codec for c in self.plan.numerics.codecs},
            "stage_s": {str(k): list(v) for k, v in self.stage_s.items()},
            "link_bytes_per_step": {k: v / len(self.steps) for k, v in self.link_bytes.items()},
            "cpu_s_per_step": {k: v / len(self.steps) for k, v in self.cpu_s.items()},
            "plan": msgspec.to_builtins(self.plan),
        }

    def lines(self) -> list[str]:
        """For people."""
        off = self.step_s / self.predicted_s if self.predicted_s else float("nan")
        out = [
            f"step {self.step_s:.3g} s (median of {len(self.steps)}), predicted {self.predicted_s:.3g} s: "
            f"{off:.2f} of it; first step {self.first_step_s:.3g} s"
        ]
        for p in self.plan.placement:
            busy, waited = self.stage_s.get(p.stage, (0.0, 0.0))
            name = self.names.get(p.peer, p.peer[-8:])
            out.append(f"  stage {p.stage} on {name:4} computes {busy:.3g} s a step, waits {waited:.3g} s")
        sent = {k: v for k, v in self.link_bytes.items() if v}
        out += [f"  {k:>8}: {v / len(self.steps) / 1e3:,.0f} kB a step on the wire" for k, v in sent.items()]
        return out


def measured_run(
    run: Run, swarm: LabSwarm, steps: int, *, tell: Callable[[StepResult], None] = lambda step: None
) -> Measured:
    """Train an open run for one step and then `steps` that count."""
    lab = swarm.lab
    first: StepResult | None = None
    counted: list[StepResult] = []
    sent, used = lab.sent_bytes(), lab.used_s()
    for step in run.steps(steps + 1):
        tell(step)
        if first is None:
            first = step
            sent, used = lab.sent_bytes(), lab.used_s()
        else:
            counted.append(step)
    return Measured(
        plan=run.plan(),
        names=dict(swarm.names),
        steps=tuple(counted),
        link_bytes={k: v - sent.get(k, 0) for k, v in lab.sent_bytes().items()},
        cpu_s={k: v - used.get(k, 0.0) for k, v in lab.used_s().items()},
        first_step_s=first.step_time_s if first else float("nan"),
    )

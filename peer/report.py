"""The report of a run: a sink that remembers, and the hash by which two runs' weights are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from fusion_p2p.plan import Plan
from peer.events import EvalResult, Happening, LinkBytes, PlanAdopted, RunEvent, StepResult


def weights_blake2b(state: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b-256 hex over (name, dtype, shape, bytes) of every tensor, sorted by name; lengths keep parts apart."""
    h = hashlib.blake2b(digest_size=32)
    for name in sorted(state):
        t = state[name].detach().cpu().contiguous()
        head = f"{name}\0{str(t.dtype).removeprefix('torch.')}\0{','.join(map(str, t.shape))}\0".encode()
        h.update(len(head).to_bytes(8, "little") + head)
        h.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


class Report:
    """Collects what happened; `as_dict` is what `--report` writes."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.evals: list[EvalResult] = []
        self.events: list[RunEvent] = []
        self.plan: Plan | None = None
        self.bytes_sent: dict[str, int] = {}

    def __call__(self, happening: Happening) -> None:
        match happening:
            case StepResult():
                self.steps.append(happening)
            case EvalResult():
                self.evals.append(happening)
            case RunEvent():
                self.events.append(happening)
            case PlanAdopted(plan=plan):
                self.plan = plan
            case LinkBytes(sent=sent):
                self.bytes_sent = dict(sent)

    def rate(self, per_step: str) -> float:
        """`per_step` ("tokens" or "samples") per second over all steps but the first, which fills the pipeline."""
        counted = self.steps[1:] or self.steps
        seconds = sum(s.step_time_s for s in counted)
        return float(sum(getattr(s, per_step) for s in counted) / seconds) if seconds > 0 else 0.0

    def as_dict(self, weights: str) -> dict[str, Any]:
        return {
            "steps": [{"step": s.step, "loss": s.loss, "step_time_s": s.step_time_s} for s in self.steps],
            "evals": [msgspec.to_builtins(e) for e in self.evals],
            "tokens_per_s": self.rate("tokens"),
            "samples_per_s": self.rate("samples"),
            "plan": msgspec.to_builtins(self.plan),
            "bytes_sent": self.bytes_sent,
            "events": [msgspec.to_builtins(e) for e in self.events],
            "weights_blake2b": weights,
        }

"""What a run's watchers want to know beyond its progress: where each stage's time goes, what each link carries a step.

Pure: fed with happenings, asked for records.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from dht import records
from fusion_p2p.codec import Direction, parse
from fusion_p2p.frame import TRAINER
from fusion_p2p.plan import Plan
from peer.events import LinkBytes, StepResult

_WINDOW = 4  # steps over which a link's bytes a step are taken
_SAMPLE = (4, 256, 256)  # the shape at which a codec's ratio is told
_WAIT_CHARS = 48
_WHY_CHARS = 120
_REASON = re.compile(r"link (\d+)-(\d+): [^,]+, (.+)")  # as adatopk words them in a plan's reasons


class _Mark(NamedTuple):
    """What a link's sender had said when step `step` was the newest."""

    step: int
    bytes: int
    held_up_s: float


class Figures:
    """Holds what the newest step and status reports said. A new plan starts anew.

    Stages report every few seconds, not every step: what a link carries a step is told from one report of its sender
    to a later one, `_WINDOW` steps apart at least.
    """

    def __init__(self) -> None:
        self._step: StepResult | None = None
        self._sent: dict[str, int] = {}
        self._waiting: dict[int, str] = {}
        self._marks: dict[str, _Mark] = {}
        self._per_step: dict[str, int] = {}
        self._held_up_per_step_s: dict[int, float] = {}

    def take(self, happening: StepResult | LinkBytes) -> None:
        if isinstance(happening, StepResult):
            self._step = happening
            return
        self._waiting = dict(happening.waiting)
        step = self._step.step if self._step is not None else -1
        for key, count in happening.sent.items():
            if count == self._sent.get(key):
                continue
            src = int(key[: key.index("-", 1)])
            now = _Mark(step, count, happening.held_up_s.get(src, 0.0))
            mark = self._marks.setdefault(key, now)
            if step < mark.step or count < mark.bytes:
                self._marks[key] = now
            elif step - mark.step >= _WINDOW:
                steps = step - mark.step
                self._per_step[key] = (count - mark.bytes) // steps
                self._held_up_per_step_s[src] = max(0.0, now.held_up_s - mark.held_up_s) / steps
                self._marks[key] = now
        self._sent = dict(happening.sent)

    def adopt(self) -> None:
        """Another plan holds: what was measured under the last one says nothing of it."""
        self._marks, self._per_step, self._held_up_per_step_s, self._waiting = {}, {}, {}, {}

    def links(self, plan: Plan) -> tuple[records.LinkBytes, ...]:
        """Every link that has carried anything, by its ends."""
        codecs = {(c.src, c.dst): c.codec for c in plan.numerics.codecs}
        why = codec_reasons(plan)
        found = []
        for key, count in sorted(self._sent.items()):
            at = key.index("-", 1)
            a, b = int(key[:at]), int(key[at + 1 :])
            codec = codecs.get((min(a, b), max(a, b)), "dense")
            size = self._per_step.get(key, 0)
            dense = int(size * ratio(codec, forward=a < b)) if TRAINER not in (a, b) else size
            reason = records.clip(why.get((min(a, b), max(a, b)), ""), _WHY_CHARS)
            found.append(records.LinkBytes(a, b, count, codec[:32], size, dense, reason))
        return tuple(found)

    def stages(self, plan: Plan) -> tuple[records.StageFigures, ...]:
        """By stage: seconds of the newest step where its report has come. A stage's own report counts as waiting also
        the time that it was held up while sending; here the two are told apart."""
        times = self._step.stages if self._step is not None else {}
        out = []
        for p in plan.placement:
            compute_s, wait_s = times.get(p.stage, (None, None))
            send_s = self._held_up_per_step_s.get(p.stage)
            if wait_s is not None and send_s is not None:
                send_s = min(send_s, wait_s)
                wait_s -= send_s
            waiting = self._waiting.get(p.stage, "")[:_WAIT_CHARS]
            out.append(records.StageFigures(p.stage, p.replica, compute_s, send_s, wait_s, waiting))
        return tuple(out)


def codec_reasons(plan: Plan) -> dict[tuple[int, int], str]:
    """Why each pair of stages has its codec, as the plan says."""
    found = (_REASON.fullmatch(reason) for reason in plan.reasons)
    return {(int(m[1]), int(m[2])): m[3] for m in found if m is not None}


def ratio(codec: str, *, forward: bool) -> float:
    """Bytes of float32 over the codec's own estimate of its bytes."""
    direction: Direction = "forward" if forward else "backward"
    dense = 4.0
    for size in _SAMPLE:
        dense *= size
    return dense / max(1.0, parse(codec).bytes_estimate(_SAMPLE, torch.float32, direction))

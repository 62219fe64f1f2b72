"""What a run's watchers want to know beyond its progress: where each stage's time goes, what each link carries a step.

Pure: fed with happenings, asked for records.
"""

from __future__ import annotations

import re

import torch

from dht import records
from fusion_p2p.codec import Direction, parse
from fusion_p2p.frame import TRAINER
from fusion_p2p.plan import Plan
from peer.events import LinkBytes, StepResult

_LINK = re.compile(r"(-?\d+)-(-?\d+)")
_WINDOW = 4  # steps over which a link's bytes a step are taken
_SAMPLE = (4, 256, 256)  # the shape at which a codec's ratio is told
_WAIT_CHARS = 48


class Figures:
    """Holds what the newest step and status reports said. A new plan starts anew."""

    def __init__(self) -> None:
        self._step: StepResult | None = None
        self._sent: dict[str, int] = {}
        self._waiting: dict[int, str] = {}
        self._held_up_s: dict[int, float] = {}
        self._mark: tuple[int, dict[str, int], dict[int, float]] | None = None
        self._per_step: dict[str, int] = {}
        self._held_up_per_step_s: dict[int, float] = {}

    def take(self, happening: StepResult | LinkBytes) -> None:
        if isinstance(happening, LinkBytes):
            self._sent, self._waiting = dict(happening.sent), dict(happening.waiting)
            self._held_up_s = dict(happening.held_up_s)
            return
        self._step = happening
        if self._mark is None or happening.step < self._mark[0]:
            self._mark = (happening.step, self._sent, self._held_up_s) if self._sent else None
        elif happening.step - self._mark[0] >= _WINDOW:
            first, sent, held = self._mark
            steps = happening.step - first
            self._per_step = {k: max(0, v - sent.get(k, v)) // steps for k, v in self._sent.items()}
            self._held_up_per_step_s = {s: max(0.0, v - held.get(s, v)) / steps for s, v in self._held_up_s.items()}
            self._mark = (happening.step, self._sent, self._held_up_s)

    def adopt(self) -> None:
        """Another plan holds: what was measured under the last one says nothing of it."""
        self._mark, self._per_step, self._held_up_per_step_s, self._waiting = None, {}, {}, {}

    def links(self, plan: Plan) -> tuple[records.LinkBytes, ...]:
        """Every link that has carried anything, by its ends."""
        codecs = {(c.src, c.dst): c.codec for c in plan.numerics.codecs}
        found = []
        for key, count in sorted(self._sent.items()):
            if (m := _LINK.fullmatch(key)) is None:
                continue
            a, b = int(m[1]), int(m[2])
            codec = codecs.get((min(a, b), max(a, b)), "dense")
            size = self._per_step.get(key, 0)
            dense = int(size * ratio(codec, forward=a < b)) if TRAINER not in (a, b) else size
            found.append(records.LinkBytes(a, b, count, codec[:32], size, dense))
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


def ratio(codec: str, *, forward: bool) -> float:
    """Bytes of float32 over the codec's own estimate of its bytes."""
    direction: Direction = "forward" if forward else "backward"
    dense = 4.0
    for size in _SAMPLE:
        dense *= size
    return dense / max(1.0, parse(codec).bytes_estimate(_SAMPLE, torch.float32, direction))

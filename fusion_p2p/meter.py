"""What one end of a cut measures in a training step: bytes, codec time, the activation's norm, the gradient's bias.

Norms, bytes and biases are functions of the step's frames alone, so a stage that is rebuilt measures the same; seconds
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion_p2p.codec import Aux, Codec, FrameKey
from fusion_p2p.frame import CutReport
from fusion_p2p.split import Edge


@dataclass(slots=True)
class _Sums:
    sent_bytes: int = 0
    elements: int = 0
    codec_s: float = 0.0
    rms: float = 0.0
    kept: float = 0.0  # <gradient, what the other end decodes>
    power: float = 0.0  # <gradient, gradient>


class Meter:
    """Sums up a training tick of one stage, by pair of stages; `take` ends it."""

    def __init__(self, stage: int, clock: Callable[[], float]) -> None:
        self._stage, self._clock = stage, clock
        self._sums: dict[tuple[int, int], _Sums] = {}

    def clock(self) -> float:
        return self._clock()

    def encoded(self, e: Edge, x: torch.Tensor, payload: bytes, since_s: float) -> None:
        """This end encoded `x` and began at `since_s`."""
        sums = self._of(e)
        sums.sent_bytes += len(payload)
        sums.elements += x.numel()
        sums.codec_s += self._clock() - since_s
        if e.src == self._stage and x.numel() and x.is_floating_point():
            sums.rms = max(sums.rms, float(torch.linalg.vector_norm(x)) / x.numel() ** 0.5, key=_worst)

    def decoded(self, e: Edge, since_s: float) -> None:
        self._of(e).codec_s += self._clock() - since_s

    def gradient(self, e: Edge, g: torch.Tensor, payload: bytes, codec: Codec, aux: Aux, key: FrameKey) -> None:
        """Compare a gradient with what the other end makes of it; once a step is enough for a bias."""
        if codec.exact(tuple(g.shape), g.dtype):
            return
        there = codec.mirror().decode_backward(payload, tuple(g.shape), g.dtype, aux, key)
        flat, sums = g.detach().reshape(-1).to(torch.float32), self._of(e)
        sums.kept += float(flat @ there.reshape(-1).to(torch.float32))
        sums.power += float(flat @ flat)

    def take(self) -> tuple[CutReport, ...]:
        """The tick's reports, in order of the pairs; the next one starts at nothing."""
        found, self._sums = self._sums, {}
        return tuple(
            CutReport(
                src,
                dst,
                s.sent_bytes,
                s.elements,
                s.codec_s,
                s.rms,
                s.kept / s.power - 1 if s.power > 0 else 0.0,
            )
            for (src, dst), s in sorted(found.items())
        )

    def _of(self, e: Edge) -> _Sums:
        return self._sums.setdefault((e.src, e.dst), _Sums())


def _worst(x: float) -> float:
    """NaN is worse than anything."""
    return x if x == x else float("inf")

"""Frames that a model hardly ever makes: not finite, or far larger than those before (DESIGN section 2, "Suspicion").

The stage that receives one stops before it and names it; what follows from that is `peer`'s: another host computes it
again, and the verdict on what the model itself made is the optimizer's (skip on NaN). The bound is a function of the
frames that the stage took since it was made, and `Watched` hands it on to the stage that is made after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from fusion_p2p.suspicion import FrameId, Suspicion, Watched

FACTOR = 100.0  # times the running mean of the norms of a stream's frames
BESIDE = 1e-3  # of the largest such mean of what comes from the same stage: below it norms may do what they like
WARM_UP = 8  # frames before the mean counts
_SHARE = 0.1  # of the newest norm in the mean


class Guard:
    """Looks at every tensor that comes in, once."""

    def __init__(self, watched: Iterable[Watched] = ()) -> None:
        self._watched = {w.frame: w.bound for w in watched}
        self._mean: dict[tuple[int, int, int], tuple[int, float]] = {}  # (kind, src, value) -> frames, mean norm

    def look(self, frame: FrameId, payload: bytes, x: torch.Tensor) -> Suspicion | None:
        """What is to be said of this frame, or None; then it counts from now on."""
        norm = float(torch.linalg.vector_norm(torch.view_as_real(x) if x.is_complex() else x, dtype=torch.float32))
        stream = frame.kind, frame.src, frame.value
        count, mean = self._mean.get(stream, (0, 0.0))
        usual = max(mean, BESIDE * self._largest(frame))
        bound = self._watched.get(frame, FACTOR * usual if count >= WARM_UP and usual > 0 else math.inf)
        if frame in self._watched or not math.isfinite(norm) or norm > bound:
            return Suspicion(frame, hashlib.blake2b(payload, digest_size=16).digest(), norm, bound)
        self._mean[stream] = count + 1, norm if not count else mean + _SHARE * (norm - mean)
        return None

    def _largest(self, frame: FrameId) -> float:
        """A cut through attention sends a gradient that is all rounding beside one that is not."""
        beside = (mean for (kind, src, _), (_, mean) in self._mean.items() if (kind, src) == (frame.kind, frame.src))
        return max(beside, default=0.0)

    def passed(self, suspicion: Suspicion) -> None:
        """It is the model's own: a norm that was beyond the bound is the new measure."""
        frame, norm = suspicion.frame, suspicion.norm
        self._watched.pop(frame, None)
        if math.isfinite(norm):
            stream = frame.kind, frame.src, frame.value
            count, mean = self._mean.get(stream, (0, 0.0))
            self._mean[stream] = count + 1, max(norm, mean)

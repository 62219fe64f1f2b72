"""The k elements of largest magnitude, exactly, in little more than one pass; equal magnitudes: the lower index first.

A threshold guessed below the k-th magnitude leaves few candidates, among which the k are found exactly. The guess is
the last micro-batch's threshold, else a sample's; whatever the guess, the answer is the same, so it needs no
bookkeeping for replays.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_CHUNK = 1 << 16  # elements; abs and mask of a chunk stay in the cache
_SAMPLE = 1 << 15


def _candidates(flat: np.ndarray, threshold: np.float32, limit: int) -> np.ndarray | None:
    """Ascending indices with |x| >= threshold; None once there are more than `limit`."""
    found, total = [], 0
    magnitude = np.empty(min(_CHUNK, flat.size), dtype=np.float32)
    mask = np.empty(magnitude.size, dtype=bool)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        np.abs(part, out=magnitude[: part.size])
        np.greater_equal(magnitude[: part.size], threshold, out=mask[: part.size])
        index = np.flatnonzero(mask[: part.size])
        total += index.size
        if total > limit:
            return None
        found.append(index + start)
    return np.concatenate(found)


def _prime_at_most(n: int) -> int:
    while n > 3 and any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
        n -= 1
    return max(n, 1)


def sampled_threshold(flat: np.ndarray, k: int) -> np.float32:
    """A magnitude a little below the k-th largest, very probably. The stride is prime, so that it meets every
    channel (one that divides the width would see a few)."""
    stride = _prime_at_most(flat.size // _SAMPLE)
    sample = np.abs(flat[::stride])
    rank = sample.size * k / flat.size
    rank = min(sample.size, math.ceil(rank + 3 * math.sqrt(rank) + 3))
    return np.float32(np.partition(sample, sample.size - rank)[sample.size - rank])


def select(flat: torch.Tensor, k: int, guess: float | None = None) -> tuple[torch.Tensor, float]:
    """(ascending int64 indices of the k largest magnitudes of a finite float32 vector, the least magnitude kept)."""
    if flat.device.type != "cpu":
        return _select_torch(flat, k)
    x = flat.detach().numpy()
    candidates = None
    if guess is not None:
        candidates = _candidates(x, np.float32(guess), 2 * k + 1024)
    if candidates is None or candidates.size < k:
        candidates = _candidates(x, sampled_threshold(x, k), 4 * k + 4096)
    if candidates is None or candidates.size < k:
        candidates = np.arange(x.size)
    magnitude = np.abs(x[candidates])
    if candidates.size == k:
        return torch.from_numpy(candidates), float(magnitude.min())
    least = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    keep = magnitude > least
    ties = np.flatnonzero(magnitude == least)
    keep[ties[: k - int(np.count_nonzero(keep))]] = True
    return torch.from_numpy(candidates[keep]), float(least)


def _select_torch(flat: torch.Tensor, k: int) -> tuple[torch.Tensor, float]:
    magnitude = flat.detach().abs()
    least = torch.topk(magnitude, k, sorted=False).values.min()
    above = torch.nonzero(magnitude > least).view(-1)
    ties = torch.nonzero(magnitude == least).view(-1)[: k - above.numel()]
    return torch.cat((above, ties)).sort().values, float(least)

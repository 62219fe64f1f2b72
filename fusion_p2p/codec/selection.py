"""The k elements of largest magnitude, exactly, in little more than one pass; equal magnitudes: the lower index first.

A threshold below the k-th magnitude, from a sample, leaves few candidates, among which the k are found exactly. This
is as fast as checking a threshold carried over from the last micro-batch (measured; the pass over the tensor is what
takes the time), and the answer depends on the tensor alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_CHUNK = 1 << 17  # elements; abs and mask of a chunk stay in the cache
_SAMPLE = 1 << 17


def _candidates(flat: np.ndarray, threshold: np.float32, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(ascending indices with |x| >= threshold, their magnitudes); None once there are more than `limit`."""
    found, magnitudes, total = [], [], 0
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
        magnitudes.append(magnitude[index])
        index += start
        found.append(index)
    return np.concatenate(found), np.concatenate(magnitudes)


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


def select(flat: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending int64 indices of the k largest magnitudes of a finite float32 vector."""
    if flat.device.type != "cpu":
        return _select_torch(flat, k)
    x = flat.detach().numpy()
    found = _candidates(x, sampled_threshold(x, k), 4 * k + 4096)
    if found is None or found[0].size < k:
        found = np.arange(x.size), np.abs(x)
    candidates, magnitude = found
    least = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    keep = magnitude > least
    ties = np.flatnonzero(magnitude == least)
    keep[ties[: k - int(np.count_nonzero(keep))]] = True
    return torch.from_numpy(candidates[keep])


def _select_torch(flat: torch.Tensor, k: int) -> torch.Tensor:
    magnitude = flat.detach().abs()
    least = torch.topk(magnitude, k, sorted=False).values.min()
    above = torch.nonzero(magnitude > least).view(-1)
    ties = torch.nonzero(magnitude == least).view(-1)[: k - above.numel()]
    return torch.cat((above, ties)).sort().values

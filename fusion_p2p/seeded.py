"""Counter-based randomness: every draw is a pure function of (run seed, step, micro-batch, operator site).

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) through numpy's raw bit stream,
whose values numpy guarantees across versions and machines. The same draw comes whole, split, recomputed and on
another machine; nothing here reads or moves torch's generators.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_MASK64 = (1 << 64) - 1


class RngKey(NamedTuple):
    """Names one micro-batch of one step of one run; operators add their `site`."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0


def _words(key: RngKey, site: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` uint64 words; (seed, site) is the Philox key, (step, micro-batch) the high half of the counter."""
    counter = np.array([0, 0, key.micro_batch & _MASK64, key.step & _MASK64], dtype=np.uint64)
    philox_key = np.array([key.seed & _MASK64, site & _MASK64], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=philox_key).random_raw(count)


def _halfwords(key: RngKey, site: int, count: int) -> npt.NDArray[np.uint16]:
    words = _words(key, site, (count + 3) // 4).astype("<u8", copy=False)
    return words.view("<u2")[:count]


def _unit(key: RngKey, site: int, count: int) -> npt.NDArray[np.float64]:
    """Uniform on the open interval (0, 1), 52 bits."""
    return ((_words(key, site, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def bernoulli(key: RngKey, site: int, shape: tuple[int, ...], keep: float) -> torch.Tensor:
    """Boolean mask on the CPU, True with probability `keep` rounded to 1/65536."""
    count = math.prod(shape)
    threshold = round(keep * 65536)
    if threshold >= 65536:
        return torch.ones(shape, dtype=torch.bool)
    drawn = _halfwords(key, site, count) < np.uint16(max(threshold, 0))
    return torch.from_numpy(drawn).view(shape)


def rand(key: RngKey, site: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uniform on [0, 1) on the CPU, with as many bits as `dtype` holds, so that rounding never reaches 1."""
    bits = 53 if dtype == torch.float64 else 8 if dtype in (torch.float16, torch.bfloat16) else 24
    drawn = (_words(key, site, math.prod(shape)) >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
    return torch.from_numpy(drawn).view(shape).to(dtype)


def randn(key: RngKey, site: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal on the CPU, by the inverse of the distribution function in double precision."""
    unit = torch.from_numpy(_unit(key, site, math.prod(shape)))
    normal: torch.Tensor = torch.special.ndtri(unit).view(shape).to(dtype)
    return normal


def randint(key: RngKey, site: int, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers in [low, high) on the CPU; the bias of the modulo is below 2**-32 for ranges below 2**32."""
    drawn = _words(key, site, math.prod(shape)) % np.uint64(high - low)
    return (torch.from_numpy(drawn.astype(np.int64)).view(shape) + low).to(dtype)

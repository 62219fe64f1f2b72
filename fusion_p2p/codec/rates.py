"""How many bits go where: quantiser steps for components of unequal spread, at a given mean rate.

Tables are of a uniform quantiser on a Gaussian with an entropy coder behind it, which is what the codecs are.
"""

from __future__ import annotations

import functools

import numpy as np

_STEPS = 2.0 ** np.arange(-14, 2.8, 0.0625)  # of a unit Gaussian; the coarsest keep 1 symbol in 1000
_ITERATIONS = 40


@functools.cache
def _gaussian() -> tuple[np.ndarray, np.ndarray]:
    """(bits, relative variance of the unbiased estimate) at each of _STEPS."""
    x = np.linspace(0, 9, 6001)
    density = np.exp(-x * x / 2)
    density /= density.sum()
    bits, variance = [], []
    for step in _STEPS:
        if step < 0.05:  # fine: the high-rate laws hold
            bits.append(2.0471 - np.log2(step))
            variance.append(step * step / 12)
            continue
        q = np.round(x / step)
        mass = np.bincount(q.astype(np.int64), weights=density)
        entropy = np.where(mass > 0, -mass * np.log2(np.maximum(mass, 1e-300)), 0)
        bits.append(entropy.sum() + mass[1:].sum())  # the sign takes a bit
        variance.append((density * q * q).sum() / (density * x * q).sum() ** 2 - 1)
    return np.array(bits), np.array(variance)


def bits_at(ratio: np.ndarray) -> np.ndarray:
    """Bits of a Gaussian component whose step over spread is `ratio`."""
    table, _ = _gaussian()
    t = np.log2(np.maximum(ratio, 1e-30))
    grid = np.log2(_STEPS)
    return np.where(t > grid[-1], 0.0, np.where(t < grid[0], 2.0471 - t, np.interp(t, grid, table)))


def one_step(spread: np.ndarray, bits: float) -> float:
    """The step for all at which the mean rate is `bits`: least squared error ("reverse water-filling")."""
    top = float(spread.max(initial=0.0))
    if not 1e-35 < top < np.inf:
        return 1.0
    low, high = np.log2(top) - 30, np.log2(top) + 4
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        if bits_at(2.0**middle / np.maximum(spread, top * 2.0**-60)).mean() > bits:
            low = middle
        else:
            high = middle
    return float(2.0**high)


@functools.cache
def _slopes() -> tuple[np.ndarray, np.ndarray]:
    """(log2 of -d variance / d bits, ascending; log2 of the step there)."""
    bits, variance = _gaussian()
    slope = np.log2(-np.gradient(variance, bits))
    return np.maximum.accumulate(slope), np.log2(_STEPS)


def unbiased_steps(spread: np.ndarray, bits: float) -> np.ndarray:
    """A step for each at which the mean rate is `bits` and the summed variance of unbiased estimates is least.

    Unlike with one step for all, weak components keep a few symbols: dropping one would be a bias.
    """
    top = float(spread.max(initial=0.0))
    if not 1e-35 < top < np.inf:
        return np.ones_like(spread)
    safe = np.maximum(spread, top * 2.0**-40)
    slopes, steps = _slopes()
    low, high = slopes[0] + 2 * np.log2(top) - 100, slopes[-1] + 2 * np.log2(top) + 100
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        ratio = 2.0 ** np.interp(middle - 2 * np.log2(safe), slopes, steps)
        if bits_at(ratio).mean() > bits:
            low = middle
        else:
            high = middle
    return np.asarray(2.0 ** np.interp(high - 2 * np.log2(safe), slopes, steps) * safe)

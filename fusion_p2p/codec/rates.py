"""How many bits go where: quantiser steps for components of unequal spread, at a given mean rate.

Tables are of a uniform quantiser on a Gaussian with an entropy coder behind it, which is what the codecs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

_STEPS = 2.0 ** np.arange(-14, 2.8, 0.0625)  # of a unit Gaussian; the coarsest keep 1 symbol in 1000
_SECTIONS, _ROUNDS = 12, 3  # of the search: at once, and how often


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


@functools.cache
def _curve() -> tuple[np.ndarray, np.ndarray]:
    """(log2 of step over spread, bits), to be interpolated; a finer step takes a bit more each time that it halves."""
    grid, bits = np.log2(_STEPS), _gaussian()[0]
    far = grid[0] - 200.0
    return np.append(far, grid), np.append(2.0471 - far, bits)


def bits_at(log2_ratio: np.ndarray) -> np.ndarray:
    """Bits of a Gaussian component by log2 of step over spread."""
    grid, curve = _curve()
    return np.asarray(np.interp(log2_ratio, grid, curve, right=0.0))


def _where(rate: Callable[[np.ndarray], np.ndarray], low: float, high: float, bits: float) -> float:
    """Where between `low` and `high` the falling `rate` is `bits`: to a thousandth or so of a table's cell."""
    for _ in range(_ROUNDS):
        at = np.linspace(low, high, _SECTIONS + 1)
        found = rate(at)
        k = min(max(int((found > bits).sum()), 1), _SECTIONS)
        low, high, above, below = at[k - 1], at[k], found[k - 1], found[k]
    share = (above - bits) / (above - below) if above > below else 1.0
    return float(low + (high - low) * min(max(share, 0.0), 1.0))


def one_step(spread: np.ndarray, bits: float) -> float:
    """The step for all at which the mean rate is `bits`: least squared error ("reverse water-filling")."""
    top = float(spread.max(initial=0.0))
    if not 1e-35 < top < np.inf:
        return 1.0
    each = np.log2(np.maximum(spread, top * 2.0**-60))

    def rate(at: np.ndarray) -> np.ndarray:
        return np.asarray(bits_at(at[:, None] - each).mean(axis=1))

    return float(2.0 ** _where(rate, np.log2(top) - 30, np.log2(top) + 4, bits))


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
    each = 2 * np.log2(np.maximum(spread, top * 2.0**-40))
    slopes, steps = _slopes()
    curve = _gaussian()[0]

    def rate(at: np.ndarray) -> np.ndarray:
        return np.asarray(np.interp(at[:, None] - each, slopes, curve).mean(axis=1))

    at = _where(rate, slopes[0] + each.min(), slopes[-1] + each.max(), bits)
    return np.asarray(2.0 ** (np.interp(at - each, slopes, steps) + each / 2))

"""Network coordinates: round trips between peers that never pinged each other. Pure.

Vivaldi (Dabek, Cox, Kaashoek, Morris, SIGCOMM 2004), section 3, with a height: a point in a plane, in milliseconds,
plus the way from the peer to the net. The predicted round trip is the distance of the points plus both heights.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

_MOVE, _ADAPT = 0.25, 0.25  # c_c and c_e of the paper
_MIN_HEIGHT_MS, _MAX_MS = 0.05, 1e5


@dataclass(frozen=True, slots=True)
class Coordinate:
    """`x_ms`, `y_ms`, `height_ms`; `error`: expected relative error of a prediction, 1 when nothing is known."""

    x_ms: float = 0.0
    y_ms: float = 0.0
    height_ms: float = 0.5
    error: float = 1.0

    @property
    def point(self) -> tuple[float, float, float]:
        return round(self.x_ms, 2), round(self.y_ms, 2), round(self.height_ms, 2)


def from_point(point: tuple[float, ...], error: float) -> Coordinate | None:
    """A coordinate that another peer published; None if it is none."""
    if len(point) != 3:
        return None
    x, y, height = point
    if not (-_MAX_MS <= x <= _MAX_MS and -_MAX_MS <= y <= _MAX_MS and 0 <= height <= _MAX_MS):  # nor NaN
        return None
    return Coordinate(x, y, max(height, _MIN_HEIGHT_MS), min(max(error, 0.01), 1.0))


@functools.lru_cache(1 << 12)  # a peer looks at the same leaders' points again and again
def whereabouts(point: tuple[float, ...]) -> Coordinate | None:
    """`from_point` for who only wants to know where it is."""
    return from_point(point, 1.0)


def predict_rtt_s(a: Coordinate, b: Coordinate) -> float:
    """The round trip between two peers, seconds."""
    return (math.hypot(a.x_ms - b.x_ms, a.y_ms - b.y_ms) + a.height_ms + b.height_ms) / 1e3


def moved(own: Coordinate, other: Coordinate, rtt_s: float, angle: float) -> Coordinate:
    """`own` after a round trip of `rtt_s` to a peer at `other`. `angle` (radians): where to, from one spot."""
    measured_ms = max(rtt_s * 1e3, 2 * _MIN_HEIGHT_MS)
    dx, dy = own.x_ms - other.x_ms, own.y_ms - other.y_ms
    flat = math.hypot(dx, dy)
    if flat < 1e-6:
        dx, dy, flat = math.cos(angle) * 1e-3, math.sin(angle) * 1e-3, 1e-3
    predicted_ms = flat + own.height_ms + other.height_ms
    weight = own.error / (own.error + other.error)
    sample = abs(predicted_ms - measured_ms) / measured_ms
    error = min(1.0, max(0.01, sample * _ADAPT * weight + own.error * (1 - _ADAPT * weight)))
    push = _MOVE * weight * (measured_ms - predicted_ms)
    share = push / predicted_ms
    return Coordinate(
        x_ms=_clamp(own.x_ms + share * dx),
        y_ms=_clamp(own.y_ms + share * dy),
        height_ms=min(_MAX_MS, max(_MIN_HEIGHT_MS, own.height_ms + share * (own.height_ms + other.height_ms))),
        error=error,
    )


def _clamp(value_ms: float) -> float:
    return min(_MAX_MS, max(-_MAX_MS, value_ms))

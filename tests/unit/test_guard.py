"""Which frames are wild: not finite, or far beyond what their stream had; a function of the frames alone."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_p2p.guard import BESIDE, FACTOR, WARM_UP, Guard
from fusion_p2p.suspicion import FrameId, Watched


def frame(tick: int, value: int = 5) -> FrameId:
    return FrameId(3, 0, value, tick, 0)


def warm(guard: Guard, frames: int = WARM_UP) -> None:
    for tick in range(frames):
        assert guard.look(frame(tick), b"", torch.ones(4)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_wild_from_the_first_frame(bad: float) -> None:
    found = Guard().look(frame(0), b"payload", torch.tensor([1.0, bad]))
    assert found is not None and found.wild and len(found.digest) == 16 and found.frame == frame(0)


def test_a_norm_far_beyond_the_mean_is_wild_until_it_is_passed() -> None:
    guard = Guard()
    warm(guard)
    big = torch.full((4,), 2 * FACTOR)
    found = guard.look(frame(WARM_UP), b"", big)
    assert found is not None and found.wild and found.bound == pytest.approx(2 * FACTOR)
    guard.passed(found)
    assert guard.look(frame(WARM_UP + 1), b"", big) is None


def test_streams_are_apart_and_a_few_frames_are_no_measure() -> None:
    guard = Guard()
    warm(guard, WARM_UP - 1)
    assert guard.look(frame(WARM_UP), b"", torch.full((4,), 1e6)) is None
    warm(other := Guard())
    assert other.look(frame(99, value=6), b"", torch.full((4,), 1e6)) is None


def test_a_watched_frame_is_named_whatever_it_is_and_measured_as_before() -> None:
    for size, wild in ((1.0, False), (50.0, True)):
        found = Guard([Watched(frame(3), 10.0)]).look(frame(3), b"", torch.full((4,), size))
        assert found is not None and found.wild is wild


def test_what_is_rounding_beside_the_rest_may_do_what_it_likes() -> None:
    """Norms a millionth of those that the same stage sends beside them, now a thousand times larger."""
    guard = Guard()
    warm(guard)
    for tick in range(WARM_UP):
        assert guard.look(frame(tick, value=6), b"", torch.full((4,), 1e-6)) is None
    assert guard.look(frame(WARM_UP, value=6), b"", torch.full((4,), 1e-3)) is None
    found = guard.look(frame(WARM_UP, value=6), b"", torch.full((4,), 1.0))
    assert found is not None and found.bound == pytest.approx(FACTOR * BESIDE * 2)

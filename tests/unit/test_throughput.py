"""Bandwidth from real traffic: spells of sending, their acknowledgements, what does not count."""

from __future__ import annotations

import pytest

from peer.throughput import LONG_S, Throughput


def test_a_spell_from_the_first_byte_to_the_last_acknowledgement() -> None:
    t = Throughput()
    t.pushed(1 << 20, 10.0)
    t.pushed(1 << 20, 10.1)
    assert t.acknowledged(1 << 20, 10.5) is None
    assert t.acknowledged(0, 11.0) == (2 << 20, 1.0)
    t.pushed(1 << 20, 20.0)  # the pause between does not count
    assert t.acknowledged(0, 20.5) == (1 << 20, 0.5)


def test_a_channel_that_never_rests_is_measured_all_the_same() -> None:
    t, rate, found = Throughput(), 1e6, []
    for i in range(100):
        t.pushed(200_000, i * 0.2)
        found.append(t.acknowledged(100_000, i * 0.2 + 0.1))
    spells = [f for f in found if f is not None]
    assert len(spells) >= 3
    assert all(size / seconds == pytest.approx(rate, rel=0.1) and seconds >= LONG_S for size, seconds in spells)


@pytest.mark.parametrize(("size", "seconds"), [(1000, 1.0), (1 << 20, 0.01)])
def test_what_is_too_short_or_too_small_says_nothing(size: int, seconds: float) -> None:
    t = Throughput()
    t.pushed(size, 0.0)
    assert t.acknowledged(0, seconds) is None


def test_a_link_that_passes_little_for_long_is_measured_too() -> None:
    t = Throughput()
    t.pushed(1 << 20, 0.0)
    assert t.acknowledged((1 << 20) - 60_000, LONG_S) == (60_000, LONG_S)
    t.pushed(0, LONG_S)
    assert t.acknowledged((1 << 20) - 61_000, 2 * LONG_S) is None, "a silence is no rate"


def test_a_broken_stream_says_nothing() -> None:
    t = Throughput()
    t.pushed(1 << 20, 0.0)
    t.broke()
    assert t.acknowledged(0, 9.0) is None

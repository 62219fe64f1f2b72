"""The ladder that a running job measures, and what the gate leaves of it."""

from __future__ import annotations

import pytest

from fusion_p2p.codec_stats import LEAST_STEPS, CodecStats, refreshed, short_of
from fusion_p2p.frame import CutReport, TickReport
from fusion_p2p.plan import LinkCodec
from fusion_p2p.planner.ladder import DENSE, Ladder, Rung, default_ladder

LADDER = Ladder((DENSE, Rung("int8", 0.26, 1e-9, 1e-9, 0.001), Rung("transform:1/1", 0.036, 8e-9, 8e-9, 0.02)))
CODECS = (LinkCodec(0, 1, "transform:1/1"),)


def tick(sent: int = 40, back: int = 30, seconds: float = 3.2e-6) -> dict[int, TickReport]:
    """100 elements each way over link 0-1; link 1-2 is dense."""
    ahead = CutReport(0, 1, sent, 100, seconds, 1.0, 0.0)
    behind = CutReport(0, 1, back, 100, seconds / 2, 0.0, 0.0)
    return {
        0: TickReport(0, 0, 0, 0, (ahead,)),
        1: TickReport(0, 0, 0, 0, (behind, CutReport(1, 2, 400, 100, 1e-9, 1.0, 0.0))),
    }


def test_the_larger_direction_and_the_slower_end_count() -> None:
    stats = CodecStats()
    for _ in range(LEAST_STEPS):
        stats.take(tick(), CODECS)
    (figures,) = stats.figures().values()
    assert figures.byte_share == pytest.approx(0.1)
    assert figures.seconds_per_element == pytest.approx(32e-9)


def test_a_few_steps_say_nothing_yet() -> None:
    stats = CodecStats()
    for _ in range(LEAST_STEPS - 1):
        stats.take(tick(), CODECS)
    assert stats.figures() == {}
    assert refreshed(LADDER, stats.figures()) == LADDER


def test_a_slower_device_shows_in_rungs_that_are_not_in_use() -> None:
    stats = CodecStats()
    for _ in range(LEAST_STEPS):
        stats.take(tick(), CODECS)
    dense, int8, coarse = refreshed(LADDER, stats.figures()).rungs
    assert dense == DENSE
    assert (int8.byte_share, int8.encode_s_per_element) == (0.26, pytest.approx(2e-9))  # twice as slow as thought
    assert coarse.byte_share == pytest.approx(0.1) and coarse.loss_cost == 0.02
    assert coarse.encode_s_per_element + coarse.decode_s_per_element == pytest.approx(32e-9)


def test_a_rung_that_sends_more_for_more_loss_is_left_out() -> None:
    stats = CodecStats()
    for _ in range(LEAST_STEPS):
        stats.take(tick(sent=160), CODECS)
    assert [r.codec for r in refreshed(LADDER, stats.figures()).rungs] == ["dense", "int8"]


def test_old_figures_fade() -> None:
    stats = CodecStats()
    for sent in (400, *(40 for _ in range(60))):
        stats.take(tick(sent=sent), CODECS)
    assert stats.figures()["transform:1/1"].byte_share == pytest.approx(0.1, rel=0.05)


def test_what_the_gate_stepped_back_from_is_gone() -> None:
    assert [r.codec for r in short_of(LADDER, "transform:1/1").rungs] == ["dense", "int8"]
    assert [r.codec for r in short_of(LADDER, "dense").rungs] == ["dense"]
    assert short_of(default_ladder(), "topk:0.01") == default_ladder()

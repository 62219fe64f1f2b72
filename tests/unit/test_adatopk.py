"""The policy that gives every link a codec, and the gate that takes one back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.adatopk import (
    GateRules,
    LinkLoad,
    Observation,
    allowed_loss,
    choose,
    gate,
    ladder_of,
    observe,
    pareto,
    respond,
    step_back,
)
from fusion_p2p.codec import parse
from fusion_p2p.errors import InputError
from fusion_p2p.frame import CutReport, TickReport
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.planner.ladder import DENSE, MOST_LOSS, Ladder, Rung, default_ladder, slowed

LADDER = Ladder((DENSE, Rung("int8", 0.26, 1e-9, 1e-9, 0.001), Rung("transform:1/1", 0.036, 5e-9, 5e-9, 0.02)))


def link(src: int, mbps: float, back_mbps: float | None = None) -> LinkLoad:
    """1M float32 elements."""
    return LinkLoad(
        src=src,
        dst=src + 1,
        elements=1 << 20,
        dense_bytes=4 << 20,
        forward_bytes_per_s=mbps * 125e3,
        backward_bytes_per_s=(back_mbps or mbps) * 125e3,
    )


def test_only_links_that_would_hold_the_pipeline_up_are_compressed() -> None:
    fast, middle, slow = choose("adatopk", [link(0, 10_000), link(1, 100), link(2, 8)], [1.0] * 4, LADDER)
    assert (fast.rung.codec, middle.rung.codec, slow.rung.codec) == ("dense", "int8", "transform:1/1")
    assert "dense fits" in fast.reason and "dense would take" in middle.reason
    assert middle.transfer_s <= 0.25


def test_the_slower_direction_decides() -> None:
    (choice,) = choose("adatopk", [link(0, 10_000, back_mbps=8)], [1.0, 1.0], LADDER)
    assert choice.rung.codec == "transform:1/1"


def test_among_codecs_that_fit_the_least_loss_wins() -> None:
    odd = pareto([Rung("a", 0.1, loss_cost=0.03), Rung("b", 0.2, loss_cost=0.01), Rung("c", 0.15, loss_cost=0.05)])
    assert [r.codec for r in odd.rungs] == ["dense", "b", "a"]
    (choice,) = choose("adatopk", [link(0, 30)], [1.0, 1.0], odd)
    assert choice.rung.codec == "b"


def test_codec_time_counts_and_may_become_the_bottleneck() -> None:
    slow_codec = Ladder((DENSE, Rung("x", 0.01, 1e-6, 1e-6)))
    (choice,) = choose("adatopk", [link(0, 8)], [0.5, 0.5], slow_codec)
    assert choice.codec_s == pytest.approx(2.097, rel=0.01)
    # a bottleneck of 2.6 s allows 0.65 s of transfer, not dense's 4.2
    assert choice.rung.codec == "x"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1, 10_000), min_size=1, max_size=6), st.floats(0.001, 10))
def test_transfers_stay_within_tau_of_the_bottleneck(speeds: list[float], stage_s: float) -> None:
    links = [link(i, s) for i, s in enumerate(speeds)]
    choices = choose("adatopk", links, [stage_s] * (len(links) + 1), default_ladder())
    rungs = default_ladder().rungs
    # a codec tried on the way may have taken longer than the one that its own time made sufficient
    longest_s = 2 * max(r.encode_s_per_element + r.decode_s_per_element for r in rungs) * (1 << 20)
    for c in choices:
        if c.rung != rungs[-1]:
            assert c.transfer_s <= 0.25 * max(stage_s + 2 * longest_s, *(o.transfer_s for o in choices)) * (1 + 1e-6)
    # a faster link is never compressed more than a slower one
    order = sorted(choices, key=lambda c: c.dense_s)
    assert [c.rung.loss_cost for c in order] == sorted(c.rung.loss_cost for c in order)


def test_the_published_rule_follows_slowness() -> None:
    fast, slow = choose("adatopk-paper", [link(0, 1000), link(1, 10)], [1.0] * 3, paper_ratio=50)
    assert fast.rung.codec == "dense"  # ratio 1.5 would send more bytes than dense
    assert slow.rung.codec == f"topk:{1 / 150:.6g}"


@pytest.mark.parametrize("name", ["none", "topk:100", "int8", "rotated:4/2"])
def test_uniform_compression_is_the_same_everywhere(name: str) -> None:
    choices = choose(name, [link(0, 10_000), link(1, 8)], [1.0] * 3)
    assert len({c.rung.codec for c in choices}) == 1
    parse(choices[0].rung.codec)


def test_every_rung_of_the_default_ladder_is_a_codec_and_on_the_front() -> None:
    ladder = ladder_of("adatopk")
    assert ladder.rungs[-1].codec.startswith("transform") and ladder.rungs[-1].loss_cost <= MOST_LOSS
    assert "topk-masked:0.01" in [r.codec for r in ladder.dearer], "on the ladder, taken where its cost is allowed"
    whole = [*ladder.rungs, *ladder.dearer]
    for rung in whole:
        parse(rung.codec)
    assert [r.loss_cost for r in whole] == sorted(r.loss_cost for r in whole)


def test_topk_masked_is_chosen_where_it_is_the_least_loss_that_fits() -> None:
    """A link on which only masks are fast enough: with its cost allowed, or where the model at hand takes it well."""
    slow = link(0, 0.5)
    (choice,) = choose("adatopk:200", [slow], [2.0, 2.0], ladder_of("adatopk:200"))
    assert choice.rung.codec == "topk-masked:0.01" and choice.transfer_s <= 0.5
    (less,) = choose("adatopk:200", [link(0, 2)], [2.0, 2.0], ladder_of("adatopk:200"))
    assert less.rung.codec == "transform:0.5/0.5", "of two that fit, the one of less loss"
    measured = pareto([Rung("int8", 0.26, loss_cost=0.001), Rung("topk-masked:0.01", 0.004, loss_cost=0.015)])
    (own,) = choose("adatopk", [slow], [2.0, 2.0], ladder_of("adatopk", measured))
    assert own.rung.codec == "topk-masked:0.01"


def test_a_codec_that_is_through_later_than_one_of_less_loss_is_not_taken() -> None:
    """4 MB at 100 Mbps: dense 0.34 s, int8 0.087 s, 0.047 s by the third, which fits and takes long to code."""

    def ladder(seconds: float) -> Ladder:
        coder = Rung("transform:4/4", 0.14, seconds / 2, seconds / 2, 0.002)
        return Ladder((DENSE, Rung("int8", 0.26, 1e-9, 1e-9, 0.001), coder))

    (quick,) = choose("adatopk", [link(0, 100)], [0.2, 0.2], ladder(2e-8))
    assert quick.rung.codec == "transform:4/4"
    (slow,) = choose("adatopk", [link(0, 100)], [0.2, 0.2], ladder(2e-7))
    assert slow.rung.codec == "int8"
    assert "transform:4/4 would send less and take 0.257 s" in slow.reason
    (slower,) = choose("adatopk", [link(0, 100)], [0.2, 0.2], slowed(ladder(2e-8), 10.0))
    assert slower.rung.codec == "int8"


def test_where_nothing_allowed_fits_the_reason_says_what_would() -> None:
    (choice,) = choose("adatopk", [link(0, 0.5)], [2.0, 2.0], ladder_of("adatopk"))
    assert choice.rung.codec == "transform:1/1"
    assert "in the loss allowed fits" in choice.reason
    assert "topk-masked:0.01 would take 0.268 s" in choice.reason
    allowed = allowed_loss(f"adatopk:{choice.reason.rpartition('adatopk:')[2].split()[0]}")
    assert allowed is not None and allowed >= ladder_of("adatopk").dearer[-1].loss_cost
    (nearest,) = choose("adatopk", [link(0, 2)], [2.0, 2.0], ladder_of("adatopk"))
    assert "transform:0.5/0.5 would take" in nearest.reason, "the least of those that would fit"


def test_what_is_allowed_of_the_loss() -> None:
    assert (allowed_loss("adatopk"), allowed_loss("adatopk:8"), allowed_loss("adatopk:0.5")) == (MOST_LOSS, 0.08, 0.005)
    assert allowed_loss("adatopk-paper") is allowed_loss("none") is None
    assert [r.codec for r in ladder_of("adatopk:0").rungs] == ["dense"]
    for bad in ("adatopk:", "adatopk:x", "adatopk:-1", "adatopk:nan", "adatopk:5000"):
        with pytest.raises(InputError, match="write adatopk, or adatopk:8"):
            ladder_of(bad)


@pytest.mark.parametrize("name", ["", "adaptive", "topk", "topk:x", "rotated:99/1"])
def test_an_unknown_compression_names_the_choices(name: str) -> None:
    with pytest.raises(InputError, match="use adatopk"):
        ladder_of(name)


# --- the gate

FIRST = (0, 1)
BOTH = ((0, 1), (1, 2))
DENSE_NORMS = {(0, 1): 1.0, (1, 2): 1.0}


def run(losses: list[float], norm: float = 1.0) -> list[Observation]:
    return [Observation(step=i, loss=x, norms={(0, 1): norm, (1, 2): 1.0}) for i, x in enumerate(losses)]


def test_a_steady_run_passes() -> None:
    assert gate(run([2 - i / 100 for i in range(60)]), 0, BOTH, DENSE_NORMS) == ()


def test_growth_past_twice_dense_names_the_link() -> None:
    (found,) = gate(run([2.0] * 30, norm=2.5), 0, BOTH, DENSE_NORMS)
    assert (found.link, found.step) == (FIRST, 29)
    assert "2.5 times the dense one" in found.reason


def growing(doubling_steps: float, start: int = 100) -> list[Observation]:
    return [Observation(step=start + i, loss=2.0, norms={FIRST: 2 ** (i / doubling_steps)}) for i in range(55)]


def test_without_a_dense_reference_growth_within_fifty_steps_counts() -> None:
    (found,) = gate(growing(20), 0, (FIRST,), {})
    assert found.link == FIRST and "times that before" in found.reason
    assert gate(growing(60), 0, (FIRST,), {}) == ()
    assert gate(growing(20)[:40], 0, (FIRST,), {}) == ()
    assert gate(growing(20, start=0), 0, (FIRST,), {}) == ()  # as in any run's first steps


def test_a_norm_that_is_no_number_counts_as_growth() -> None:
    (found,) = gate(run([2.0] * 30, norm=math.nan), 0, BOTH, DENSE_NORMS)
    assert found.link == FIRST


def test_links_without_compression_are_left_alone() -> None:
    assert gate(run([2.0] * 30 + [9.0] * 5, norm=9.0), 0, (), DENSE_NORMS) == ()
    assert gate(run([2.0] * 30, norm=9.0), 0, ((1, 2),), DENSE_NORMS) == ()


def test_one_odd_step_does_nothing() -> None:
    odd = run([2.0] * 30)
    odd[-1] = Observation(step=29, loss=9.0, norms={FIRST: 50.0, (1, 2): 1.0})
    assert gate(odd, 0, BOTH, DENSE_NORMS) == ()


@pytest.mark.parametrize("bad", [3.0, math.nan, math.inf])
def test_a_loss_jump_is_everybodys(bad: float) -> None:
    (found,) = gate(run([2.0] * 30 + [bad] * 5), 0, BOTH, {})
    assert found.link is None and "loss jumped" in found.reason


def test_steps_before_the_entry_in_force_do_not_count() -> None:
    assert gate(run([2.0] * 30 + [3.0] * 5), 30, BOTH, {}) == ()
    assert gate(run([2.0] * 30, norm=2.5), 28, BOTH, DENSE_NORMS) == ()
    assert gate(run([2.0] * 30, norm=2.5), 20, BOTH, DENSE_NORMS, GateRules(growth=3.0)) == ()


def test_the_answer_steps_back_by_one_and_says_why() -> None:
    numerics = Numerics(
        cuts=(1, 2), codecs=(LinkCodec(0, 1, "transform:1/1"), LinkCodec(1, 2, "int8")), micro_batches=2,
        micro_batch_size=2,
    )  # fmt: skip
    proposal = respond(numerics, gate(run([2.0] * 30, norm=2.5), 0, BOTH, DENSE_NORMS), LADDER)
    assert proposal is not None
    assert proposal.step == 29
    assert [c.codec for c in proposal.numerics.codecs] == ["int8", "int8"]
    assert "link 0-1 transform:1/1 to int8" in proposal.reason and "2.5 times" in proposal.reason
    assert respond(numerics, (), LADDER) is None
    everywhere = respond(numerics, gate(run([2.0] * 30 + [3.0] * 5), 0, BOTH, {}), LADDER)
    assert everywhere is not None
    assert everywhere.numerics.codecs == (LinkCodec(0, 1, "int8"),)  # the other is dense now, which is not said


def test_stepping_back_ends_at_dense() -> None:
    assert step_back(LADDER, "int8") == "dense"
    assert step_back(LADDER, "dense") == "dense"
    assert step_back(LADDER, "topk:0.01") == "dense"


def test_each_figure_comes_from_the_end_that_knows_it() -> None:
    reports = {
        0: TickReport(1.0, 1.0, 0.0, 0.0, (CutReport(0, 1, 100, 400, 0.1, 3.0, 0.0),)),
        1: TickReport(1.0, 1.0, 0.0, 0.0, (CutReport(0, 1, 50, 400, 0.1, 0.0, -0.2),)),
    }
    assert observe(7, 2.0, reports) == Observation(step=7, loss=2.0, norms={FIRST: 3.0}, biases={FIRST: -0.2})

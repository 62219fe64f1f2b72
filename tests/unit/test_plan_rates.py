"""How fast devices and links are taken to be: steady under noise, fair to who was not seen, forgiving after a while."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer
from peer.plan_rates import FORGET_S, MOST_DOUBLED, Rates, corrections

A, B, C = ("a", "cpu"), ("b", "cpu"), ("c", "cpu")
OFFERS = [DeviceOffer(peer=p, flops_per_s=1e9, memory_bytes=1 << 30) for p in "abc"]


def atoms(count: int) -> list[Atom]:
    return [
        Atom(
            nodes=(), weights=(), owned=(), parameters=1, weight_bytes=4, forward_flops=100, backward_flops=200,
            forward_bytes=10, stash_bytes=1, kernels=1, cut_bytes=7, cut_weight_bytes=0,
        )
        for _ in range(count)
    ]  # fmt: skip


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=50))
def test_noise_is_no_news(noise: list[float]) -> None:
    rates = Rates()
    rates.hear({A: 3.0})
    assert not any(rates.hear({A: 3.0 * n}) for n in noise)
    assert rates.of(A) == 3.0 and rates.hear({A: 6.0}) and rates.of(A) == 6.0


def test_trial_steps_count_until_real_steps_were_seen() -> None:
    rates = Rates()
    rates.hear_trials({A: 4.0})
    assert rates.of(A) == 4.0
    rates.hear({A: 2.0})
    rates.hear_trials({A: 4.0})
    assert rates.of(A) == 2.0


def test_what_real_steps_cost_beyond_trial_steps_they_cost_everywhere() -> None:
    rates = Rates()
    rates.hear_trials({A: 1.0, B: 2.0, C: 3.0})
    rates.hear({A: 2.0, B: 4.0})
    assert rates.of(C) == 6.0


def test_who_was_not_seen_at_work_is_taken_as_the_others_are() -> None:
    rates = Rates()
    assert [o.correction for o in rates.correct(OFFERS)] == [1.0, 1.0, 1.0]
    rates.hear({A: 5.0, B: 7.0})
    assert [o.correction for o in rates.correct(OFFERS)] == [5.0, 7.0, 6.0]


def test_a_device_without_stages_gets_another_chance_ever_more_seldom() -> None:
    rates, now_s, chances = Rates(), 0.0, []
    rates.hear({A: 1.0, B: 1.0, C: 1.0})
    while now_s < 40 * FORGET_S:
        rates.hear({C: 9.0})
        if rates.use({A, B}, now_s):
            chances.append(now_s)
            assert rates.of(C) == 1.0
        now_s += FORGET_S / 10
    apart = [b - a for a, b in itertools.pairwise(chances)]
    assert apart == sorted(apart) and FORGET_S < apart[-1] <= 1.2 * FORGET_S * 2**MOST_DOUBLED


def test_what_a_stage_takes_from_the_beginning_is_its_pieces_own() -> None:
    rates, placed = Rates(), {0: A, 1: B, 2: C}
    rates.hear({A: 2.0, B: 2.0, C: 2.0})
    assert rates.shape((0, 1, 3, 4), placed, {0: 2.0, 1: 12.0, 2: 2.0}, {0: 1.0, 1: 2.0, 2: 1.0})
    scaled = rates.scaled(atoms(4))
    assert [a.heavier for a in scaled] == [1, 3, 3, 1] and {a.cut_bytes for a in scaled} == {7}
    assert [rates.of(k) for k in (A, B, C)] == [2.0, 2.0, 2.0]
    assert not rates.shape((0, 4), {0: A}, {0: 50.0}, {0: 1.0})  # one stage: nothing to compare with


def test_a_device_with_two_stages_is_judged_by_their_sum() -> None:
    found = corrections({0: A, 1: A, 2: B}, {0: 1.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 2.0})
    assert found == {A: 3.0, B: 2.0}

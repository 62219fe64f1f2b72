"""Sets come more often where hosts are lost more often, and no faster than they can travel."""

from __future__ import annotations

import math

import pytest

from peer.mark_interval import COPY_BYTES_PER_S, PRIOR_S, SET_S, losses_per_s, mark_interval

GB = 1_000_000_000
STEADY = {"step_s": 1.0, "state_bytes": GB, "bytes_per_s": 1e9, "rate": 1 / 3600.0, "most": 1000}


def test_it_is_the_least_cost_of_replay_and_sets() -> None:
    found = mark_interval(**STEADY)  # type: ignore[arg-type]

    def cost(steps: int) -> float:
        return (SET_S + GB / COPY_BYTES_PER_S) / steps + steps / 2 / 3600.0

    assert cost(found) <= min(cost(found - 2), cost(found + 2)) and 100 < found < 200


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"rate": 1 / 60.0}, -1),
        ({"rate": 1 / 86400.0}, 1),
        ({"state_bytes": 10 * GB}, 1),
        ({"step_s": 10.0}, -1),
        ({"bytes_per_s": 1e6}, 1),
    ],
)
def test_what_moves_it(change: dict[str, float], sign: int) -> None:
    now, then = mark_interval(**STEADY), mark_interval(**(STEADY | change))  # type: ignore[arg-type]
    assert (then > now) if sign > 0 else (then < now)


def test_a_set_is_through_before_the_next_one_and_none_is_later_than_asked_for() -> None:
    slow = STEADY | {"bytes_per_s": 2_500_000.0, "most": 10_000}  # 20 Mbit/s: seven minutes for a GB
    assert mark_interval(**slow) >= 400  # type: ignore[arg-type]
    assert mark_interval(**(slow | {"most": 50})) == 50  # type: ignore[arg-type]
    assert mark_interval(**(STEADY | {"step_s": 0.0})) == 1000  # type: ignore[arg-type]
    assert mark_interval(**(STEADY | {"most": 0})) == 0  # type: ignore[arg-type]
    assert mark_interval(**(STEADY | {"rate": 1e9})) == mark_interval(**(STEADY | {"rate": 1e12}))  # type: ignore[arg-type]


def test_churn_is_what_was_seen_beside_one_loss_an_hour() -> None:
    assert losses_per_s(0, 0.0) == pytest.approx(1 / PRIOR_S)
    assert losses_per_s(60, 3600.0) > 10 * losses_per_s(0, 3600.0)
    assert math.isclose(losses_per_s(9, PRIOR_S), 10 / (2 * PRIOR_S))

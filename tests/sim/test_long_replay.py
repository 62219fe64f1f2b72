"""A stage lost long after the newest set: the replay is longer than what a stage looks ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_p2p.capture import Captured
from fusion_p2p.inbox import TICKS_AHEAD
from tests.sim.test_trainer import Lab, captured, expected
from tests.simulated_time import simulate

__all__ = ["captured"]  # the fixture

STEPS = TICKS_AHEAD + 16


@pytest.mark.timeout(400)
@pytest.mark.parametrize("marks", [0, 1000])
def test_a_replay_of_many_ticks_is_taken_as_fast_as_it_is_used(captured: Captured, tmp_path: Path, marks: int) -> None:
    """`marks` 0: nothing is logged, all stages go back; else the lost one alone is fed again."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2, marks=marks) as trainer:
            want = expected(captured, trainer.plan.numerics.cuts, STEPS + 2)

            async def fate(step: int) -> None:
                if step == STEPS:
                    await lab.host(trainer, 1).kill()

            assert await lab.train(trainer, 0, STEPS + 2, fate) == want[0]
            assert await lab.hash(trainer, STEPS + 2) == want[1]

    simulate(main())

"""The wall clock jumps, on the trainer's machine: forward an hour, back a day. Nothing is lost but the jump."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from fusion_p2p.capture import Captured, capture
from tests.sim.test_trainer import Lab, _Net, batch, expected
from tests.simulated_time import simulate


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(_Net(), batch(0))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("jump_s", [3600.0, -86400.0])
def test_a_jump_of_the_clock_changes_no_bit_and_keeps_no_peer_out(
    captured: Captured, tmp_path: Path, jump_s: float
) -> None:
    offset = 0.0

    async def main() -> None:
        nonlocal offset
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3, clock=lambda: time.time() + offset) as trainer:
            live = trainer._live
            live.exclude("volunteer9", 0.2)
            losses = await lab.train(trainer, 0, 4)
            await trainer.save(b"at 4")
            offset = jump_s
            losses += await lab.train(trainer, 4, 6)
            await lab.host(trainer, 1).kill()  # rebuilt elsewhere: a certificate and an assignment of the new time
            losses += await lab.train(trainer, 6, 10)
            want = expected(captured, trainer.plan.numerics.cuts, 10)
            assert losses == want[0] and await lab.hash(trainer, 10) == want[1]
            await asyncio.sleep(0.2)
            assert live.may_host("volunteer9")

    simulate(main())

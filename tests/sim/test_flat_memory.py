"""A run that goes on and on takes no more memory: trainer, links, outboxes and stages in one process. No sockets."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fusion_p2p.capture import Captured
from tests.sim.test_trainer import Lab, captured
from tests.simulated_time import simulate

__all__ = ["captured"]
EVERY, WARM_UP, STEPS = 20, 60, 160  # steps between sets, before the first look, between the looks
QUIET_S = 700.0  # simulated: what is under way arrives, and the longest timers, those of marks, are over


def held() -> tuple[int, int]:
    """Objects that the collector knows, and bytes of tensors."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) is torch.Tensor]
    return len(objects), sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.timeout(600)
def test_memory_is_flat(captured: Captured, tmp_path: Path) -> None:
    """Looked at when all is quiet, two looks differ by a handful of objects; one kept of each step makes STEPS."""

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # else threads come one after another
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        for volunteer in lab.volunteers:
            volunteer.keeps = True
        async with lab.trainer(3) as trainer:

            async def fate(step: int) -> None:
                if step % EVERY == EVERY - 1:
                    await trainer.save(b"at %d" % step)
                    lab.heard.clear()  # the listener's own memory

            await lab.train(trainer, 0, WARM_UP, fate)
            await asyncio.sleep(QUIET_S)
            objects, tensor_bytes = held()
            await lab.train(trainer, WARM_UP, WARM_UP + STEPS, fate)
            await asyncio.sleep(QUIET_S)
            objects_now, tensor_bytes_now = held()
            assert objects_now - objects < STEPS // 2, f"{objects_now - objects} objects more after {STEPS} steps"
            assert tensor_bytes_now <= 1.02 * tensor_bytes

    simulate(main())

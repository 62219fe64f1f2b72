"""A run that goes on and on takes no more memory: trainer, links, outboxes and stages in one process. No sockets."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch

from fusion_p2p.capture import Captured
from tests.sim.test_trainer import Lab, captured

__all__ = ["captured"]
EVERY, WARM_UP, LOOKS, BETWEEN = 20, 40, 5, 160  # steps between sets, before the first look, looks, steps between both


def held() -> tuple[int, int]:
    """Objects that the collector knows, and bytes of tensors."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) is torch.Tensor]
    return len(objects), sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.timeout(300)
def test_memory_is_flat(captured: Captured, tmp_path: Path) -> None:
    """Frames and timers under way differ by a hundred or two from look to look, and more on a busy machine; so the
    least of several looks is compared with the least of several later ones. What is kept of each step shows there."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        for volunteer in lab.volunteers:
            volunteer.keeps = True
        async with lab.trainer(3) as trainer:
            done = 0

            async def fate(step: int) -> None:
                if step % EVERY == EVERY - 1:
                    await trainer.save(b"at %d" % step)
                    lab.heard.clear()  # the listener's own memory

            async def train(steps: int) -> None:
                nonlocal done
                await lab.train(trainer, done, done + steps, fate)
                done += steps

            async def least() -> tuple[int, int]:
                looks = []
                for _ in range(LOOKS):
                    await train(EVERY)
                    looks.append(held())
                return min(objects for objects, _ in looks), min(tensor_bytes for _, tensor_bytes in looks)

            await train(WARM_UP)
            objects, tensor_bytes = await least()
            await train(BETWEEN)
            objects_now, tensor_bytes_now = await least()
            steps = BETWEEN + LOOKS * EVERY
            assert objects_now - objects < steps // 2, f"{objects_now - objects} objects more after {steps} steps"
            assert tensor_bytes_now <= 1.02 * tensor_bytes

    asyncio.run(main())

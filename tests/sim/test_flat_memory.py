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
WARM_UP, STEPS, EVERY = 40, 100, 20
UNDER_WAY = 60  # objects more or less


def held() -> tuple[int, int]:
    """Objects that the collector knows, and bytes of tensors."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) is torch.Tensor]
    return len(objects), sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.timeout(300)
def test_memory_is_flat(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
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
            objects, tensor_bytes = held()
            await lab.train(trainer, WARM_UP, WARM_UP + STEPS, fate)
            objects_now, tensor_bytes_now = held()
            assert objects_now <= objects + UNDER_WAY, f"{objects_now - objects} objects more after {STEPS} steps"
            assert tensor_bytes_now <= 1.02 * tensor_bytes

    asyncio.run(main())

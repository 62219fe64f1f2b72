"""A host that sends NaN or huge values is found out by another; a model that makes them is left alone."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fusion_p2p.capture import Captured, capture
from fusion_p2p.frame import Frame, Kind
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.suspicion import FrameId, Suspicion
from peer.events import RunEvent
from peer.protocol import Suspect
from tests.sim.test_trainer import MINUTE, OPTIMIZER, Data, Lab, batch, captured, expected
from tests.simulated_time import simulate

__all__ = ["captured"]
STEPS, AT = 10, 6


def wild(frame: Frame, factor: float) -> Frame:
    values = np.frombuffer(frame.payload[-32:], dtype="<f4") * np.float32(factor)
    return msgspec.structs.replace(frame, payload=frame.payload[:-32] + values.tobytes())


@MINUTE
@pytest.mark.parametrize("kind", [Kind.ACT, Kind.GRAD])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e9])
def test_who_sends_wild_frames_is_not_trusted_again(
    captured: Captured, tmp_path: Path, kind: Kind, factor: float
) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3) as trainer:
            liar = lab.host(trainer, 1)
            liar.lie = lambda f: wild(f, factor) if (f.kind, f.src, f.tick, f.micro_batch) == (kind, 1, AT, 1) else f

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")

            losses = await lab.train(trainer, 0, STEPS, fate)
            want = expected(captured, trainer.plan.numerics.cuts, STEPS)
            assert losses == want[0] and await lab.hash(trainer, STEPS) == want[1]
            assert liar.peer not in {p.peer for p in trainer.plan.placement}
            quarantined = [h for h in lab.heard if isinstance(h, RunEvent) and h.kind == "quarantined"]
            assert [h.peer for h in quarantined] == [liar.peer] and not trainer._live.may_host(liar.peer)

    simulate(main())


@MINUTE
def test_a_trainer_that_starts_again_hears_of_a_frame_that_is_held_back(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(4)
        async with lab.trainer(3, dies=True) as trainer:
            liar = lab.host(trainer, 1)
            liar.lie = lambda f: (
                wild(f, math.nan) if (f.kind, f.src, f.tick, f.micro_batch) == (Kind.ACT, 1, AT, 1) else f
            )
            await lab.train(trainer, 0, 4)
            await trainer.save(b"at 4")
            await lab.train(trainer, 4, AT)
            trainer._hearing._guardian.hear = lambda reporter, said: None  # type: ignore[method-assign]
            await trainer.release(captured.feed(batch(AT)), training=True)
            while not any(h.named for v in lab.volunteers for h in v.hosted.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with lab.trainer(3, replay=Data(captured, 4).replay()) as again:
            assert again.step == AT + 1 and sum(len(v.adopted) for v in lab.volunteers) == 3
            await lab.train(again, AT + 1, STEPS)
            assert await lab.hash(again, STEPS) == expected(captured, again.plan.numerics.cuts, STEPS)[1]
            assert liar.peer not in {p.peer for p in again.plan.placement} and "quarantined" in lab.kinds()

    simulate(main())


@MINUTE
def test_a_frame_that_never_comes_again_holds_nobody_up(captured: Captured, tmp_path: Path) -> None:
    """A host that names what no stage sends: the next that is really wild is judged all the same."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(5)
        async with lab.trainer(3) as trainer:
            trainer._hearing._guardian._judge_s = 0.5
            liar = lab.host(trainer, 1)
            liar.lie = lambda f: (
                wild(f, math.nan) if (f.kind, f.src, f.tick, f.micro_batch) == (Kind.ACT, 1, AT, 1) else f
            )

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")
                    p = trainer.plan.host(1)
                    what = Suspicion(FrameId(int(Kind.ACT), 0, 1, 1 << 40, 0), b"x" * 16, 1e9, 1.0)
                    said = Suspect(run=trainer._live.run, stage=1, incarnation=p.incarnation, what=what)
                    trainer._hearing.fault(p.peer, said)

            await lab.train(trainer, 0, STEPS, fate)
            await trainer._hearing._guardian._pass(99, FrameId(0, 0, 0, 0, 0))  # of cuts that are over
            assert await lab.hash(trainer, STEPS) == expected(captured, trainer.plan.numerics.cuts, STEPS)[1]
            texts = [h.text for h in lab.heard if isinstance(h, RunEvent) and h.kind == "notice"]
            assert any("was not named again" in text for text in texts) and "quarantined" in lab.kinds()

    simulate(main())


class _Log(torch.nn.Module):
    """Of data with a zero in it the second half makes infinities."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        x = x + torch.log(y.abs())[:, None]
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return ((x[:, 0] - y) ** 2).mean()


@MINUTE
@pytest.mark.parametrize("recover_s", [20.0, 0.0])
def test_a_model_that_makes_infinities_keeps_its_hosts(tmp_path: Path, recover_s: float) -> None:
    """Another volunteer makes the same of it; where none may be asked the first one is believed."""

    def data(step: int) -> dict[str, torch.Tensor]:
        out = batch(step)
        return {**out, "y": torch.where(torch.arange(6) == 3, 0.0, out["y"])} if step == AT else out

    model = capture(_Log(), data(0))

    async def main() -> None:
        lab = Lab(model, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2, recover_s=recover_s) as trainer:
            pending = [await trainer.release(model.feed(data(step)), training=True) for step in range(2)]
            for step in range(2, STEPS):
                await trainer.wait(pending.pop(0))
                pending.append(await trainer.release(model.feed(data(step)), training=True))
            for future in pending:
                await trainer.wait(future)
            cuts = trainer.plan.numerics.cuts
            plain = LocalPipeline(model, optimizer=OPTIMIZER, micro_batches=3, micro_batch_size=2, cuts=cuts)
            for step in range(STEPS):
                plain.train_step(data(step))
            assert await lab.hash(trainer, STEPS) == plain.weights_blake2b()
            kinds = lab.kinds()
            assert "quarantined" not in kinds and "suspect" in kinds and "notice" in kinds
            assert all(trainer._live.may_host(v.peer) for v in lab.volunteers)

    simulate(main())

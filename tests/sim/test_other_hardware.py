"""A stage that is rebuilt on hardware that rounds otherwise: the run goes on, says so, and nobody is blamed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fusion_p2p.capture import Captured, capture
from fusion_p2p.compute import Compute
from fusion_p2p.optim import AdamW
from fusion_p2p.plan import LinkCodec
from fusion_p2p.snapshot import from_bytes
from peer.events import RunEvent
from peer.protocol import StageFault
from tests.sim.test_trainer import MINUTE, Lab, batch, expected
from tests.simulated_time import simulate

OPTIMIZER = AdamW(lr=2e-3, clip_norm=1.0)
STEPS = 30


class Nudged(Compute):
    """Every other number that it makes is one unit in the last place nearer to zero."""

    def forward(self, *args: Any) -> dict[int, torch.Tensor]:
        return {v: _nudged(x) for v, x in super().forward(*args).items()}

    def backward(self, *args: Any) -> dict[int, torch.Tensor | None]:
        return {v: None if x is None else _nudged(x) for v, x in super().backward(*args).items()}


def _nudged(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(x.numel()).view(x.shape) % 2 == 0, torch.nextafter(x, torch.zeros_like(x)), x)


class _Twins(torch.nn.Module):
    """Channels begin as pairs that are equal to the bit: if Top-K keeps one of two, the last bit says which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [torch.nn.Linear(n, 128) for n in (8, 128, 128, 128)]
        self.last = torch.nn.Linear(128, 1)
        with torch.no_grad():
            for layer in layers:
                layer.weight[1::2], layer.bias[1::2] = layer.weight[::2].clone(), layer.bias[::2].clone()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        error: torch.Tensor = self.last(h)[:, 0] - torch.tanh(x[:, 0]) - 0.1 * y
        return (error**2).mean()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(_Twins(), batch(0))


@MINUTE
@pytest.mark.parametrize(
    ("codec", "apart"),
    [("topk-masked:0.254", True), ("transform:3/2", True), ("subspace:64/4", True), ("dense", False), ("int8", False)],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_rebuilt_on_other_hardware(
    captured: Captured, tmp_path: Path, codec: str, apart: bool, lost: int
) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path, OPTIMIZER)
        await lab.fill(4)
        async with lab.trainer(3, compression="none" if codec == "dense" else codec) as trainer:

            async def fate(step: int) -> None:
                if step == 4:
                    victim = lab.host(trainer, lost)
                    for v in lab.volunteers:
                        v.compute = Nudged
                    await victim.kill()

            first = trainer.plan
            losses = await lab.train(trainer, 0, STEPS, fate)
            codecs = tuple(LinkCodec(a, a + 1, codec) for a in range(2) if codec != "dense")
            want = expected(captured, first.numerics.cuts, STEPS, codecs, OPTIMIZER)[0]
            told = [h.text for h in lab.heard if isinstance(h, RunEvent)]
            assert losses[:3] == want[:3] and losses != want
            assert sum(losses[-10:]) == pytest.approx(sum(want[-10:]), rel=0.3) and sum(want[-10:]) < sum(want[:10]) / 2
            assert sum("exact to rounding" in text for text in told) == 1, told
            assert sum("no longer agrees with" in text for text in told) == apart, told
            assert "quarantined" not in lab.kinds() and lab.kinds().count("lost") == 1, told
            alive = [v for v in lab.volunteers if v.alive]
            assert all(trainer._live.may_host(v.peer) for v in alive) and len(alive) == 3
            made = {p.incarnation for p in trainer.plan.placement}
            assert len(made) == 1 if apart else len(made) == 2
            await trainer.save(b"at the end")

    simulate(main())


@MINUTE
def test_a_set_whose_ends_hold_different_axes_is_made_again(captured: Captured, tmp_path: Path) -> None:
    """A host dies while the set is made: the one after it finds other axes than its neighbour's snapshot has."""

    async def main() -> None:
        lab = Lab(captured, tmp_path, OPTIMIZER)
        await lab.fill(4)
        async with lab.trainer(3, compression="transform:3/2") as trainer:
            victim, dying = lab.host(trainer, 0), list[asyncio.Task[None]]()

            def put(data: bytes) -> tuple[str, int]:
                for v in lab.volunteers:
                    v.compute = Nudged
                dying.append(asyncio.create_task(victim.kill()))
                raise OSError("power cut")

            victim.store.put = put  # type: ignore[method-assign, assignment]

            async def fate(step: int) -> None:
                if step == 3:
                    await trainer.save(b"at 4")

            await lab.train(trainer, 0, 8, fate)
            told = [h.text for h in lab.heard if isinstance(h, RunEvent)]
            assert sum("hold different codec/" in text and "every stage goes back" in text for text in told) == 1, told
            assert dying and lab.kinds().count("lost") == 1, told
            manifest = await trainer.save(b"at 8")
            states = [from_bytes(data) for data in lab.folder.snapshots(manifest).values()]
            keys = [k for k in states[0] if k.startswith("codec/") and k in states[1]]
            assert len(keys) == 4 and all(torch.equal(states[0][k], states[1][k]) for k in keys)

    simulate(main())


@MINUTE
def test_stages_that_began_together_have_no_excuse(captured: Captured, tmp_path: Path) -> None:
    """So whoever says so without end rolls nobody back: the accused is replaced, as for any frame that does not fit."""

    async def main() -> None:
        lab = Lab(captured, tmp_path, OPTIMIZER)
        await lab.fill(5)
        async with lab.trainer(3) as trainer:
            accused, reporter = (trainer.plan.host(k) for k in (0, 1))

            async def fate(step: int) -> None:
                if step == 3:
                    said = StageFault(
                        run=trainer._live.run,
                        stage=1,
                        incarnation=reporter.incarnation,
                        code="apart",
                        reason="stage 0: frame names the axes 00, which this end does not hold",
                        peer=accused.peer,
                    )
                    trainer._hearing.fault(reporter.peer, msgspec.structs.replace(said, stage=7))
                    trainer._hearing.fault(reporter.peer, msgspec.structs.replace(said, incarnation=9))
                    assert not trainer._live.lost
                    trainer._hearing.fault(reporter.peer, said)
                    assert not trainer._live.anew and set(trainer._live.lost) == {accused.peer, reporter.peer}

            losses = await lab.train(trainer, 0, 8, fate)
            assert losses == expected(captured, trainer.plan.numerics.cuts, 8, (), OPTIMIZER)[0]
            assert not trainer._live.may_host(accused.peer)

    simulate(main())

"""Models whose shape makes splitting hard: any cut trains like the whole, dropout included."""

from __future__ import annotations

import pytest
import torch

from fusion_p2p import batch as batches
from fusion_p2p.capture import capture
from fusion_p2p.optim import SGD
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.workload import atoms
from tests import model_zoo

NAMES = (
    "t5",  # encoder-decoder, one embedding used three times
    "llama",  # positions computed from a fixed buffer
    "mixtral",  # data-dependent integers
    "unet",  # long skips
    "lstm_cell",  # weights used in every step of a loop
    "reused_block",
    "tied_autoencoder",
    "lora",  # mostly frozen
    "regions",  # no-grad and autocast regions
    "fourier",  # complex values cross cuts
    "mixed",
    "checkpointed",
)
CASES = {c.name: c for c in model_zoo.SUPPORTED}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_any_cut_trains_like_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = CASES[name].build()
    captured = capture(model, batch, loss=loss)
    count = len(atoms(captured.opdag))

    def train(stages: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
        pipeline = LocalPipeline(
            captured,
            optimizer=SGD(lr=0.05, clip_norm=1.0),
            micro_batches=2,
            micro_batch_size=batches.samples(batches.flatten(batch)),
            cuts=tuple(count * k // stages for k in range(1, stages)),
        )
        losses = [pipeline.train_step(batch) for _ in range(2)] + [pipeline.evaluate([batch])]
        return losses, pipeline.state_dict(), sum(len(p.edges_out) for p in pipeline.programs)

    losses, state, _ = train(1)
    for stages in (s for s in (2, 3, 5, 8) if s <= count):
        got, other, edges = train(stages)
        assert edges >= stages - 1
        assert got == pytest.approx(losses, rel=1e-6)
        for key, t in state.items():
            wide = torch.complex128 if t.is_complex() else torch.float64
            difference = (other[key].to(wide) - t.to(wide)).norm()
            assert difference <= 1e-6 * t.to(wide).norm(), (stages, key)

"""bfloat16 compute over float32 master weights learns as float32 does, on the demo's model and text."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from fusion_p2p.capture import capture
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.workload import atoms
from peer import config as configuration
from peer.config import Config
from peer.data_open import open_data
from peer.models import build_model, context_of

DEMO = Path(__file__).parents[2] / "examples" / "gpt2.toml"
WORDS = ("in", "the", "beginning", "was", "word", "and", "with", "people", "of", "land", "light", "day")


def compare(config: Config, folder: Path, steps: int, last: int) -> None:
    """Mean loss of the last steps of two runs over two stages."""
    size, m = config.batch.micro_batch_size, config.batch.micro_batches
    data = open_data(config, folder, context_of(config))
    captured = capture(build_model(config, data), data.train.next_batch(size))
    cuts = (len(atoms(captured.opdag)) // 2,)
    batches = [data.train.next_batch(size * m) for _ in range(steps)]

    def final_loss(dtype: str) -> float:
        pipeline = LocalPipeline(
            captured,
            optimizer=config.optimizer_spec(),
            micro_batches=m,
            micro_batch_size=size,
            cuts=cuts,
            dtype=dtype,
        )
        losses = [pipeline.train_step(batch) for batch in batches]
        assert all(t.dtype == torch.float32 for t in pipeline.state_dict().values() if t.is_floating_point())
        assert losses[-1] < losses[0] - 0.5, "it learns"
        return statistics.fmean(losses[-last:])

    exact, rounded = final_loss("float32"), final_loss("bfloat16")
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)


def test_a_small_model_of_twenty_steps(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(WORDS), (4000,), generator=generator).tolist()
    (tmp_path / "book.txt").write_text(" ".join(WORDS[i] for i in picks))
    config = configuration.parse(
        f"""
        [model]
        family = "gpt2"
        gpt2 = {{ layers = 1, width = 32, heads = 2, context = 16 }}
        [data]
        path = "{tmp_path / "book.txt"}"
        tokenizer = "bytes"
        [batch]
        micro_batches = 2
        micro_batch_size = 4
        [optimizer]
        lr = 1e-2
        warmup = 2
        """
    )
    compare(config, tmp_path, steps=20, last=5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_model_after_200_steps(tmp_path: Path) -> None:
    compare(configuration.load(DEMO), tmp_path, steps=200, last=20)

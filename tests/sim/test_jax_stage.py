"""Stages of one run in two frameworks: JAX beside PyTorch, the same masks, frames and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.optim import SGD
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.workload import atoms
from tests import model_zoo
from tests.unit import stage_models as models
from tests.unit.stage_models import relative

pytest.importorskip("jax", reason="the JAX executor is an extra: pip install 'fusion-p2p[jax]'")
from fusion_p2p.jax_stage import JaxCompute

STEPS = 5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("where", [(1,), (0, 2)], ids=["middle", "ends"])
def test_a_jax_stage_beside_torch_peers(dropout: float, where: tuple[int, ...]) -> None:
    """The ends hold both uses of the tied embedding, the labels and the loss."""
    case = models.gpt2(dropout)
    optimizer = SGD(lr=0.5, momentum=0.9, clip_norm=1.0)
    alone = case.pipeline(3, optimizer=optimizer)
    mixed = case.pipeline(3, optimizer=optimizer, compute=dict.fromkeys(where, JaxCompute))
    batches = [case.batch(0)] * STEPS
    want, got = ([p.train_step(b) for b in batches] + [p.evaluate(batches)] for p in (alone, mixed))
    assert got == pytest.approx(want, rel=1e-5)
    assert want[-1] < want[0] - 0.05, "it learns"
    state, reference = mixed.state_dict(), alone.state_dict()
    everything = [torch.cat([s[n].flatten() for n in sorted(reference)]) for s in (state, reference)]
    assert 0 < relative(*everything) < 1e-5


def test_recomputation_and_a_smaller_last_micro_batch() -> None:
    """Without positions in the batch GPT-2 computes masks and positions from the ids: other operators."""
    captured = model_zoo.sample(model_zoo.SUPPORTED[0]).captured
    cuts = (len(atoms(captured.opdag)) // 2,)

    def losses(**options: Any) -> list[float]:
        pipeline = LocalPipeline(
            captured, optimizer=SGD(lr=0.1), micro_batches=3, micro_batch_size=3, cuts=cuts, **options
        )
        ids = torch.arange(56).reshape(7, 8) % 32
        return [pipeline.train_step({"input_ids": ids, "labels": ids}) for _ in range(3)]

    assert losses(recompute=True, compute={0: JaxCompute, 1: JaxCompute}) == pytest.approx(losses(), rel=1e-5)


def test_what_it_has_not_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"the JAX executor has no .*; host this stage with PyTorch"):
        models.resnet().pipeline(1, compute={0: JaxCompute})
    with pytest.raises(InputError, match="float32, not bfloat16"):
        models.gpt2().pipeline(1, dtype="bfloat16", compute={0: JaxCompute})

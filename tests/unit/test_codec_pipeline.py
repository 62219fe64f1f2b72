"""Codecs inside the pipeline: state, evaluation passes and the probe, on a small model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fusion_p2p.capture import Captured, capture
from fusion_p2p.errors import InputError
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec
from fusion_p2p.probe import even_cuts, ladder, probe
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.workload import atoms

OPTIMIZER = OptimizerSpec(kind="adamw", lr=3e-3)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def batch(seed: int) -> dict[str, torch.Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x[:, :4].sum(1, keepdim=True)}


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(_Mlp(), {k: v[:32] for k, v in batch(0).items()})


def pipeline(captured: Captured, codec: str) -> LocalPipeline:
    cuts = even_cuts(atoms(captured.opdag, 32), 3)
    codecs = tuple(LinkCodec(a, b, codec) for a in range(3) for b in range(a + 1, 3))
    sizes: dict[str, Any] = {"micro_batches": 2, "micro_batch_size": 32}
    return LocalPipeline(captured, optimizer=OPTIMIZER, cuts=cuts, codecs=codecs, **sizes)


@pytest.mark.parametrize("codec", ["transform:2/1", "subspace:16/4"])
def test_an_evaluation_in_between_changes_no_weight(captured: Captured, codec: str) -> None:
    plain, watched = pipeline(captured, codec), pipeline(captured, codec)
    watched.evaluate([batch(99)])
    for s in range(4):
        plain.train_step(batch(s))
        watched.train_step(batch(s))
        watched.evaluate([batch(99)])
    assert plain.weights_blake2b() == watched.weights_blake2b()


def test_the_default_codec_trains_like_dense(captured: Captured) -> None:
    last = {}
    for codec in ("dense", "transform:4/3"):
        p = pipeline(captured, codec)
        losses = [p.train_step(batch(s)) for s in range(30)]
        assert losses[-1] < 0.7 * losses[0]
        last[codec] = sum(losses[-5:])
    assert last["transform:4/3"] == pytest.approx(last["dense"], rel=0.1)


def test_a_probe_measures_bytes_time_and_loss(captured: Captured) -> None:
    ticks = itertools.count()
    found = probe(
        captured,
        [batch(s) for s in range(3)],
        optimizer=OPTIMIZER,
        micro_batches=2,
        micro_batch_size=32,
        clock=lambda: float(next(ticks)),
        codecs=("int8", "rotated:4/4", "topk:0.05"),
    )
    by_name = {m.codec: m for m in found}
    assert by_name["int8"].ratio == pytest.approx(4, rel=0.05)
    assert by_name["rotated:4/4"].ratio > by_name["int8"].ratio
    assert by_name["int8"].error < by_name["rotated:4/4"].error < by_name["topk:0.05"].error < 1
    assert by_name["topk:0.05"].loss_cost > by_name["int8"].loss_cost
    assert by_name["int8"].encode_s_per_element == pytest.approx(2 / 2048)  # two ticks, two directions of 1,024
    assert 0 < by_name["int8"].break_even_bytes_per_s < 1e6
    names = [r.codec for r in ladder(found).rungs]
    assert names[0] == "dense"
    assert names[-1] == "topk:0.05"  # the fewest bytes, whatever they cost


def test_a_probe_without_batches_says_so(captured: Captured) -> None:
    with pytest.raises(InputError, match="no batches"):
        probe(captured, [], optimizer=OPTIMIZER, micro_batches=1, micro_batch_size=32, clock=lambda: 0.0)

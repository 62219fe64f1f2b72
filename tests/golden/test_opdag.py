"""Golden OP-DAG: a change of its bytes is a change of the IR or the opset, and must be meant (version skew)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fusion_p2p.admit import admit
from fusion_p2p.capture import capture, feed
from fusion_p2p.interp import Program
from fusion_p2p.ir import OpDag
from fusion_p2p.seeded import RngKey
from tests import tiny_gpt2

GOLDEN_HASH = "7551ecaae914184e6d7a5698ffeefd3a45133fe407c6b7225a6bb75e67768dfc"
GOLDEN_LOSS = 3.4231393


def _loss(dag: OpDag, training: bool) -> float:
    model, batch = tiny_gpt2.build()
    env = feed(dag, batch, {})
    held = dict(model.named_parameters())
    env.update({p.value: held[p.name] for p in dag.params})
    Program(dag.nodes, [dag.loss])(env, batch=2, training=training, rng=RngKey(1, 2, 3))
    return float(env[dag.loss])


def test_capture_gives_the_golden_bytes() -> None:
    model, batch = tiny_gpt2.build()
    assert capture(model, batch).opdag.to_bytes() == tiny_gpt2.GOLDEN.read_bytes()


def test_golden_runs_and_gives_the_recorded_loss() -> None:
    dag = admit(tiny_gpt2.GOLDEN.read_bytes())
    assert dag.hash == GOLDEN_HASH
    assert msgspec.json.decode(dag.to_bytes(), type=OpDag) == dag
    torch.set_num_threads(1)
    assert _loss(dag, training=True) == pytest.approx(GOLDEN_LOSS, rel=1e-5)
    assert _loss(dag, training=False) != pytest.approx(GOLDEN_LOSS, rel=1e-5)

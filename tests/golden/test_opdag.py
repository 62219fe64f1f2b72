"""Golden OP-DAG: a change of its bytes is a change of the IR or the opset, and must be meant (version skew)."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

from fusion_p2p.admit import admit
from fusion_p2p.capture import capture, feed
from fusion_p2p.interp import Program
from fusion_p2p.ir import OpDag
from fusion_p2p.seeded import RngKey
from tests import model_zoo, tiny_gpt2
from tests.golden import opdags

GOLDEN_HASH = "7551ecaae914184e6d7a5698ffeefd3a45133fe407c6b7225a6bb75e67768dfc"
GOLDEN_LOSS = 3.4231393


def _loss(dag: OpDag, training: bool) -> float:
    model, batch = tiny_gpt2.build()
    env = feed(dag, batch, {})
    held = dict(model.named_parameters())
    env.update({p.value: held[p.name] for p in dag.params})
    Program(dag.nodes, [dag.loss])(env, batch=2, training=training, rng=RngKey(1, 2, 3))
    return float(env[dag.loss].detach())


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


def test_the_operator_table_is_the_golden_one() -> None:
    """An operator that changes or goes breaks graphs that others have kept; one that comes needs a newer peer."""
    known = json.loads(opdags.FIGURES.read_text())["operator table"]
    assert opdags.table_blake2b() == known, "meant? name a new OPSET, then run: python -m tests.golden.opdags"


@pytest.mark.parametrize("case", opdags.cases(), ids=lambda c: c.name)
def test_a_kept_graph_computes_what_it_did(case: model_zoo.Case) -> None:
    """Admitted as it lies there, and the numbers are the recorded ones: losses, gradients, buffers, random tensors."""
    torch.set_num_threads(1)
    dag = admit(opdags.path(case.name).read_bytes())
    want = json.loads(opdags.FIGURES.read_text())[case.name]
    assert opdags.figures(dag) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("case", opdags.cases(), ids=lambda c: c.name)
def test_the_model_is_still_captured_as_kept(case: model_zoo.Case) -> None:
    assert model_zoo.sample(case).captured.opdag.to_bytes() == opdags.path(case.name).read_bytes()

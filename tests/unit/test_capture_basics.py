"""Capture on models so small that it takes a fraction of a second. The survey of real ones is in tests/sim."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fusion_p2p import batch as batches
from fusion_p2p.capture import Captured, capture
from fusion_p2p.errors import CaptureError, InputError
from fusion_p2p.interp import Program
from fusion_p2p.ir import BatchInt, OpDag
from fusion_p2p.seeded import RngKey
from tests import refused_models


class Tokens(nn.Module):
    """Embedding, dropout, batch norm, tied head, an unused and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = F.dropout(self.norm(self.embed(tokens).mean(1)), 0.25, self.training)
        return {"loss": F.cross_entropy(self.head(self.frozen(h)), labels)}


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 11, (size, 5)), "labels": torch.randint(0, 11, (size,))}


@pytest.fixture(scope="module")
def captured() -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Tokens().eval()
    return model, capture(model, batch(3))


def test_what_is_in_the_graph(captured: tuple[nn.Module, Captured]) -> None:
    model, c = captured
    dag = c.opdag
    assert msgspec.json.decode(dag.to_bytes(), type=OpDag) == dag
    assert [(i.name, i.vmin, i.vmax) for i in dag.inputs] == [("tokens", 0, 10), ("labels", -100, 10)]
    assert dag.aliases == {"head.weight": "embed.weight"}
    assert {p.name: p.trainable for p in dag.params} == {
        n: p.requires_grad for n, p in model.named_parameters() if n != "head.weight"
    }
    assert [b.name for b in dag.buffers if b.update is not None] == [n for n, _ in model.named_buffers()]
    assert set(c.state) | set(dag.aliases) == set(model.state_dict())
    assert dag.values[dag.inputs[0].value].shape == (BatchInt(1, 0), 5)
    assert not model.training and not model.norm.training, "capture left the module in another mode"


def test_state_shares_the_modules_storage(captured: tuple[nn.Module, Captured]) -> None:
    model, c = captured
    assert all(c.state[n].data_ptr() == p.data_ptr() for n, p in model.named_parameters() if n in c.state)


def _env(c: Captured, data: Any, state: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    env = c.feed(data)
    env.update({p.value: state[p.name].detach().requires_grad_(p.trainable) for p in c.opdag.params})
    env.update({b.value: state[b.name] for b in c.opdag.buffers})
    return env


def test_any_batch_size_in_eval_equals_the_module(captured: tuple[nn.Module, Captured]) -> None:
    model, c = captured
    program = Program(c.opdag.nodes, [c.opdag.loss])
    for size in (1, 2, 9):
        data = batch(size)
        env = _env(c, data, dict(c.state))
        program(env, batch=size, training=False, rng=RngKey())
        assert torch.equal(env[c.opdag.loss], model(**data)["loss"])


def test_unused_parameters_have_no_gradient(captured: tuple[nn.Module, Captured]) -> None:
    _, c = captured
    env = _env(c, batch(4), dict(c.state))
    held = {p.name: env[p.value] for p in c.opdag.params if p.trainable}
    Program(c.opdag.nodes, [c.opdag.loss])(env, batch=4, training=True, rng=RngKey(1))
    grads = torch.autograd.grad(env[c.opdag.loss], list(held.values()), allow_unused=True)
    assert {n for n, g in zip(held, grads, strict=True) if g is None} == {"unused.weight", "unused.bias"}


def test_feed_refuses_what_the_graph_was_not_captured_for(captured: tuple[nn.Module, Captured]) -> None:
    _, c = captured
    good = batch(2)
    for bad, words in (
        ({"tokens": good["tokens"]}, "labels"),
        (good | {"tokens": good["tokens"].float()}, "float32"),
        (good | {"labels": torch.tensor([3, 11])}, "11"),
        (
            good | {"tokens": good["tokens"][:, :4]},
            r"'tokens' has shape \(2, 4\), captured as \(samples, 5\); pad or cut",
        ),
    ):
        with pytest.raises(InputError, match=words) as refused:
            c.feed(bad)
        assert "\n" not in str(refused.value)


def test_constants_of_the_batch_are_checked() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
            return self.a(x).mean() * scale

    c = capture(Scaled(), {"x": torch.randn(2, 3), "scale": 3})
    assert c.constants == {"scale": 3}
    c.feed({"x": torch.randn(5, 3), "scale": 3})
    with pytest.raises(InputError, match="scale"):
        c.feed({"x": torch.randn(5, 3), "scale": 4})


@pytest.mark.parametrize(
    "name", ["branch", "python_dice", "counter", "custom_function", "assigned_buffer", "tensor_hook"]
)
def test_refused(name: str) -> None:
    case = next(c for c in refused_models.CASES if c.name == name)
    with pytest.raises(CaptureError, match=case.says):
        capture(case.build(), torch.randn(3, 5), loss=lambda output, _: output.mean())


def test_no_loss() -> None:
    with pytest.raises(CaptureError, match="loss"):
        capture(nn.Linear(5, 2), torch.randn(3, 5))
    with pytest.raises(CaptureError, match="shape"):
        capture(nn.Linear(5, 2), torch.randn(3, 5), loss=lambda output, _: output)
    with pytest.raises(InputError, match="sample"):
        capture(nn.Linear(5, 2), {"x": 3})


def test_module_and_generators_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    example = torch.randn(3, 5)
    state = torch.get_rng_state()
    capture(model, example, loss=lambda output, _: output.square().mean())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_batch_structures() -> None:
    tree = {"a": torch.ones(2, 1), "b": {"c": [torch.zeros(2), None], "n": 4}}
    assert list(batches.flatten(tree)) == ["a", "b.c.0"]
    assert batches.constants(tree) == {"b.c.1": None, "b.n": 4}
    rebuilt = batches.rebuild(tree, {"a": torch.full((3, 1), 2.0), "b.c.0": torch.ones(3)})
    assert rebuilt["a"].shape == (3, 1) and rebuilt["b"]["c"][0].sum() == 3 and rebuilt["b"]["n"] == 4
    assert list(batches.flatten(torch.ones(2))) == ["0"]


def test_public_names_resolve_to_functions() -> None:
    import fusion_p2p.capture  # must not hide the function of that name

    assert callable(fusion_p2p.capture)
    assert set(fusion_p2p.__all__) <= set(dir(fusion_p2p))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = fusion_p2p.nothing_like_this

"""The yardstick of the cluster tests: tiny models, and the plain single-process loop that a swarm must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

VOCAB, CONTEXT = 128, 16


def gpt2(layers: int = 4, width: int = 32, dropout: float = 0.0) -> torch.nn.Module:
    """A GPT-2 with tied embeddings, the same weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    settings = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: torch.nn.Module = GPT2LMHeadModel(settings)
    return model.train()


def resnet() -> torch.nn.Module:
    """A ResNet with batch norm; the same weights each time."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(7)
    settings = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=4,
        problem_type="single_label_classification",
    )
    model: torch.nn.Module = ResNetForImageClassification(settings)
    return model.train()


def token_batches(count: int, samples: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, VOCAB, (samples, CONTEXT), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def image_batches(count: int, samples: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "pixel_values": torch.randn(samples, 1, 16, 16, generator=generator),
            "labels": torch.randint(0, 4, (samples,), generator=generator),
        }
        for _ in range(count)
    ]


def train(
    model: torch.nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    micro_batch_size: int,
    clip_norm: float | None = None,
) -> list[float]:
    """The loss of each step: micro-batches in order, gradients summed, one update."""
    losses = []
    for batch in batches:
        total = len(next(iter(batch.values())))
        loss_sum = 0.0
        optimizer.zero_grad()
        for start in range(0, total, micro_batch_size):
            part = {k: v[start : start + micro_batch_size] for k, v in batch.items()}
            share = len(next(iter(part.values()))) / total
            loss: torch.Tensor = model(**part).loss
            (loss * share).backward()
            loss_sum += float(loss.detach()) * share
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss_sum)
    return losses


def train_in_our_order(
    model: torch.nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
    *,
    micro_batch_size: int,
    clip_norm: float,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of a GPT-2 trained as a swarm trains it, to the last bit.

    The two uses of the tied embedding are kept apart until the end of the step, then head plus table; the norm is a sum
    of squares in float64, by name.
    """
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    table, head = "transformer.wte.weight", "lm_head.weight"
    stepper, losses = optimizer(params.values()), []
    for batch in batches:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        leaves[head] = params[table].detach().requires_grad_()
        total, samples = 0.0, len(batch["input_ids"])
        for start in range(0, samples, micro_batch_size):
            part = {k: v[start : start + micro_batch_size] for k, v in batch.items()}
            size = len(part["input_ids"])
            loss = torch.func.functional_call(model, leaves, kwargs=part, tie_weights=False).loss
            loss.backward(torch.tensor(size / samples))
            total += float(loss.detach()) * size
        grads = {n: leaves[n].grad for n in params}
        grads[table] = leaves[head].grad + leaves[table].grad
        norm = sum(float(torch.linalg.vector_norm(grads[n], dtype=torch.float64)) ** 2 for n in sorted(grads)) ** 0.5
        for n, p in params.items():
            p.grad = grads[n] * min(1.0, clip_norm / (norm + 1e-6))
        stepper.step()
        losses.append(total / samples)
    return losses, {n: p.detach() for n, p in params.items()}


def without_keys(name: str, t: torch.Tensor) -> torch.Tensor:
    """A GPT-2's tensor without the biases of its attention keys: they shift all scores of a query alike, so that their
    gradient is rounding noise, which Adam scales up."""
    third = len(t) // 3
    return torch.cat([t[:third], t[2 * third :]]) if name.endswith("attn.c_attn.bias") else t


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], leave_out: Sequence[str] = ()) -> float:
    """Norm of all differences over the norm of `theirs`, floating-point tensors only."""
    square = whole = 0.0
    for name, t in theirs.items():
        if t.is_floating_point() and not any(part in name for part in leave_out):
            square += float((ours[name].double() - t.double()).square().sum())
            whole += float(t.double().square().sum())
    return (square / whole) ** 0.5

"""Small models, captured once, and the plain loops that stages are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from fusion_p2p.capture import Captured, capture
from fusion_p2p.optim import AdamW
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.workload import atoms


@dataclass(frozen=True)
class Case:
    """`model` builds a fresh module with the weights that `captured` holds; `batch(step)` is a global batch."""

    captured: Captured
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    micro_batches: int
    micro_batch_size: int

    @property
    def atoms(self) -> int:
        return len(atoms(self.captured.opdag))

    def cuts(self, stages: int) -> tuple[int, ...]:
        return tuple(self.atoms * k // stages for k in range(1, stages))

    def pipeline(self, stages: int, **options: Any) -> LocalPipeline:
        given = {
            "optimizer": AdamW(lr=1e-3, clip_norm=1.0),
            "micro_batches": self.micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "cuts": self.cuts(stages),
        }
        return LocalPipeline(self.captured, **(given | options))


def _case(make: Callable[[], nn.Module], batch: Callable[[int], Any], m: int, size: int, **options: Any) -> Case:
    return Case(capture(make(), batch(0), **options), make, batch, m, size)


@functools.cache
def gpt2(dropout: float = 0.0) -> Case:
    """Two layers, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=12, vocab_size=50, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train()

    def batch(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids}

    return _case(make, batch, 4, 2)


@functools.cache
def resnet() -> Case:
    """Batch norm with running statistics and counters."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        return ResNetForImageClassification(config).train()

    def batch(step: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(step)
        return {
            "pixel_values": torch.randn(6, 1, 16, 16, generator=g),
            "labels": torch.randint(0, 3, (6,), generator=g),
        }

    return _case(make, batch, 2, 3)


class SkipNet(nn.Module):
    """A long skip, a value read in four places, a layer used three times, dropout, batch norm, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.mid = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        a = self.norm(self.mid[0](h)).relu()
        b = self.mid[1](self.drop(a)) + h
        c = self.mid[2](b).tanh() + self.mid[0](a)
        d = self.mid[3](c) * h
        return self.last(torch.cat([self.mid[0](d), h], 1))


def _cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[-1])


class _WithTarget(nn.Module):
    """A batch (x, y) whose y only the loss reads."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@functools.cache
def skip_net() -> Case:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return _WithTarget(SkipNet().train())

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(step)
        return torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)

    return _case(make, batch, 3, 3, loss=_cross_entropy)


def frozen(case: Case, prefix: str) -> Case:
    """The same model with the parameters of this prefix frozen."""
    dag = case.captured.opdag
    params = tuple(msgspec.structs.replace(p, trainable=not p.name.startswith(prefix)) for p in dag.params)
    return replace(case, captured=replace(case.captured, opdag=msgspec.structs.replace(dag, params=params)))


def rows(batch: Any, start: int, size: int) -> Any:
    """Samples start..start+size-1 of a batch of tensors."""
    if isinstance(batch, dict):
        return {k: t[start : start + size] for k, t in batch.items()}
    return tuple(t[start : start + size] for t in batch)


def samples(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def plain_loop(case: Case, steps: int, loss: Callable[[Any, Any], torch.Tensor]) -> tuple[list[float], nn.Module]:
    """What a user writes without this project: AdamW(1e-3), clipping at 1, gradients accumulated over micro-batches."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        whole = case.batch(step)
        total = samples(whole)
        optimizer.zero_grad()
        mean = 0.0
        for start in range(0, total, case.micro_batch_size):
            part = rows(whole, start, case.micro_batch_size)
            output = model(**part) if isinstance(part, dict) else model(*part)
            value = loss(output, part)
            share = samples(part) / total
            (value * share).backward()
            mean += float(value.detach()) * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean)
    return losses, model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))

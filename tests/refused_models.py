"""Models that must be refused, each with what the one-line reason must say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Refused(NamedTuple):
    """`says` is a regular expression that the CaptureError must match; each names a line of this file too."""

    name: str
    about: str
    build: Callable[[], nn.Module]
    says: str


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.n = 0


class Branch(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) if x.sum() > 0 else self.a(-x)


class Cond(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t * 2.0, lambda t: t - 1.0, (self.a(x),))


class Item(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) * x.abs().max().item()


class BooleanMask(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        return h[h > 0]


class NonZero(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x).sum() + torch.nonzero(x > 0).float().sum()


class Unknown(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.linalg.svd(self.a(x)).S


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3.0


class CustomFunction(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return _Double.apply(self.a(x))


class PythonDice(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) * random.random()


class NumpyDice(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) * float(np.random.rand())


class PrivateDice(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) * self.dice.random()


class Counter(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        return self.a(x) * (1.0 if self.n < 2 else 2.0)


class Assigned(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return h - self.ema


class InputWrite(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(2.0)
        return self.a(x)


class BatchBranch(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        return h.relu() if x.shape[0] % 2 else h.tanh()


class BatchFloat(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x).sum() * (1.0 / x.shape[0])


class BatchSquare(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        return (h @ h.T).reshape(x.shape[0] ** 2)


class Generator(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) + torch.rand(4, generator=torch.Generator().manual_seed(0))


class NaNLoss(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) * float("nan")


def _module_hook() -> nn.Module:
    model = _Plain()
    model.a.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2.0 if gi[0] is not None else None,))
    return model


def _tensor_hook() -> nn.Module:
    model = _Plain()
    model.a.weight.register_hook(lambda g: g * 2.0)
    return model


class _Plain(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(self.first(x))


class AlwaysDropout(_Base):
    def forward(self, x: torch.Tensor) -> Any:
        return F.dropout(self.a(x), 0.5, training=True)


CASES = (
    Refused("branch", "a Python branch on a tensor's value (use torch.where)", Branch, r"use torch.where"),
    Refused("cond", "torch.cond (use torch.where)", Cond, r"use torch.where|with torch.where"),
    Refused("item", ".item() and other Python numbers read from tensors", Item, r"tensor's value; use torch.where"),
    Refused("boolean_mask", "results whose shape depends on data (boolean masks)", BooleanMask, r"mask of fixed shape"),
    Refused("nonzero", "nonzero, unique, masked_select", NonZero, r"mask of fixed shape"),
    Refused("unknown_operator", "operators outside the table (here: svd)", Unknown, r"linalg_svd .*SUPPORT.md lists"),
    Refused(
        "custom_function",
        "a custom autograd.Function with a backward of its own (write it with plain operators)",
        CustomFunction,
        r"gradient of 'a.*'_Double' cannot travel; write it with plain operators",
    ),
    Refused("python_dice", "Python's own random numbers (draw with torch)", PythonDice, r"draw with torch"),
    Refused("numpy_dice", "numpy's random numbers (draw with torch)", NumpyDice, r"draw with torch"),
    Refused("private_dice", "a private random generator in the module", PrivateDice, r"'dice' .*draw with torch"),
    Refused(
        "counter", "a Python counter that changes the arithmetic (make it a buffer)", Counter, r"'n' .*in a buffer"
    ),
    Refused(
        "assigned_buffer",
        "a buffer assigned instead of updated in place",
        Assigned,
        r"'ema' is assigned; update it in place",
    ),
    Refused("input_write", "writing into the input in place (clone it first)", InputWrite, r"input in place; clone it"),
    Refused("batch_branch", "a branch on the batch size", BatchBranch, r"with 4 samples than with 3 .*; remove it"),
    Refused("batch_float", "a Python float computed from the batch size", BatchFloat, r"use tensor.mean\(\)"),
    Refused(
        "batch_square",
        "sizes that are no linear function of the batch size",
        BatchSquare,
        r"sizes must be the batch size times a number",
    ),
    Refused("generator", "an explicit torch.Generator", Generator, r"Generator cannot travel; draw without one"),
    Refused("nan_loss", "the number NaN in the model", NaNLoss, r"the number nan"),
    Refused(
        "module_hook",
        "backward hooks that change gradients (do their work in forward)",
        _module_hook,
        r"gradient of 'first.*hook of 'a' cannot travel; do its work in forward",
    ),
    Refused(
        "tensor_hook", "gradient hooks on parameters", _tensor_hook, r"'a.weight' has a gradient hook.*; remove it"
    ),
    Refused("always_dropout", "dropout that stays on in eval mode", AlwaysDropout, r"pass training=self.training"),
)

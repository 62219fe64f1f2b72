"""Operators of our own: those that look at the mode, draw seeded randomness, or make tensors on the local device.

Each takes the interpreter's `Ctx` first. Arithmetic follows what PyTorch's own CPU kernels do step by step, so that a
module whose random source is replaced by ours gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusion_p2p import seeded
from fusion_p2p.ops_table import words
from fusion_p2p.seeded import RngKey


class Ctx:
    """What an operator may know besides its arguments. `site` is set before each call."""

    __slots__ = ("device", "rng", "site", "training")

    def __init__(self, training: bool, rng: RngKey, device: torch.device) -> None:
        self.training = training
        self.rng = rng
        self.device = device
        self.site = 0

    def keep(self, shape: Sequence[int], p: float, like: torch.Tensor) -> torch.Tensor:
        """0/1 mask of `like`'s dtype and device, 1 with probability 1 - p."""
        mask = seeded.bernoulli(self.rng, self.site, tuple(shape), 1.0 - p)
        return mask.to(device=like.device, non_blocking=True).to(like.dtype)


_ALPHA = 1.7580993408473766  # SELU's lambda * alpha: the value alpha dropout sends dropped units to


def _feature_shape(x: torch.Tensor) -> tuple[int, ...]:
    if x.dim() < 2:
        raise ValueError(f"feature dropout needs 2 dimensions, got {x.dim()}")
    return (x.shape[0], x.shape[1]) + (1,) * (x.dim() - 2)


def _scaled(ctx: Ctx, x: torch.Tensor, p: float, shape: Sequence[int]) -> torch.Tensor:
    if not ctx.training or p == 0.0 or x.numel() == 0:
        return x
    if p == 1.0:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return x * ctx.keep(shape, p, x).div_(1.0 - p)


def _alpha(ctx: Ctx, x: torch.Tensor, p: float, shape: Sequence[int]) -> torch.Tensor:
    if not ctx.training or p == 0.0 or x.numel() == 0:
        return x
    if p == 1.0:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    noise = ctx.keep(shape, p, x)
    a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
    shift = noise.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return x * noise.mul_(a) + shift


def dropout(ctx: Ctx, x: torch.Tensor, p: float) -> torch.Tensor:
    """Zero each element with probability p, scale the rest by 1/(1-p); identity in eval."""
    return _scaled(ctx, x, p, x.shape)


def feature_dropout(ctx: Ctx, x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of whole channels (dimension 1); identity in eval."""
    return _scaled(ctx, x, p, _feature_shape(x))


def alpha_dropout(ctx: Ctx, x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout that keeps mean and variance under SELU (Klambauer et al. 2017); identity in eval."""
    return _alpha(ctx, x, p, x.shape)


def feature_alpha_dropout(ctx: Ctx, x: torch.Tensor, p: float) -> torch.Tensor:
    """Alpha dropout of whole channels; identity in eval."""
    return _alpha(ctx, x, p, _feature_shape(x))


def _sdpa_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, torch.full((), -math.inf, dtype=q.dtype, device=q.device))
    return mask


def sdpa(
    ctx: Ctx,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention over (..., length, head size) with seeded dropout on the weights; fused attention in eval.

    Follows PyTorch's unfused path: the scale is split evenly between query and key for stability.
    """
    if not ctx.training or p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    root = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = _sdpa_mask(query, key, attn_mask, is_causal)
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = torch.ops.aten._safe_softmax.default(scores.add_(mask), -1)
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(_scaled(ctx, weights, p, weights.shape), value)


def batch_norm(
    ctx: Ctx,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalised, new running mean, new running variance); in eval the running statistics, unchanged, are used."""
    if not ctx.training:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        return y, running_mean, running_var
    mean, var = running_mean.clone(), running_var.clone()
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


def batch_norm_frozen(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Batch norm kept in eval mode by the model itself: running statistics in both modes."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


def batch_norm_local(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Batch norm without running statistics (instance norm's core): the batch's own in both modes."""
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)


def rand(ctx: Ctx, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uniform on [0, 1)."""
    return seeded.rand(ctx.rng, ctx.site, tuple(size), dtype).to(ctx.device)


def randn(ctx: Ctx, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal."""
    return seeded.randn(ctx.rng, ctx.site, tuple(size), dtype).to(ctx.device)


def randint(ctx: Ctx, low: int, high: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Integers in [low, high)."""
    return seeded.randint(ctx.rng, ctx.site, tuple(size), low, high, dtype).to(ctx.device)


def bernoulli(ctx: Ctx, prob: torch.Tensor) -> torch.Tensor:
    """0/1 of `prob`'s shape and dtype, 1 with the given probabilities. No gradient."""
    unit = seeded.rand(ctx.rng, ctx.site, tuple(prob.shape), torch.float64).to(prob.device)
    return (unit < prob.detach()).to(prob.dtype)


def bernoulli_like(ctx: Ctx, x: torch.Tensor, p: float) -> torch.Tensor:
    """0/1 of `x`'s shape and dtype, 1 with probability p. No gradient."""
    return ctx.keep(x.shape, 1.0 - p, x)


def detach(x: torch.Tensor) -> torch.Tensor:
    """The same value, no gradient."""
    return x.detach()


def arange(ctx: Ctx, start: float, end: float, step: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(start, end, step, dtype=dtype, device=ctx.device)


def full(ctx: Ctx, size: Sequence[int], fill_value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(size), fill_value, dtype=dtype, device=ctx.device)


def eye(ctx: Ctx, n: int, m: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.eye(n, m, dtype=dtype, device=ctx.device)


def linspace(ctx: Ctx, start: float, end: float, steps: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(start, end, steps, dtype=dtype, device=ctx.device)


def scalar_tensor(ctx: Ctx, value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=ctx.device)


def _recurrent(kernel: Any, pair: bool) -> Callable[..., Any]:
    def run(
        ctx: Ctx,
        x: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        biases: bool,
        layers: int,
        both: bool,
        first: bool,
    ) -> Any:
        """PyTorch's recurrent layers without dropout: (output, last state...); `first`: samples are dimension 0."""
        hx = list(state) if pair else state[0]
        return kernel(x[0], hx, list(weights), biases, layers, 0.0, ctx.training, both, first)

    return run


def by_mode(*values: torch.Tensor) -> torch.Tensor:
    """(value in training, value in eval); the interpreter passes only the one that its mode takes."""
    return values[0]


OWN: Mapping[str, Callable[..., Any]] = {
    "aten.arange": arange,
    "aten.eye": eye,
    "aten.full": full,
    "aten.linspace": linspace,
    "aten.scalar_tensor": scalar_tensor,
    "fusion.alpha_dropout": alpha_dropout,
    "fusion.batch_norm": batch_norm,
    "fusion.batch_norm_frozen": batch_norm_frozen,
    "fusion.batch_norm_local": batch_norm_local,
    "fusion.bernoulli": bernoulli,
    "fusion.bernoulli_like": bernoulli_like,
    "fusion.by_mode": by_mode,
    "fusion.detach": detach,
    "fusion.dropout": dropout,
    "fusion.feature_alpha_dropout": feature_alpha_dropout,
    "fusion.feature_dropout": feature_dropout,
    "fusion.gru": _recurrent(torch.ops.aten.gru.input, False),
    "fusion.lstm": _recurrent(torch.ops.aten.lstm.input, True),
    "fusion.rnn_relu": _recurrent(torch.ops.aten.rnn_relu.input, False),
    "fusion.rnn_tanh": _recurrent(torch.ops.aten.rnn_tanh.input, False),
    "fusion.rand": rand,
    "fusion.randint": randint,
    "fusion.randn": randn,
    "fusion.sdpa": sdpa,
}
NO_CTX = frozenset({"fusion.by_mode", "fusion.detach", "fusion.batch_norm_frozen", "fusion.batch_norm_local"})
DROPOUTS = words(  # identity in eval: they draw in training only
    "fusion.alpha_dropout fusion.dropout fusion.feature_alpha_dropout fusion.feature_dropout fusion.sdpa"
)
SEEDED = DROPOUTS | words("fusion.bernoulli fusion.bernoulli_like fusion.rand fusion.randint fusion.randn")

"""A second executor of the same OP-DAG, in JAX: remote differentiation does not depend on the framework.

`JaxCompute` stands where `Compute` stands in a `Stage`. The stage's operators become one compiled JAX function and its
vector-Jacobian product; frames, sums over uses, optimizer and snapshots stay as they are, so a JAX stage works beside
PyTorch ones and agrees to rounding (XLA fuses and orders sums otherwise). Random masks come from `seeded`: the same
ones. Only what GPT-2 needs is here; another operator is refused by name.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusion_p2p import seeded
from fusion_p2p.compute import Compute, MicroBatch, Tensors
from fusion_p2p.errors import InputError
from fusion_p2p.interp import bind, returns_many
from fusion_p2p.ir import Node, OpDag, Ref
from fusion_p2p.seeded import RngKey
from fusion_p2p.split import StageProgram

try:
    jax: Any = importlib.import_module("jax")
except ImportError as e:
    raise InputError("the JAX executor needs a package: pip install 'fusion-p2p[jax]'") from e
jnp: Any = importlib.import_module("jax.numpy")

Array = Any
_DTYPES = {"float32": "float32", "int64": "int32", "int32": "int32", "bool": "bool"}  # XLA's 64-bit mode stays off


def _dtype(d: torch.dtype) -> Any:
    return jnp.dtype(_DTYPES[str(d).removeprefix("torch.")])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _split(x: Array, size: int, dim: int = 0) -> list[Array]:
    return [_slice(x, dim, at, at + size) for at in range(0, x.shape[dim], size)]


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.concatenate([x for x in tensors if x.shape != (0,)], dim)  # PyTorch skips such, of any other rank too


def _expand(x: Array, size: Sequence[int]) -> Array:
    lead = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - lead] if n == -1 else n for i, n in enumerate(size)])


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """`pad` names (before, after) of the last dimension first."""
    if mode != "constant":
        raise InputError(f"the JAX executor has no aten.pad of mode {mode!r}; host this stage with PyTorch")
    pairs = [(0, 0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return jax.lax.pad(x, jnp.asarray(value or 0, x.dtype), pairs)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> Array:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    centred = x - x.mean(axes, keepdims=True)
    out = centred * jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    out = x @ weight.T
    return out if bias is None else out + bias


def _addmm(bias: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (a @ b)


def _embedding(weight: Array, ids: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False) -> Array:
    if padding_idx >= 0 or scale_grad_by_freq:
        raise InputError("the JAX executor has no aten.embedding with padding_idx; host this stage with PyTorch")
    return weight[ids]


def _cross_entropy(
    logits: Array, target: Array, weight: Array | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:  # fmt: skip
    """Mean over the targets that are not `ignore_index`; classes lie in dimension 1, or 0 of a single sample."""
    if weight is not None or reduction != 1 or label_smoothing or logits.ndim != 2:
        raise InputError("the JAX executor has no such aten.cross_entropy_loss; host this stage with PyTorch")
    counted = target != ignore_index
    chosen = jnp.where(counted, target, 0)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), chosen[:, None], axis=1)[:, 0]
    return -jnp.where(counted, log_p, 0.0).sum() / counted.sum()


def _scaled(kept: Array | None, x: Array, p: float) -> Array:
    """`kept`: 0/1 mask; None drops nothing."""
    return x if kept is None else x * (kept / (1.0 - p))


def _sdpa(
    kept: Array | None,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Array:
    """Attention over (..., length, head size); a query that may look nowhere gives zeros, as in PyTorch."""
    if gqa:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = (q @ jnp.swapaxes(k, -2, -1)) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None and mask.dtype == bool:
        weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0.0)
    else:
        weights = jax.nn.softmax(scores if mask is None else scores + mask, axis=-1)
    return _scaled(kept, weights, p) @ v


def _sdpa_dry(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """The opset admits p = 0 alone here."""
    return _sdpa(None, q, k, v, mask, p, causal, scale, enable_gqa)


_MASKED: Mapping[str, Callable[..., Any]] = {"fusion.dropout": _scaled, "fusion.sdpa": _sdpa}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "aten.add.Tensor": lambda x, y, *, alpha=1: x + alpha * y,
    "aten.addmm": _addmm,
    "aten.arange": lambda start, end, step, dtype: jnp.arange(start, end, step, _dtype(dtype)),
    "aten.bitwise_and.Tensor": lambda x, y: x & y,
    "aten.cat": _cat,
    "aten.clone": lambda x, *, memory_format=None: x,
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.cumsum": lambda x, dim: jnp.cumsum(x, dim),
    "aten.diff": lambda x, n=1, dim=-1, prepend=None, append=None: jnp.diff(x, n, dim, prepend, append),
    "aten.embedding": _embedding,
    "aten.eq.Tensor": lambda x, y: x == y,
    "aten.expand": _expand,
    "aten.full": lambda size, value, dtype: jnp.full(tuple(size), value, _dtype(dtype)),
    "aten.index.Tensor": _index,
    "aten.layer_norm": _layer_norm,
    "aten.le.Tensor": lambda x, y: x <= y,
    "aten.linear": _linear,
    "aten.mul.Tensor": lambda x, y: x * y,
    "aten.ne.Scalar": lambda x, y: x != y,
    "aten.pad": _pad,
    "aten.pow.Tensor_Scalar": lambda x, y: x ** (int(y) if float(y).is_integer() else y),
    "aten.reshape": lambda x, shape: x.reshape(tuple(shape)),
    "aten.scaled_dot_product_attention": _sdpa_dry,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.sub.Tensor": lambda x, y, *, alpha=1: x - alpha * y,
    "aten.tanh": lambda x: jnp.tanh(x),
    "aten.transpose.int": lambda x, a, b: jnp.swapaxes(x, a, b),
    "aten.unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "fusion.detach": lambda x: jax.lax.stop_gradient(x),
}
OPERATORS = frozenset((*_PLAIN, *_MASKED))


def _to_jax(t: torch.Tensor) -> Array:
    array = t.detach().cpu().numpy()
    return jnp.asarray(array.astype(_DTYPES[str(array.dtype)]))


def _to_torch(x: Array) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(x).clone()


class _Bridge(torch.autograd.Function):
    """JAX's vector-Jacobian product as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[list[Array]], Any], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.vjp = jax.vjp(run, [_to_jax(x) for x in leaves])
        return tuple(_to_torch(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (found,) = ctx.vjp([_to_jax(g) for g in grads])
        return None, *(_to_torch(g) for g in found)


_COMPILED: dict[tuple[Any, ...], Any] = {}  # a trial step compiles what the stage then runs


class JaxCompute(Compute):
    """A stage's tensors, its operators run by JAX in float32. InputError names an operator or type it has not."""

    def __init__(self, dag: OpDag, program: StageProgram, *, dtype: str, device: torch.device, recompute: bool) -> None:
        super().__init__(dag, program, dtype=dtype, device=device, recompute=recompute)
        if dtype != "float32":
            raise InputError(f"the JAX executor computes in float32, not {dtype}; host this stage with PyTorch")
        for node in self._nodes:
            lacks = [dag.values[o].dtype for o in node.outs if o >= 0 and dag.values[o].dtype not in _DTYPES]
            if node.op not in OPERATORS or lacks:
                what = node.op if node.op not in OPERATORS else f"{node.op} of {lacks[0]}"
                raise InputError(f"the JAX executor has no {what}; host this stage with PyTorch")
        self._kept = list(dict.fromkeys([*self._out, *self._updates.values()]))
        self._same = (dag.hash, program.nodes, tuple(self._kept))  # stages alike in this share what is compiled

    def _evaluate(
        self, micro_batch: MicroBatch, received: Tensors, buffers: Tensors, *, grad: bool
    ) -> dict[int, torch.Tensor]:
        env = {**self._consts, **buffers, **self._leaves, **micro_batch.data, **received}
        size = micro_batch.size
        key = (*self._same, size)
        if key not in _COMPILED:
            if len(_COMPILED) >= 16:  # stages of this process, each at two sizes
                _COMPILED.clear()
            _COMPILED[key] = jax.jit(_function(self._nodes, self._dag, self._kept, size))  # traced when called
        function = _COMPILED[key]
        wanted = [v for v, x in env.items() if grad and x.requires_grad]
        fixed = {v: _to_jax(x) for v, x in env.items() if v not in wanted}
        masks = self._masks(size, micro_batch.rng) if micro_batch.training else {}

        def run(leaves: list[Array]) -> list[Array]:
            out: list[Array] = function(dict(zip(wanted, leaves, strict=True)), fixed, masks)
            return out

        outputs = _Bridge.apply(run, *(env[v] for v in wanted)) if wanted else map(_to_torch, run([]))  # type: ignore[no-untyped-call]
        return dict(zip(self._kept, outputs, strict=True))

    def _masks(self, batch: int, rng: RngKey) -> dict[int, Array]:
        """Site -> 0/1 mask of each dropout, as PyTorch's executor draws it."""
        out = {}
        for node in self._nodes:
            p = _probability(node)
            if p > 0.0 and node.outs[0] >= 0:
                shape = self._dag.values[node.outs[0]].at(batch)
                if node.op == "fusion.sdpa" and isinstance(node.args[1], Ref):
                    shape = (*shape[:-1], self._dag.values[node.args[1].id].at(batch)[-2])
                out[node.site] = jnp.asarray(seeded.bernoulli(rng, node.site, shape, 1.0 - p).numpy(), "float32")
        return out


def _function(nodes: Sequence[Node], dag: OpDag, kept: Sequence[int], batch: int) -> Callable[..., list[Array]]:
    """(leaves, fixed values, masks by site) -> what is kept; traced once with masks and once without."""

    def run(leaves: Mapping[int, Array], fixed: Mapping[int, Array], masks: Mapping[int, Array]) -> list[Array]:
        env = {**fixed, **leaves}
        for node in nodes:
            args, kwargs = bind(node, batch, env.__getitem__)
            if node.op in _MASKED:
                out = _MASKED[node.op](masks.get(node.site), *args, **kwargs)
            else:
                out = _PLAIN[node.op](*args, **kwargs)
            many = returns_many(node.op) or len(node.outs) > 1
            for v, x in zip(node.outs, out if many else [out], strict=True):
                if v >= 0:
                    env[v] = x.astype(_DTYPES[dag.values[v].dtype])
        return [env[v] for v in kept]

    return run


def _probability(node: Node) -> float:
    """Of dropping, in the operators that drop."""
    where = {"fusion.dropout": 1, "fusion.sdpa": 4}.get(node.op)
    p = 0.0 if where is None else node.args[where]
    return float(p) if isinstance(p, int | float) else 0.0

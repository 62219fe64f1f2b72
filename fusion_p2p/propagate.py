"""Shapes and dtypes of every value, computed from the operators themselves on tensors without storage.

Nothing is allocated and no kernel runs: the meta device knows shapes only. Our own seeded operators have rules here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_p2p.interp import bind
from fusion_p2p.ir import BatchInt, ListArg, Node, OpDag, Ref, ValueSpec
from fusion_p2p.ops_fusion import DROPOUTS, Ctx
from fusion_p2p.ops_table import words
from fusion_p2p.opset import NAMES, OPS, dtype_of
from fusion_p2p.seeded import RngKey

_META = torch.device("meta")
_SIZED = words("fusion.rand fusion.randn")


class ShapeError(ValueError):
    """Node `index` gives something else than its OP-DAG declares, or cannot be called."""

    def __init__(self, index: int, node: Node, reason: str) -> None:
        super().__init__(f"node {index} ({node.op}): {reason}")
        self.index = index


def _empty(spec: ValueSpec, batch: int) -> torch.Tensor:
    return torch.empty(spec.at(batch), dtype=dtype_of(spec.dtype), device=_META)


def _own_rule(node: Node, args: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of operators that would draw real random numbers; None for all others."""
    if node.op in _SIZED:
        return tuple(args[0]), args[1]
    if node.op == "fusion.randint":
        if not args[0] < args[1]:
            raise ValueError(f"empty range [{args[0]}, {args[1]})")
        return tuple(args[2]), args[3]
    if node.op in ("fusion.bernoulli", "fusion.bernoulli_like"):
        return tuple(args[0].shape), args[0].dtype
    if node.op in DROPOUTS and node.op != "fusion.sdpa":
        if node.op.startswith("fusion.feature") and args[0].dim() < 2:
            raise ValueError(f"needs 2 dimensions, got {args[0].dim()}")
        return tuple(args[0].shape), args[0].dtype
    return None


def _results(node: Node, specs: Sequence[ValueSpec], batch: int, ctx: Ctx) -> list[tuple[tuple[int, ...], torch.dtype]]:
    args, kwargs = bind(node, batch, lambda i: _empty(specs[i], batch))
    own = _own_rule(node, args)
    if own is not None:
        return [own]
    op = OPS[node.op]
    out = op.fn(ctx, *args, **kwargs) if op.ctx else op.fn(*args, **kwargs)
    return [(tuple(o.shape), o.dtype) for o in (out if isinstance(out, tuple | list) else (out,))]


def _key(node: Node, specs: Sequence[ValueSpec]) -> tuple[Any, ...]:
    """Calls of one operator with equal arguments and argument shapes give equal results."""

    def described(a: Any) -> Any:
        if isinstance(a, Ref):
            return specs[a.id]
        if isinstance(a, ListArg):
            return ("l", *map(described, a.items))
        return (type(a), a)

    return (node.op, *map(described, node.args), *((k, described(a)) for k, a in sorted(node.kwargs.items())))


def propagate(dag: OpDag, batch: int) -> None:
    """Check every node's declared results for micro-batches of `batch` samples. Raises ShapeError.

    Arguments must have been checked (`opset.check_args`) and declared sizes bounded before.
    """
    ctx = Ctx(False, RngKey(), _META)
    known: dict[tuple[Any, ...], list[tuple[tuple[int, ...], torch.dtype]]] = {}
    with torch.no_grad():
        for index, node in enumerate(dag.nodes):
            key = _key(node, dag.values)
            found = known.get(key)
            if found is None:
                try:
                    found = known[key] = _results(node, dag.values, batch, ctx)
                except Exception as error:  # an operator given hostile arguments may raise anything
                    text = " ".join(str(error).split())[:160]
                    raise ShapeError(index, node, f"cannot be called: {text or type(error).__name__}") from None
            _compare(index, node, dag.values, found, batch)


def _compare(
    index: int,
    node: Node,
    specs: Sequence[ValueSpec],
    found: Sequence[tuple[tuple[int, ...], torch.dtype]],
    batch: int,
) -> None:
    if len(found) != len(node.outs):
        raise ShapeError(index, node, f"gives {len(found)} results, declared {len(node.outs)}")
    for vid, (shape, dtype) in zip(node.outs, found, strict=True):
        if vid < 0:
            continue
        want = specs[vid]
        if shape != want.at(batch) or NAMES.get(dtype) != want.dtype:
            raise ShapeError(
                index, node, f"gives {shape} {NAMES.get(dtype)}, declared {want.at(batch)} {want.dtype} (batch {batch})"
            )


def result_count(node: Node, specs: Sequence[ValueSpec], batch: int) -> int | None:
    """How many results a splitting operator gives, before it is called; None for all others."""
    first = node.args[0] if node.args else None
    if node.op not in _SPLITS or not isinstance(first, Ref):
        return None
    shape = specs[first.id].at(batch)
    given: Mapping[str, Any] = dict(zip((a.name for a in OPS[node.op].args), node.args, strict=False)) | dict(
        node.kwargs
    )
    if node.op == "aten.split_with_sizes":
        sizes = given["split_sizes"]
        return len(sizes.items) if isinstance(sizes, ListArg) else None
    dim = given.get("dim", 0)
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return -1
    if node.op == "aten.unbind.int":
        return shape[dim]
    size = given["split_size"]
    size = size.at(batch) if isinstance(size, BatchInt) else size
    return max(1, math.ceil(shape[dim] / size)) if size > 0 else -1


_SPLITS = words("aten.unbind.int aten.split.Tensor aten.split_with_sizes")

"""Which integers an input may hold: the range that every operator indexing with it allows."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_p2p.ir import Arg, Node, Ref, ValueSpec
from fusion_p2p.ops_table import words

# Results hold only values of argument 0 (padding adds one constant, which the indexing operator allows or raises on).
_SHAPE_ONLY = words(
    "aten.reshape aten.slice.Tensor aten.clone aten.unsqueeze aten.squeeze aten.squeeze.dim aten.squeeze.dims "
    "aten.expand aten.transpose.int aten.permute aten.flatten.using_ints aten.select.int aten.pad "
    "aten.constant_pad_nd aten.to.dtype aten.flip aten.roll aten.repeat aten.t aten.narrow fusion.detach "
    "aten.split.Tensor aten.split_with_sizes aten.unbind.int aten.unflatten.int"
)
_INTEGER = frozenset(("int64", "int32", "int16", "int8", "uint8"))


def _get(node: Node, position: int, name: str, default: Arg) -> Arg:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _size(values: Sequence[ValueSpec], a: Arg, dim: int) -> int | None:
    if not isinstance(a, Ref):
        return None
    shape = values[a.id].shape
    if not -len(shape) <= dim < len(shape):
        return None
    size = shape[dim]
    return size if isinstance(size, int) else None  # a dimension that grows with the batch bounds nothing here


def index_uses(node: Node, values: Sequence[ValueSpec]) -> list[tuple[int, int, int]]:
    """(value id, lowest, highest) for every argument of `node` that indexes a dimension of known size."""
    pairs: list[tuple[Arg, int | None, bool]] = []  # (index, size, negative allowed)
    extra: int | None = None
    if node.op == "aten.embedding":
        pairs = [(node.args[1], _size(values, node.args[0], 0), False)]
    elif node.op in ("aten.cross_entropy_loss", "aten.nll_loss_nd"):
        ignore = _get(node, 4, "ignore_index", -100)
        extra = ignore if isinstance(ignore, int) else None
        scores = node.args[0]
        axis = 1 if isinstance(scores, Ref) and len(values[scores.id].shape) > 1 else 0
        pairs = [(node.args[1], _size(values, scores, axis), False)]
    elif node.op == "aten.one_hot":
        classes = _get(node, 1, "num_classes", -1)
        pairs = [(node.args[0], classes if isinstance(classes, int) and classes > 0 else None, False)]
    elif node.op in ("aten.gather", "aten.index_select") and isinstance(node.args[1], int):
        pairs = [(node.args[2], _size(values, node.args[0], node.args[1]), False)]
    elif node.op == "aten.index.Tensor":
        items = getattr(node.args[1], "items", ())
        pairs = [(a, _size(values, node.args[0], d), True) for d, a in enumerate(items)]
    out = []
    for a, size, negative in pairs:
        if isinstance(a, Ref) and size is not None and values[a.id].dtype in _INTEGER:
            low, high = (-size if negative else 0), size - 1
            if extra is not None:
                low, high = min(low, extra), max(high, extra)
            out.append((a.id, low, high))
    return out


def input_ranges(nodes: Sequence[Node], values: Sequence[ValueSpec]) -> dict[int, tuple[int, int]]:
    """Value id -> (lowest, highest) allowed, traced back through operators that only move elements."""
    allowed: dict[int, tuple[int, int]] = {}

    def narrow(vid: int, low: int, high: int) -> None:
        was = allowed.get(vid)
        allowed[vid] = (low, high) if was is None else (max(low, was[0]), min(high, was[1]))

    for node in reversed(nodes):
        for vid, low, high in index_uses(node, values):
            narrow(vid, low, high)
        if node.op in _SHAPE_ONLY and isinstance(node.args[0], Ref):
            source = node.args[0].id
            for o in node.outs:
                if o in allowed and values[source].dtype in _INTEGER:
                    narrow(source, *allowed[o])
    return allowed

"""FLOPs and bytes of every operator, from shapes alone (FusionLLM section 3.4).

The planner's prior and admission's bound. A multiply-add counts 2.
Figures are for the forward; the backward of a matrix product costs twice that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fusion_p2p.ir import Arg, BatchInt, ListArg, Node, ValueSpec, refs
from fusion_p2p.opset import OPS

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


class _Shapes(NamedTuple):
    """Concrete shapes of one call: tensor arguments in order, results in order."""

    node: Node
    ins: list[tuple[int, ...]]
    outs: list[tuple[int, ...]]
    batch: int

    @property
    def n_in(self) -> int:
        return sum(math.prod(s) for s in self.ins)

    @property
    def n_out(self) -> int:
        return sum(math.prod(s) for s in self.outs)

    def ints(self, name: str) -> list[int]:
        """The integers of a (list) argument, [] where it was left out."""
        a: Arg = self.node.kwargs.get(name)
        for i, schema in enumerate(OPS[self.node.op].args):
            if schema.name == name and i < len(self.node.args):
                a = self.node.args[i]
        items = a.items if isinstance(a, ListArg) else (a,)
        resolved = [i.at(self.batch) if isinstance(i, BatchInt) else i for i in items]
        return [i for i in resolved if isinstance(i, int)]


def _matmul(s: _Shapes) -> int:
    """2 * (elements of the result) * (length of the contracted dimension)."""
    return 2 * s.n_out * (s.ins[0][-1] if s.ins[0] else 1)


def _addmm(s: _Shapes) -> int:
    return 2 * s.n_out * (s.ins[1][-1] if s.ins[1] else 1) * (s.ins[1][0] if "addbmm" in s.node.op else 1) + s.n_out


def _conv(s: _Shapes) -> int:
    """2 * (elements of the result) * (input channels of a group) * (kernel elements)."""
    return 2 * s.n_out * math.prod(s.ins[1][1:])


def _conv_t(s: _Shapes) -> int:
    return 2 * math.prod(s.ins[0]) * math.prod(s.ins[1][1:])


def _conv_any(s: _Shapes) -> int:
    return max(_conv(s), _conv_t(s))


def _sdpa(s: _Shapes) -> int:
    q, k, v = s.ins[:3]
    scores = math.prod(q[:-1]) * (k[-2] if len(k) > 1 else 1)
    return scores * (2 * q[-1] + 2 * v[-1] + 10)


def _rnn(s: _Shapes) -> int:
    """2 * (samples * time) * (elements of all weights), and the gates; arguments are input, states, weights."""
    steps = math.prod(s.ins[0][:-1])
    return 2 * steps * sum(math.prod(w) for w in s.ins[2:] if len(w) == 2) + 40 * s.n_out


def _sort(s: _Shapes) -> int:
    n = math.prod(s.ins[0])
    return 4 * n * max(1, math.ceil(math.log2(max(n, 2))))


def _fft(s: _Shapes) -> int:
    n = max(s.n_in, s.n_out)
    return 5 * n * max(1, math.ceil(math.log2(max(n, 2))))


def _pool(s: _Shapes) -> int:
    kernel = s.ints("kernel_size")
    spatial = (len(s.ins[0]) - 2) if len(kernel) == 1 else 1
    return int(s.n_out * max(1, math.prod(abs(k) for k in kernel)) ** max(1, spatial))


FORMULAS: Mapping[str, Callable[[_Shapes], int]] = {
    "view": lambda s: 0,
    "create": lambda s: s.n_out,
    "ew": lambda s: max(s.n_out, s.n_in),
    "fn": lambda s: 10 * s.n_out,
    "fn_in": lambda s: 10 * s.n_in,
    "reduce": lambda s: s.n_in,
    "norm": lambda s: 8 * s.n_in,
    "softmax": lambda s: 10 * s.n_in,
    "seeded": lambda s: 10 * s.n_out,
    "upsample": lambda s: 16 * s.n_out,
    "pool": _pool,
    "pool_in": lambda s: s.n_in + s.n_out,
    "linear": _matmul,
    "matmul": _matmul,
    "addmm": _addmm,
    "conv": _conv,
    "conv_t": _conv_t,
    "conv_any": _conv_any,
    "sdpa": _sdpa,
    "matexp": lambda s: 40 * s.n_out * (s.ins[0][-1] if s.ins[0] else 1),
    "rnn": _rnn,
    "sort": _sort,
    "fft": _fft,
}


def _shapes(node: Node, specs: Sequence[ValueSpec], batch: int) -> _Shapes:
    ins = [specs[i].at(batch) for i in refs(node.args) + refs(node.kwargs)]
    return _Shapes(node, ins, [specs[i].at(batch) for i in node.outs if i >= 0], batch)


def flops(node: Node, specs: Sequence[ValueSpec], batch: int) -> int:
    """Floating-point operations of the node's forward for a micro-batch of `batch` samples."""
    return FORMULAS[OPS[node.op].cost](_shapes(node, specs, batch))


def spec_bytes(spec: ValueSpec, batch: int) -> int:
    """Bytes of one value."""
    return math.prod(spec.at(batch)) * ITEM_BYTES[spec.dtype]


def moved_bytes(node: Node, specs: Sequence[ValueSpec], batch: int) -> int:
    """Bytes the node's forward reads and writes; 0 for views."""
    if OPS[node.op].cost == "view":
        return 0
    read = sum(spec_bytes(specs[i], batch) for i in refs(node.args) + refs(node.kwargs))
    return read + out_bytes(node, specs, batch)


def out_bytes(node: Node, specs: Sequence[ValueSpec], batch: int) -> int:
    """Bytes of the node's results that need memory of their own; 0 for views."""
    if OPS[node.op].cost == "view":
        return 0
    return sum(spec_bytes(specs[i], batch) for i in node.outs if i >= 0)


def workspace_bytes(node: Node, specs: Sequence[ValueSpec], batch: int) -> int:
    """Upper bound on what kernels take besides arguments and results: contiguous copies, im2col, attention weights."""
    op, s = OPS[node.op], _shapes(node, specs, batch)
    if op.cost == "view":  # reshape copies where the strides do not allow a view
        return sum(spec_bytes(specs[i], batch) for i in node.outs if i >= 0)
    if op.cost in ("ew", "create", "reduce", "fn"):
        return 0
    item = max((ITEM_BYTES[specs[i].dtype] for i in refs(node.args) + [o for o in node.outs if o >= 0]), default=8)
    if op.cost == "sdpa":
        q, k = s.ins[:2]
        return 3 * math.prod(q[:-1]) * (k[-2] if len(k) > 1 else 1) * item + s.n_in * item
    if op.cost in ("conv", "conv_t", "conv_any"):
        positions = max(math.prod(s.outs[0][2:]) if s.outs else 0, math.prod(s.ins[0][2:]))
        return math.prod(s.ins[1][1:]) * max(1, positions) * item + s.n_in * item
    if op.cost in ("matmul", "linear", "addmm"):
        return (s.n_in + s.n_out + _broadcast(s)) * item
    if op.cost == "rnn":  # gates of every step
        return 2 * _rnn(s) // max(1, s.ins[0][-1]) * item
    if op.cost in ("sort", "seeded", "fft"):
        return 3 * (s.n_in + s.n_out) * 8
    return (s.n_in + s.n_out) * item


def _broadcast(s: _Shapes) -> int:
    """Elements of both operands after matmul broadcasts their leading dimensions."""
    a, b = s.ins[0], s.ins[-1]
    lead = math.prod(s.outs[0][:-2]) if s.outs else 1
    return lead * (math.prod(a[-2:]) + math.prod(b[-2:]))

"""From a decomposed exported graph to raw OP-DAG nodes: one spelling per operator, nothing about devices or views."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from fusion_p2p.errors import CaptureError
from fusion_p2p.interp import returns_many
from fusion_p2p.ir import Arg, DTypeArg, EnumArg, ListArg, Node, Ref, Scalar, ValueSpec, refs
from fusion_p2p.ops_fusion import DROPOUTS, SEEDED
from fusion_p2p.ops_table import words
from fusion_p2p.opset import NAMES, OPS, check_args

_LAST = 2**63 - 1
_LOCAL = ("device", "layout", "pin_memory", "non_blocking")  # a volunteer's own business
_MEMORY = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
    torch.preserve_format: "preserve",
}


@dataclass
class Draw:
    """One random source of the exported program, in the order it draws; dead ones too."""

    site: int
    op: str
    shape: tuple[int, ...]


@dataclass
class Raw:
    """A graph captured at one batch size: plain integers everywhere, ids not yet dense."""

    inputs: list[tuple[int, int]] = field(default_factory=list)  # (position among tensor inputs, value id)
    params: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    consts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    updates: dict[str, int] = field(default_factory=dict)  # buffer name -> value id
    values: list[ValueSpec] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    where: list[str] = field(default_factory=list)  # per node, the user's file:line
    draws: list[Draw] = field(default_factory=list)
    loss: int = -1

    def value(self, spec: ValueSpec) -> int:
        self.values.append(spec)
        return len(self.values) - 1


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def location(stack_trace: str | None) -> str:
    """The innermost user frame of an exported node's stack trace as "file:line", or "unknown place"."""
    frames = [f for f in _FRAME.findall(stack_trace or "") if "/torch/" not in f[0]] or _FRAME.findall(
        stack_trace or ""
    )
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "unknown place"


def spec_of(value: Any) -> ValueSpec:
    dtype = NAMES.get(value.dtype)
    if dtype is None:
        raise CaptureError(f"dtype {value.dtype} is not supported; convert to one of {', '.join(NAMES.values())}")
    if not all(isinstance(d, int) for d in value.shape):
        raise CaptureError(f"a result's shape {tuple(value.shape)} depends on data; use a mask of fixed shape instead")
    return ValueSpec(tuple(value.shape), dtype)


def _p(op: str, args: tuple[Any, ...]) -> Any:
    return args[4 if op == "fusion.sdpa" else 1]


class Lowering:
    """Walks one exported program. `emit` adds a node and returns its value ids."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.raw = Raw()
        self.env: dict[fx.Node, Any] = {}  # value id, or list of ids for operators with many results
        self.node: fx.Node | None = None
        self.site = 0

    # -- arguments ---------------------------------------------------------------------------------------------

    def arg(self, a: Any) -> Arg:
        if isinstance(a, fx.Node):
            return Ref(self.env[a])
        if isinstance(a, torch.dtype):
            return DTypeArg(NAMES.get(a, str(a)))
        if isinstance(a, torch.memory_format):
            return EnumArg(_MEMORY.get(a, str(a)))
        if isinstance(a, float) and math.isinf(a):
            return EnumArg("inf" if a > 0 else "-inf")
        if isinstance(a, str):
            return EnumArg(a)
        if isinstance(a, tuple | list):
            return ListArg(tuple(self.arg(i) for i in a))
        if a is None or isinstance(a, bool | int | float):
            return a
        raise CaptureError(f"{self.here()}: argument {a!r:.60} of {self._target()} cannot be part of a graph")

    def _target(self) -> str:
        return str(self.node.target) if self.node is not None else "?"

    def here(self) -> str:
        return location(self.node.meta.get("stack_trace") if self.node is not None else None)

    def emit(self, op: str, args: tuple[Any, ...], out: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """`out` is the fake tensor (or sequence of them) that the operator returns; None results are unread."""
        many = returns_many(op)
        outs = list(out) if many else [out]
        try:
            ids = [self.raw.value(spec_of(o)) for o in outs]
        except CaptureError as error:
            raise CaptureError(f"{self.here()}: {error}") from None
        node = Node(
            op=op,
            args=tuple(a if isinstance(a, Ref | ListArg) else self.arg(a) for a in args),
            kwargs={k: self.arg(v) for k, v in (kwargs or {}).items()},
            outs=tuple(ids),
            site=self.site,
        )
        wrong = check_args(node)
        if wrong is not None:
            raise CaptureError(f"{self.here()}: {wrong}; write it with operators that SUPPORT.md lists")
        self.raw.nodes.append(node)
        self.raw.where.append(self.here())
        if op in SEEDED and not (op in DROPOUTS and _p(op, args) == 1.0):  # which draws nothing
            self.raw.draws.append(Draw(self.site, op, tuple(outs[0].shape)))
        return ids if many else ids[0]

    # -- the walk ----------------------------------------------------------------------------------------------

    def run(self) -> Raw:
        signature = self.program.graph_signature
        kinds = {s.arg.name: s for s in signature.input_specs}
        position = 0
        for site, node in enumerate(self.program.graph.nodes):
            self.site, self.node = site, node
            if node.op == "placeholder":
                spec = kinds[node.name]
                self._placeholder(node, spec, position)
                position += spec.kind == InputKind.USER_INPUT
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._outputs(node.args[0], signature.output_specs)
            elif node.op == "get_attr":
                raise CaptureError(
                    f"{self.here()}: the graph calls the nested region {node.target!r} (torch.cond, map or a compiled "
                    "function); write it with torch.where or plain loops"
                )
        return self.raw

    def _placeholder(self, node: fx.Node, spec: Any, position: int) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.env[node] = value
            return
        vid = self.env[node] = self.raw.value(spec_of(value))
        if spec.kind == InputKind.USER_INPUT:
            self.raw.inputs.append((position, vid))
        elif spec.kind == InputKind.PARAMETER:
            self.raw.params[spec.target] = vid
        elif spec.kind == InputKind.BUFFER:
            self.raw.buffers[spec.target] = vid
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constant = self.program.constants[spec.target]
            self.raw.consts.append((vid, constant.detach()))
        else:
            raise CaptureError(f"the graph needs {spec.kind.name} {spec.target!r}, which cannot travel")

    def _outputs(self, outputs: Any, specs: Any) -> None:
        for out, spec in zip(outputs, specs, strict=True):
            if spec.kind == OutputKind.USER_OUTPUT:
                self.raw.loss = self.env[out]
            elif spec.kind == OutputKind.BUFFER_MUTATION:
                self.raw.updates[spec.target] = self.env[out]
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise CaptureError("the model writes into its input in place; clone the input first")
            else:
                raise CaptureError(
                    f"forward changes {spec.target!r} in place ({spec.kind.name.lower()}); make it a buffer"
                )

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        name = _name(target)
        if name in _DROPPED:
            return
        rule = _RULES.get(name)
        if rule is not None:
            self.env[node] = rule(self, node)
            return
        if name not in OPS:
            raise CaptureError(self._unknown(name))
        kwargs = {k: v for k, v in node.kwargs.items() if k not in _LOCAL}
        args = node.args[: sum(not a.keyword for a in OPS[name].args)]
        self.env[node] = self.emit(name, args, node.meta["val"], kwargs)

    def _unknown(self, name: str) -> str:
        way = _WAYS.get(name.split(".")[1] if "." in name else name, "write it with operators that SUPPORT.md lists")
        return f"{self.here()}: operator {name} is not supported; {way}"


def _name(target: Any) -> str:
    return str(target).removesuffix(".default")


_DROPPED = words(
    "aten._assert_tensor_metadata aten._assert_async.msg aten._assert_async aten._assert_scalar "
    "aten.sym_constrain_range aten.sym_constrain_range_for_size aten._functional_assert_async.msg"
)
_WAYS = {
    "_local_scalar_dense": "a Python branch or number depends on a tensor's value; use torch.where",
    "item": "a Python branch or number depends on a tensor's value; use torch.where",
    "nonzero": "its result's shape depends on data; use torch.where or a mask of fixed shape",
    "masked_select": "its result's shape depends on data; multiply by the mask instead",
    "unique": "its result's shape depends on data",
    "multinomial": "draw with torch.rand and a cumulative sum instead",
    "randperm": "draw the order in the data pipeline and pass it as an input",
}


def _val(node: Any) -> Any:
    return node.meta["val"]


Rule = Callable[[Lowering, fx.Node], Any]


def _identity(low: Lowering, node: fx.Node) -> Any:
    return low.env[node.args[0]]  # type: ignore[index]


def _to_copy(low: Lowering, node: fx.Node) -> Any:
    source, out = node.args[0], _val(node)
    vid = low.env[source]  # type: ignore[index]
    if out.dtype != _val(source).dtype:
        return low.emit("aten.to.dtype", (Ref(vid), out.dtype), out)
    memory = node.kwargs.get("memory_format")
    if memory in (torch.contiguous_format, torch.channels_last):
        return low.emit("aten.clone", (Ref(vid),), out, {"memory_format": memory})
    return vid


def _shaped(op: str) -> Rule:
    """View and expand, with every -1 resolved."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        out = _val(node)
        return low.emit(op, (node.args[0], list(out.shape)), out)

    return rule


def _fill(low: Lowering, out: torch.Tensor, value: Scalar) -> Any:
    return low.emit("aten.full", (list(out.shape), value, out.dtype), out)


def _full(value: Scalar | None, position: int = -1) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        fill: Any = value if value is not None else node.args[position]
        if isinstance(fill, fx.Node):
            raise CaptureError(f"{low.here()}: the fill value is a tensor; use torch.where")
        return _fill(low, _val(node), fill)

    return rule


def _arange(low: Lowering, node: fx.Node) -> Any:
    args = list(node.args)
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if isinstance(end, fx.Node) or isinstance(start, fx.Node):
        raise CaptureError(f"{low.here()}: arange's length depends on data; use a fixed length and a mask")
    return low.emit("aten.arange", (start, end, step, _val(node).dtype), _val(node))


def _slice(op: str, first: int) -> Rule:
    """`first` is the position of `dim`; an open end becomes the size of that dimension."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        args = list(node.args) + [None] * (first + 4 - len(node.args))
        given = dict(zip(("dim", "start", "end", "step"), args[first:], strict=False))
        given |= {k: v for k, v in node.kwargs.items() if k in given}
        dim = given["dim"] or 0
        size = _val(node.args[0]).shape[dim]
        end = size if given["end"] is None or given["end"] == _LAST else given["end"]
        out = (*args[:first], dim, given["start"] or 0, end, given["step"] or 1)
        return low.emit(op, out, _val(node))

    return rule


def _renamed(op: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        args = node.args[: sum(not a.keyword for a in OPS[op].args)]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in _LOCAL}
        return low.emit(op, args, _val(node), kwargs)

    return rule


def _first(op: str, pick: Callable[[fx.Node], tuple[Any, ...]]) -> Rule:
    """A native operator whose further results only its backward needs."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        return [low.emit(op, pick(node), _val(node)[0])] + [None] * (len(_val(node)) - 1)

    return rule


def _copy(low: Lowering, node: fx.Node) -> Any:
    """copy(self, src): src in self's shape and dtype."""
    source, out = node.args[1], _val(node)
    vid = low.env[source]  # type: ignore[index]
    if _val(source).dtype != out.dtype:
        vid = low.emit("aten.to.dtype", (Ref(vid), out.dtype), _val(source).to(out.dtype))
    if tuple(_val(source).shape) != tuple(out.shape):
        vid = low.emit("aten.expand", (Ref(vid), list(out.shape)), out)
    return vid


def _batch_norm(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, training, momentum, eps = node.args
    out = _val(node)
    if not training:
        return [low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), out[0])] + [None] * 4
    args = (x, weight, bias, mean, var, momentum, eps)
    y, new_mean, new_var = low.emit("fusion.batch_norm", args, (out[0], out[3], out[4]))
    return [y, None, None, new_mean, new_var]


def _batch_norm_frozen(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, _momentum, eps = node.args
    return [low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), _val(node)[0]), None, None]


def _batch_norm_local(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, _training, _momentum, eps = node.args
    return [low.emit("fusion.batch_norm_local", (x, weight, bias, eps), _val(node)[0]), None, None]


def _frozen_norm(low: Lowering, node: fx.Node) -> Any:
    x, weight, bias, mean, var, training, _momentum, eps, *_ = node.args
    if training:
        raise CaptureError(f"{low.here()}: batch norm updates its statistics outside the graph")
    return low.emit("fusion.batch_norm_frozen", (x, weight, bias, mean, var, eps), _val(node))


def _random(op: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Any:
        out = _val(node)
        return low.emit(op, (list(out.shape), out.dtype), out)

    return rule


def _randint(skip: int) -> Rule:
    """`skip` arguments (a tensor to take the shape from) come before low and high."""

    def rule(low: Lowering, node: fx.Node) -> Any:
        bounds = [a for a in node.args[skip:] if isinstance(a, int)]
        start, end = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        return low.emit("fusion.randint", (start, end, list(_val(node).shape), _val(node).dtype), _val(node))

    return rule


def _normal(low: Lowering, node: fx.Node) -> Any:
    """normal_(mean, std) and torch.normal(mean, std, size): standard normal, scaled and moved."""
    numbers = [a for a in (*node.args, node.kwargs.get("mean"), node.kwargs.get("std")) if isinstance(a, int | float)]
    mean, std = (*numbers, *(0.0, 1.0)[len(numbers) :])[:2]
    out = _val(node)
    drawn = low.emit("fusion.randn", (list(out.shape), out.dtype), out)
    return low.emit("aten.add.Scalar", (Ref(low.emit("aten.mul.Scalar", (Ref(drawn), std), out)), mean), out)


def _uniform(low: Lowering, node: fx.Node) -> Any:
    start, end = (*node.args[1:], *(0.0, 1.0)[len(node.args) - 1 :])[:2]
    out = _val(node)
    drawn = low.emit("fusion.rand", (list(out.shape), out.dtype), out)
    scaled = low.emit("aten.mul.Scalar", (Ref(drawn), end - start), out)  # type: ignore[operator]
    return low.emit("aten.add.Scalar", (Ref(scaled), start), out)


def _exponential(low: Lowering, node: fx.Node) -> Any:
    """-log(1 - u) / rate."""
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("lambd", 1.0)
    out = _val(node)
    drawn = low.emit("fusion.rand", (list(out.shape), out.dtype), out)
    log = low.emit("aten.log", (Ref(low.emit("aten.rsub.Scalar", (Ref(drawn), 1.0), out)),), out)
    return low.emit("aten.div.Scalar", (Ref(log), -rate), out)  # type: ignore[operator]


def _opaque_sdpa(low: Lowering, node: fx.Node) -> Any:
    return low.emit("fusion.sdpa", node.args, _val(node))


_RULES: dict[str, Rule] = {
    **{f"aten.{n}": _identity for n in ("alias", "lift_fresh_copy", "lift_fresh", "lift", "_conj_physical_noop")},
    **{f"aten.{n}": _shaped("aten.reshape") for n in ("view", "_unsafe_view", "reshape", "_reshape_alias")},
    "aten.expand": _shaped("aten.expand"),
    "aten._to_copy": _to_copy,
    "aten.copy": _copy,
    "aten.arange": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    **{f"aten.{n}": _full(0) for n in ("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like")},
    **{f"aten.{n}": _full(0) for n in ("new_empty", "empty_strided", "new_empty_strided", "empty_permuted")},
    **{f"aten.{n}": _full(1) for n in ("ones", "ones_like", "new_ones")},
    **{f"aten.{n}": _full(None) for n in ("full", "full_like", "new_full", "fill.Scalar")},
    "aten.slice.Tensor": _slice("aten.slice.Tensor", 1),
    "aten.slice_scatter": _slice("aten.slice_scatter", 2),
    "aten.__and__.Tensor": _renamed("aten.bitwise_and.Tensor"),
    "aten.__and__.Scalar": _renamed("aten.bitwise_and.Scalar"),
    "aten.__or__.Tensor": _renamed("aten.bitwise_or.Tensor"),
    "aten.__or__.Scalar": _renamed("aten.bitwise_or.Scalar"),
    "aten.__xor__.Tensor": _renamed("aten.bitwise_xor.Tensor"),
    "aten._fft_c2c": _renamed("aten.fft_c2c"),
    "aten._fft_c2r": _renamed("aten.fft_c2r"),
    "aten._fft_r2c": _renamed("aten.fft_r2c"),
    "aten.native_layer_norm": _first("aten.layer_norm", lambda n: n.args[:5]),
    "aten.native_group_norm": _first(
        "aten.group_norm", lambda n: (n.args[0], n.args[6], n.args[1], n.args[2], n.args[7])
    ),
    "aten.native_dropout": _first("fusion.dropout", lambda n: (n.args[0], n.args[1])),
    "aten._native_batch_norm_legit_functional": _batch_norm,
    "aten._native_batch_norm_legit_no_training": _batch_norm_frozen,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_local,
    "aten.batch_norm": _frozen_norm,
    "aten.rand": _random("fusion.rand"),
    "aten.rand_like": _random("fusion.rand"),
    "aten.randn": _random("fusion.randn"),
    "aten.randn_like": _random("fusion.randn"),
    "aten.randint": _randint(0),
    "aten.randint.low": _randint(0),
    "aten.randint_like": _randint(1),
    "aten.randint_like.low_dtype": _randint(1),
    "aten.normal_functional": _normal,
    "aten.normal.float_float": _normal,
    "aten.uniform": _uniform,
    "aten.exponential": _exponential,
    "aten.bernoulli": _renamed("fusion.bernoulli"),
    "aten.bernoulli.p": _renamed("fusion.bernoulli_like"),
    "fusion_p2p.detach": _renamed("fusion.detach"),
    "fusion_p2p.dropout": _renamed("fusion.dropout"),
    "fusion_p2p.alpha_dropout": _renamed("fusion.alpha_dropout"),
    "fusion_p2p.feature_dropout": _renamed("fusion.feature_dropout"),
    "fusion_p2p.feature_alpha_dropout": _renamed("fusion.feature_alpha_dropout"),
    "fusion_p2p.sdpa": _opaque_sdpa,
}


def unknown(graph: fx.Graph) -> list[Any]:
    """The operators of a graph that have no spelling here, each once."""
    targets = {n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem}
    return [t for t in targets if _name(t) not in _DROPPED and _name(t) not in _RULES and _name(t) not in OPS]


def prune(raw: Raw) -> None:
    """Drop, in place, nodes that neither the loss nor a buffer's update needs; unread results become -1."""
    needed = {raw.loss, *raw.updates.values()}
    live = []
    for node, where in zip(reversed(raw.nodes), reversed(raw.where), strict=True):
        if needed.intersection(node.outs):
            needed.update(refs(node.args), refs(node.kwargs))
            live.append((node, where))
    raw.nodes, raw.where = [], []
    for node, where in reversed(live):
        outs = tuple(o if o in needed else -1 for o in node.outs)
        raw.nodes.append(Node(op=node.op, args=node.args, kwargs=node.kwargs, outs=outs, site=node.site))
        raw.where.append(where)

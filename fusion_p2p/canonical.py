"""From a decomposed exported graph to raw OP-DAG nodes: one spelling per operator, nothing about devices or views."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from fusion_p2p import rules
from fusion_p2p.errors import CaptureError
from fusion_p2p.interp import returns_many
from fusion_p2p.ir import Arg, DTypeArg, EnumArg, ListArg, Node, Ref, ValueSpec, refs
from fusion_p2p.ops_fusion import DROPOUTS, SEEDED
from fusion_p2p.ops_table import words
from fusion_p2p.opset import NAMES, OPS, check_args

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
    draws: list[Draw] = field(default_factory=list)  # of this mode
    eval_draws: list[Draw] = field(default_factory=list)  # after `modes.combine`; site -1: nobody reads it
    loss: int = -1

    def value(self, spec: ValueSpec) -> int:
        self.values.append(spec)
        return len(self.values) - 1


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def location(stack_trace: str | None) -> str:
    """The innermost user frame of an exported node's stack trace as "file:line", or "unknown place"."""
    named = [f for f in _FRAME.findall(stack_trace or "") if not f[0].startswith("<")]
    frames = [f for f in named if "/torch/" not in f[0]] or named
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "unknown place"


def spec_of(value: Any) -> ValueSpec:
    """Shape and type of a traced `value`; CaptureError if the type is not ours or the shape depends on data."""
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
        if isinstance(a, float) and math.isnan(a):
            raise CaptureError(f"{self.here()}: {self._target()} is given the number nan; a graph holds none")
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
                self.node = next(iter(node.users), node)  # what calls it has a place
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
            self.node = out if isinstance(out, fx.Node) else None  # for the place in a message
            if spec.kind == OutputKind.USER_OUTPUT:
                self.raw.loss = self.env[out]
            elif spec.kind == OutputKind.BUFFER_MUTATION:
                self.raw.updates[spec.target] = self.env[out]
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise CaptureError(f"{self.here()}: the model writes into its input in place; clone it first")
            else:
                raise CaptureError(
                    f"{self.here()}: forward changes {spec.target!r} in place ({spec.kind.name.lower()}); make it a "
                    "buffer"
                )

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        name = _name(target)
        if name in _DROPPED:
            return
        rule = rules.RULES.get(name)
        if rule is not None:
            self.env[node] = rule(self, node)
            return
        if name not in OPS:
            raise CaptureError(self._unknown(name))
        kwargs = {k: v for k, v in node.kwargs.items() if k not in rules.LOCAL}
        args = node.args[: sum(not a.keyword for a in OPS[name].args)]
        self.env[node] = self.emit(name, args, node.meta["val"], kwargs)

    def _unknown(self, name: str) -> str:
        if name.endswith(".generator"):
            return f"{self.here()}: a torch.Generator cannot travel; draw without one, and the run's seed decides"
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


def unknown(graph: fx.Graph) -> list[Any]:
    """The operators of a graph that have no spelling here, each once."""
    targets = {n.target for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem}
    return [t for t in targets if _name(t) not in _DROPPED and _name(t) not in rules.RULES and _name(t) not in OPS]


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

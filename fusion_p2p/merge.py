"""Two captures at neighbouring batch sizes become one OP-DAG whose integers are functions of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fusion_p2p.canonical import Raw
from fusion_p2p.errors import CaptureError
from fusion_p2p.ir import (
    Arg,
    BatchInt,
    Buffer,
    Const,
    Dim,
    Input,
    ListArg,
    Node,
    OpDag,
    Param,
    Ref,
    ValueSpec,
)
from fusion_p2p.opset import OPSET
from fusion_p2p.ranges import input_ranges

CONST_BYTES = 1 << 20


class Tied(NamedTuple):
    """State-dict name -> the primary name that holds the tensor."""

    primary: Mapping[str, str]

    def aliases(self) -> dict[str, str]:
        return {name: first for name, first in self.primary.items() if name != first}


class _Merge:
    def __init__(self, a: Raw, b: Raw, size: int) -> None:
        self.a, self.b, self.size = a, b, size
        self.ids: dict[int, int] = {}
        self.values: list[ValueSpec] = []

    def integer(self, x: int, y: int) -> Dim:
        if x == y:
            return x
        scale = y - x
        return BatchInt(scale, x - scale * self.size)

    def arg(self, x: Arg, y: Arg, where: str) -> Arg:
        if isinstance(x, Ref) and isinstance(y, Ref) and x.id == y.id:
            return Ref(self.ids[x.id])
        if isinstance(x, ListArg) and isinstance(y, ListArg) and len(x.items) == len(y.items):
            return ListArg(tuple(self.arg(i, j, where) for i, j in zip(x.items, y.items, strict=True)))
        if isinstance(x, int) and isinstance(y, int) and not isinstance(x, bool) and not isinstance(y, bool):
            return self.integer(x, y)
        if type(x) is type(y) and x == y:
            return x
        raise CaptureError(
            f"{where}: the argument {x!r:.60} becomes {y!r:.60} with one sample more; a number computed from the "
            "batch size must be an integer sum or product (use tensor.mean() instead of dividing in Python)"
        )

    def define(self, raw_id: int) -> int:
        """The dense id of a raw value; its shapes at both sizes give the shape as a function of the batch."""
        known = self.ids.get(raw_id)
        if known is not None:
            return known
        x, y = self.a.values[raw_id], self.b.values[raw_id]
        if len(x.shape) != len(y.shape) or x.dtype != y.dtype:
            raise CaptureError(f"a value of shape {x.shape} becomes {y.shape} with one sample more")
        shape = tuple(self.integer(int(i), int(j)) for i, j in zip(x.shape, y.shape, strict=True))  # type: ignore[arg-type]
        self.ids[raw_id] = len(self.values)
        self.values.append(ValueSpec(shape, x.dtype))
        return self.ids[raw_id]

    def nodes(self) -> tuple[Node, ...]:
        if [n.op for n in self.a.nodes] != [n.op for n in self.b.nodes]:
            i = next(
                (k for k, (m, n) in enumerate(zip(self.a.nodes, self.b.nodes, strict=False)) if m.op != n.op),
                min(len(self.a.nodes), len(self.b.nodes)) - 1,
            )
            raise CaptureError(
                f"{self.a.where[i]}: the model runs other operators with {self.size + 1} samples than with {self.size} "
                "(a Python branch or loop on the batch size, or Python's own randomness); remove it"
            )
        out = []
        for m, n, where in zip(self.a.nodes, self.b.nodes, self.a.where, strict=True):
            if m.outs != n.outs or len(m.args) != len(n.args) or m.kwargs.keys() != n.kwargs.keys():
                raise CaptureError(f"{where}: {m.op} is called differently with {self.size + 1} samples")
            args = tuple(self.arg(x, y, where) for x, y in zip(m.args, n.args, strict=True))
            kwargs = {k: self.arg(m.kwargs[k], n.kwargs[k], where) for k in m.kwargs}
            outs = tuple(self.define(o) if o >= 0 else -1 for o in m.outs)
            out.append(Node(op=m.op, args=args, kwargs=kwargs, outs=outs, site=m.site))
        return tuple(out)


def _const(a: torch.Tensor, b: torch.Tensor) -> bytes:
    if a.shape != b.shape or not torch.equal(a.cpu(), b.cpu()):
        raise CaptureError(
            f"a constant tensor of shape {tuple(a.shape)} is {tuple(b.shape)} or other values in a second capture "
            "(built from the batch size, or Python or numpy randomness); build it with torch operators"
        )
    if a.numel() * a.element_size() > CONST_BYTES:
        raise CaptureError(f"a constant tensor of shape {tuple(a.shape)} is over 1 MiB; register it as a buffer")
    flat = a.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if a.numel() else a.detach().cpu()
    return bytes(flat.numpy().tobytes())


def _holder(name: str, tied: Tied) -> str:
    name = name.removeprefix("model.")
    return tied.primary.get(name, name)


def merge(a: Raw, b: Raw, size: int, input_names: list[str], tied: Tied, model: torch.nn.Module) -> OpDag:
    """One OP-DAG from captures at `size` and `size + 1` samples. Raises CaptureError where they do not fit."""
    m = _Merge(a, b, size)
    if [i for i, _ in a.inputs] != [i for i, _ in b.inputs] or set(a.params) != set(b.params):
        raise CaptureError("two captures of the model differ in their inputs; remove what changes between calls")
    inputs = [(input_names[pos], m.define(vid)) for pos, vid in a.inputs]
    params = _held(m, a.params, dict(model.named_parameters()), tied)
    buffers = _held(m, a.buffers, dict(model.named_buffers()), tied)
    consts = [Const(m.define(i), _const(x, y)) for (i, x), (_, y) in zip(a.consts, b.consts, strict=True)]
    nodes = m.nodes()
    updates = {_holder(name, tied): m.define(vid) for name, vid in a.updates.items()}
    loss = m.define(a.loss)
    transient = _non_persistent(model)
    ranges = input_ranges(nodes, m.values)
    used = _used(nodes, updates, loss)
    return OpDag(
        opset=OPSET,
        inputs=tuple(Input(name, vid, *ranges.get(vid, (None, None))) for name, vid in inputs if vid in used),
        params=tuple(Param(n, vid, trainable=t.requires_grad) for n, (vid, t) in params.items()),
        buffers=tuple(Buffer(n, vid, updates.get(n), persistent=n not in transient) for n, (vid, _) in buffers.items()),
        consts=tuple(c for c in consts if c.value in used),
        values=tuple(m.values),
        nodes=nodes,
        loss=loss,
        aliases=tied.aliases(),
    )


def _held(
    m: _Merge, raw: Mapping[str, int], tensors: Mapping[str, torch.Tensor], tied: Tied
) -> dict[str, tuple[int, Any]]:
    """Primary name -> (value id, tensor), in the module's order; names that share a tensor share a value."""
    by_name: dict[str, int] = {}
    for name, vid in raw.items():
        first = by_name.setdefault(_holder(name, tied), vid)
        if first != vid:
            m.ids[vid] = m.define(first)
    out: dict[str, tuple[int, Any]] = {}
    for name, tensor in tensors.items():
        if tied.primary.get(name, name) != name:
            continue
        if name in by_name:
            out[name] = (m.define(by_name[name]), tensor)
        else:
            m.values.append(ValueSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
            out[name] = (len(m.values) - 1, tensor)
    return out


def _used(nodes: tuple[Node, ...], updates: Mapping[str, int], loss: int) -> set[int]:
    from fusion_p2p.ir import refs

    used = {loss, *updates.values()}
    for node in nodes:
        used.update(refs(node.args), refs(node.kwargs))
    return used


def _non_persistent(model: torch.nn.Module) -> set[str]:
    persistent = set(model.state_dict().keys())
    return {name for name, _ in model.named_buffers() if name not in persistent}

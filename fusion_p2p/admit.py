"""Admission: what a volunteer checks of an OP-DAG from a stranger before anything is allocated or run.

Bytes, then structure, then arguments, then declared sizes, and only then shape propagation, which must agree. A
refused graph has cost no more than its own decoded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from fusion_p2p import cost
from fusion_p2p.errors import AdmissionError
from fusion_p2p.ir import IR_VERSION, Arg, BatchInt, ListArg, Node, OpDag, refs
from fusion_p2p.ops_fusion import SEEDED
from fusion_p2p.opset import DTYPES, INT_MAX, LIST_MAX, OPS, OPSET, check_args
from fusion_p2p.propagate import ShapeError, propagate, result_count
from fusion_p2p.ranges import input_ranges

RANK_MAX = 16
NAME_MAX = 512


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """What a volunteer takes on; bytes and FLOPs are those of the whole graph's forward for `batch` samples."""

    data_bytes: int = 8 << 20  # the encoded graph
    nodes: int = 50_000
    const_bytes: int = 4 << 20
    batch: int = 8  # the run's micro-batch size
    value_bytes: int = 8 << 30  # the largest single value or kernel workspace
    total_bytes: int = 256 << 30  # parameters, buffers and everything the operators make
    flops: int = 10**15


def admit(data: bytes, *, caps: Caps | None = None) -> OpDag:
    """The decoded graph, if it passes every check; AdmissionError with one line otherwise."""
    caps = caps or Caps()
    if len(data) > caps.data_bytes:
        raise AdmissionError(f"the OP-DAG has {len(data)} bytes, over the cap of {caps.data_bytes}")
    try:
        dag = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError) as error:
        raise AdmissionError(f"the OP-DAG does not decode: {str(error)[:160]}") from None
    if len(dag.nodes) > caps.nodes or len(dag.values) > 4 * caps.nodes:
        raise AdmissionError(
            f"the OP-DAG has {len(dag.nodes)} nodes and {len(dag.values)} values; the cap is {caps.nodes} nodes"
        )
    try:
        canonical = dag.to_bytes() == data
    except RecursionError:
        canonical = False
    if not canonical:
        raise AdmissionError("the OP-DAG is not in canonical form (unknown, repeated or reordered fields)")
    check_dag(dag, caps)
    return dag


_DECODER = msgspec.json.Decoder(OpDag, strict=True)


def check_dag(dag: OpDag, caps: Caps) -> None:
    """Every check but those of the encoding. Raises AdmissionError."""
    if dag.version != IR_VERSION or dag.opset != OPSET:
        raise AdmissionError(
            f"the OP-DAG is version {dag.version} of opset {dag.opset[:40]!r}; this peer runs {IR_VERSION} of {OPSET!r}"
        )
    _check_values(dag, caps)
    _check_names(dag)
    _check_ssa(dag)
    _check_roles(dag)
    _check_consts(dag, caps)
    _check_arguments(dag)
    _check_costs(dag, caps)
    _check_ranges(dag)
    try:
        for batch in dict.fromkeys((min(2, caps.batch), min(3, caps.batch))):
            propagate(dag, batch)
    except ShapeError as error:
        raise AdmissionError(str(error)) from None


def _check_values(dag: OpDag, caps: Caps) -> None:
    """Each declared shape is sane at one sample and at the largest micro-batch, so (being linear) at all between."""
    for i, spec in enumerate(dag.values):
        if spec.dtype not in DTYPES:
            raise AdmissionError(f"value {i} has dtype {spec.dtype[:40]!r}, which is none of {', '.join(DTYPES)}")
        if len(spec.shape) > RANK_MAX:
            raise AdmissionError(f"value {i} has {len(spec.shape)} dimensions, over {RANK_MAX}")
        for batch in (1, caps.batch):
            shape = spec.at(batch)
            if any(d < 0 or d > INT_MAX for d in shape):
                raise AdmissionError(f"value {i} has shape {_short(shape)} at {batch} samples")
            # Zero-sized values still count their other dimensions, which kernels may multiply.
            size = math.prod(max(d, 1) for d in shape) * cost.ITEM_BYTES[spec.dtype]
            if size > caps.value_bytes:
                raise AdmissionError(
                    f"value {i} of shape {_short(shape)} needs {size} bytes, over the cap of {caps.value_bytes}"
                )


def _short(shape: Iterable[int]) -> str:
    return "(" + ", ".join(f"{d:.3g}" if abs(d) > 10**9 else str(d) for d in shape) + ")"


def _check_names(dag: OpDag) -> None:
    held = [p.name for p in dag.params] + [b.name for b in dag.buffers]
    groups = {
        "input": [i.name for i in dag.inputs],
        "parameter or buffer": held + list(dag.aliases),
        "output": list(dag.outputs),
    }
    for what, names in groups.items():
        if len(set(names)) != len(names):
            raise AdmissionError(f"the same {what} name is used twice")
        for name in names:
            if not 0 < len(name) <= NAME_MAX or not name.isprintable():
                raise AdmissionError(f"{what} name {name[:40]!r} is not 1 to {NAME_MAX} printable characters")
    known = set(held)
    for alias, target in dag.aliases.items():
        if target not in known:
            raise AdmissionError(f"alias {alias!r} names {target[:80]!r}, which is no parameter or buffer")


def _check_ssa(dag: OpDag) -> None:
    count = len(dag.values)
    defined = bytearray(count)

    def define(vid: int, what: str) -> None:
        if not 0 <= vid < count:
            raise AdmissionError(f"{what} defines value {vid}, but there are {count} values")
        if defined[vid]:
            raise AdmissionError(f"{what} defines value {vid} a second time")
        defined[vid] = 1

    for what, ids in (
        ("an input", [i.value for i in dag.inputs]),
        ("a parameter", [p.value for p in dag.params]),
        ("a buffer", [b.value for b in dag.buffers]),
        ("a constant", [c.value for c in dag.consts]),
    ):
        for vid in ids:
            define(vid, what)
    sites: set[int] = set()
    for index, node in enumerate(dag.nodes):
        for vid in _refs(node):
            if not 0 <= vid < count or not defined[vid]:
                raise AdmissionError(f"node {index} ({node.op[:80]}) reads value {vid} before it is defined")
        if not node.outs or len(node.outs) > LIST_MAX:
            raise AdmissionError(f"node {index} ({node.op[:80]}) has {len(node.outs)} results")
        for out in node.outs:
            if out != -1:
                define(out, f"node {index}")
        if not 0 <= node.site <= INT_MAX or (node.op in SEEDED and node.site in sites):
            raise AdmissionError(f"node {index} has site {node.site}, used before or out of range")
        if node.op in SEEDED:
            sites.add(node.site)
    for vid in (dag.loss, *dag.outputs.values(), *(b.update for b in dag.buffers if b.update is not None)):
        if not 0 <= vid < count or not defined[vid]:
            raise AdmissionError(f"the graph returns value {vid}, which nothing defines")
    if not all(defined):
        raise AdmissionError(f"value {defined.index(0)} is declared but nothing defines it")


def _refs(node: Node) -> list[int]:
    for a in (*node.args, *node.kwargs.values()):
        if isinstance(a, ListArg) and any(isinstance(i, ListArg) for i in a.items):
            raise AdmissionError(f"{node.op[:80]}: a list inside a list")
    return refs(node.args) + refs(node.kwargs)


_FLOATS = frozenset(("float32", "float64", "float16", "bfloat16"))


def _check_roles(dag: OpDag) -> None:
    loss = dag.values[dag.loss]
    if loss.shape != () or loss.dtype not in _FLOATS:
        raise AdmissionError(f"the loss has shape {loss.shape} and dtype {loss.dtype}; it must be one floating number")
    fixed = [(p.name, p.value) for p in dag.params] + [(b.name, b.value) for b in dag.buffers]
    fixed += [("a constant", c.value) for c in dag.consts]
    for name, vid in fixed:
        if any(isinstance(d, BatchInt) for d in dag.values[vid].shape):
            raise AdmissionError(f"{name[:80]!r} has a shape that depends on the batch")
    for b in dag.buffers:
        if b.update is not None and dag.values[b.update] != dag.values[b.value]:
            raise AdmissionError(f"the update of buffer {b.name[:80]!r} has another shape or dtype")
    for p in dag.params:
        dtype = dag.values[p.value].dtype
        if p.trainable and dtype not in _FLOATS and not dtype.startswith("complex"):
            raise AdmissionError(f"parameter {p.name[:80]!r} is trainable but {dtype}")


def _check_consts(dag: OpDag, caps: Caps) -> None:
    if sum(len(c.data) for c in dag.consts) > caps.const_bytes:
        raise AdmissionError(f"the constants take more than {caps.const_bytes} bytes")
    for c in dag.consts:
        spec = dag.values[c.value]
        if len(c.data) != cost.spec_bytes(spec, 0):
            raise AdmissionError(f"constant {c.value} has {len(c.data)} bytes, declared {cost.spec_bytes(spec, 0)}")
        if spec.dtype == "bool" and c.data.strip(b"\0\1"):
            raise AdmissionError(f"constant {c.value} is boolean but holds bytes other than 0 and 1")
        if spec.dtype in _NUMPY and np.isnan(np.frombuffer(c.data, _NUMPY[spec.dtype])).any():
            raise AdmissionError(f"constant {c.value} holds NaN")
        if spec.dtype == "bfloat16":
            wide = np.frombuffer(c.data, "<u2").astype("<u4") << 16
            if np.isnan(wide.view("<f4")).any():
                raise AdmissionError(f"constant {c.value} holds NaN")


_NUMPY = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "complex64": "<f4", "complex128": "<f8"}

# Arguments that kernels divide by, loop over or allocate for: at least 1 and never large.
_POSITIVE = frozenset(
    (
        *(
            "layers",
            "kernel_size",
            "stride",
            "dilation",
            "groups",
            "num_groups",
            "split_size",
            "step",
            "steps",
            "num_classes",
        ),
        *("upscale_factor", "downscale_factor", "output_size", "normalized_shape", "divisor_override"),
    )
)
_POSITIVE_MAX = 1 << 24


def _numbers(a: Arg, batch: int) -> list[float]:
    items = a.items if isinstance(a, ListArg) else (a,)
    found = [i.at(batch) if isinstance(i, BatchInt) else i for i in items]
    return [i for i in found if isinstance(i, int | float) and not isinstance(i, bool)]


def _check_arguments(dag: OpDag) -> None:
    for index, node in enumerate(dag.nodes):
        wrong = check_args(node)
        if wrong is not None:
            raise AdmissionError(f"node {index}: {wrong}")
        schema = OPS[node.op].args
        named = [*zip((s.name for s in schema), node.args, strict=False), *node.kwargs.items()]
        for name, a in named:
            if name in _POSITIVE and not all(0 < v <= _POSITIVE_MAX for b in (1, 2) for v in _numbers(a, b)):
                raise AdmissionError(f"node {index} ({node.op}): {name} must be from 1 to {_POSITIVE_MAX}")
            if name == "p" and node.op.startswith("fusion.") and not all(0 <= v <= 1 for v in _numbers(a, 1)):
                raise AdmissionError(f"node {index} ({node.op}): p must be a probability")
        if node.op in ("aten.index.Tensor", "aten.index_put"):
            for vid in refs(node.args[1:2]):
                if dag.values[vid].dtype not in ("int64", "int32"):
                    raise AdmissionError(
                        f"node {index} ({node.op}): indices must be integers, not {dag.values[vid].dtype}"
                    )
        if OPS[node.op].cost == "rnn":
            _check_rnn(index, node)
        for batch in (1, 2):
            results = result_count(node, dag.values, batch)
            if results is not None and results != len(node.outs):
                raise AdmissionError(f"node {index} ({node.op}) gives {results} results, declared {len(node.outs)}")


def _check_rnn(index: int, node: Node) -> None:
    """As many weights as the layers have; PyTorch counts on it."""
    inputs, states, weights, biases, layers, both, _ = node.args
    if isinstance(weights, ListArg) and isinstance(inputs, ListArg) and isinstance(states, ListArg):
        per_layer = (4 if biases else 2) * (2 if both else 1)
        count = 2 if node.op == "fusion.lstm" else 1
        fits = isinstance(layers, int) and layers > 0 and len(weights.items) == layers * per_layer
        if fits and len(inputs.items) == 1 and len(states.items) == count:
            return
    raise AdmissionError(f"node {index} ({node.op}): its weights or states do not fit its layers")


def _check_costs(dag: OpDag, caps: Caps) -> None:
    held = [p.value for p in dag.params] + [b.value for b in dag.buffers] + [i.value for i in dag.inputs]
    total = sum(cost.spec_bytes(dag.values[v], caps.batch) for v in held)
    flops = 0
    for index, node in enumerate(dag.nodes):
        workspace = cost.workspace_bytes(node, dag.values, caps.batch)
        if workspace > caps.value_bytes:
            raise AdmissionError(
                f"node {index} ({node.op}) needs {workspace} bytes of workspace, over the cap of {caps.value_bytes}"
            )
        total += cost.out_bytes(node, dag.values, caps.batch)
        flops += cost.flops(node, dag.values, caps.batch)
        if total > caps.total_bytes:
            raise AdmissionError(
                f"up to node {index} the graph needs {total} bytes, over the cap of {caps.total_bytes}"
            )
        if flops > caps.flops:
            raise AdmissionError(f"up to node {index} the graph needs {flops} FLOPs, over the cap of {caps.flops}")


def _check_ranges(dag: OpDag) -> None:
    """An integer input that indexes must declare a range that fits; the executor checks the data against it."""
    allowed = input_ranges(dag.nodes, dag.values)
    for i in dag.inputs:
        if i.vmin is not None and i.vmax is not None and i.vmin > i.vmax:
            raise AdmissionError(f"input {i.name!r} allows no value: {i.vmin} to {i.vmax}")
        if i.value in allowed:
            low, high = allowed[i.value]
            if i.vmin is None or i.vmax is None or i.vmin < low or i.vmax > high:
                raise AdmissionError(f"input {i.name!r} indexes {low}..{high} but allows {i.vmin}..{i.vmax}")

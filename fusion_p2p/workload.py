"""Atoms: the smallest pieces the planner moves, with the figures it weighs (FusionLLM 3.3, DESIGN section 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_p2p.cost import flops, moved_bytes, spec_bytes
from fusion_p2p.flow import Flow, analyse
from fusion_p2p.ir import Node, OpDag
from fusion_p2p.opset import OPS

# Cost classes of `ops_table` that contract an axis; with embeddings, one atom is built around each.
_HEAVY = frozenset(("matmul", "addmm", "linear", "conv", "conv_t", "conv_any", "sdpa", "rnn"))
FEW_ATOMS = 16
# Operators whose backward needs none of their inputs (views beside them).
_KEEP_NOTHING = frozenset(
    "aten." + name
    for name in (
        *("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "neg", "cat", "stack", "sum"),
        *("sum.dim_IntList", "mean", "mean.dim", "clone", "to.dtype", "constant_pad_nd", "pad", "repeat", "roll"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Atom:
    """Operators between two cheap cuts; figures are for one micro-batch of the size given to `atoms`.

    nodes: indices into `dag.nodes`. weights: parameters read (names); `owned`: those whose first reader is here.
    parameters: trainable scalars owned; weight_bytes: bytes of all owned. forward_bytes: memory traffic of the
    forward. stash_bytes: activations kept for the backward (an estimate; the trial step measures).
    kernels: operator launches, forward. cut_bytes: dense bytes that cross the position before this atom, one
    direction, skip edges included. cut_weight_bytes: bytes of weights read on both sides of that position; a cut
    there sends them once per step, and their gradients back. heavier: seconds over what these figures promise, as real
    steps showed.
    """

    nodes: tuple[int, ...]
    weights: tuple[str, ...]
    owned: tuple[str, ...]
    parameters: int
    weight_bytes: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    stash_bytes: int
    kernels: int
    cut_bytes: int
    cut_weight_bytes: int
    heavier: float = 1.0


def atoms(dag: OpDag, batch: int = 1) -> tuple[Atom, ...]:
    """The model as a chain of atoms, figures at `batch` samples; the boundaries do not depend on `batch`."""
    flow = analyse(dag)
    bounds = atom_bounds(dag, flow)
    crossing = _crossing(dag, flow, batch, weights=False)
    crossing_weights = _crossing(dag, flow, batch, weights=True)
    seen: set[int] = set()
    out = []
    for start, stop in itertools.pairwise(bounds):
        nodes = flow.order[start:stop]
        read = list(dict.fromkeys(v for n in nodes for v in flow.reads[n] if v in flow.weights))
        owned = [v for v in read if v not in seen]
        seen.update(owned)
        out.append(
            Atom(
                nodes=nodes,
                weights=tuple(dag.params[flow.weights[v]].name for v in read),
                owned=tuple(dag.params[flow.weights[v]].name for v in owned),
                parameters=sum(math.prod(dag.values[v].at(1)) for v in owned if dag.params[flow.weights[v]].trainable),
                weight_bytes=sum(spec_bytes(dag.values[v], batch) for v in owned),
                forward_flops=sum(flops(dag.nodes[n], dag.values, batch) for n in nodes),
                backward_flops=sum(_backward_flops(dag, flow, n, batch) for n in nodes),
                forward_bytes=sum(moved_bytes(dag.nodes[n], dag.values, batch) for n in nodes),
                stash_bytes=_stash(dag, flow, nodes, batch),
                kernels=sum(not _is_view(dag.nodes[n]) for n in nodes),
                cut_bytes=crossing[start],
                cut_weight_bytes=crossing_weights[start],
            )
        )
    return tuple(out)


def atom_bounds(dag: OpDag, flow: Flow) -> tuple[int, ...]:
    """Positions in `flow.order` where an atom begins, then its length: one cheapest cut between heavy operators.

    A model with fewer than `FEW_ATOMS` of them is cut before every operator that is no view. No cut falls between the
    readers of a buffer that training changes and the node that makes its next value.
    """
    closed = _closed(dag, flow)
    crossing = _crossing(dag, flow, 1, weights=False)
    heavy = [p for p, n in enumerate(flow.order) if _is_heavy(dag.nodes[n])]
    inner = []
    for left, right in itertools.pairwise(heavy):
        allowed = [p for p in range(left + 1, right + 1) if p not in closed]
        if allowed:
            inner.append(min(allowed, key=lambda p: (crossing[p], -p)))
    if len(inner) + 1 < FEW_ATOMS:
        inner = [p for p, n in enumerate(flow.order) if p and p not in closed and not _is_view(dag.nodes[n])]
    return (0, *inner, len(flow.order))


def _is_view(node: Node) -> bool:
    """Whether the result shares or merely rearranges memory: no traffic, no launch worth counting."""
    return OPS[node.op].cost == "view"


def _is_heavy(node: Node) -> bool:
    return OPS[node.op].cost in _HEAVY or node.op == "aten.embedding"


def _closed(dag: OpDag, flow: Flow) -> set[int]:
    place = {n: p for p, n in enumerate(flow.order)}
    closed: set[int] = set()
    for b in dag.buffers:
        if b.update is None:
            continue
        users = [place[n] for n in flow.order if b.value in flow.reads[n] or b.update in dag.nodes[n].outs]
        if users:
            closed.update(range(min(users) + 1, max(users) + 1))
    return closed


def _crossing(dag: OpDag, flow: Flow, batch: int, *, weights: bool) -> list[int]:
    """Bytes that live across each position of `flow.order` (0..n): activations, or weights read on both sides."""
    place = {n: p for p, n in enumerate(flow.order)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, p in place.items():
        for v in flow.reads[n]:
            if (v in flow.weights) == weights and flow.live[v]:
                made = place.get(flow.producer[v]) if v in flow.producer else None
                first.setdefault(v, p if made is None else made)
                last[v] = p
    change = [0] * (len(flow.order) + 2)
    for v, end in last.items():
        if end > first[v]:
            size = spec_bytes(dag.values[v], batch)
            change[first[v] + 1] += size
            change[end + 1] -= size
    out, now = [], 0
    for delta in change[: len(flow.order) + 1]:
        now += delta
        out.append(now)
    return out


def _backward_flops(dag: OpDag, flow: Flow, n: int, batch: int) -> int:
    """As much as the forward for each of (at most two) operands that want a gradient."""
    if not any(v >= 0 and flow.grad[v] for v in dag.nodes[n].outs):
        return 0
    return min(2, sum(flow.grad[v] for v in flow.reads[n])) * flops(dag.nodes[n], dag.values, batch)


def _stash(dag: OpDag, flow: Flow, nodes: Sequence[int], batch: int) -> int:
    """Bytes of the distinct activations that the backward of these nodes reads; views count as what they show."""
    kept: dict[int, int] = {}
    for n in nodes:
        node = dag.nodes[n]
        if _is_view(node) or node.op in _KEEP_NOTHING or not any(v >= 0 and flow.grad[v] for v in node.outs):
            continue
        for v in flow.reads[n]:
            if flow.live[v] and v not in flow.weights:
                root = v
                while root in flow.producer and _is_view(dag.nodes[flow.producer[root]]):
                    root = flow.reads[flow.producer[root]][0]
                kept[root] = max(kept.get(root, 0), spec_bytes(dag.values[v], batch))
    return sum(kept.values())

"""What depends on what in an OP-DAG: the analysis that splitting and the planner's figures share (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.errors import InputError
from fusion_p2p.ir import OpDag, refs

DETACH = "fusion.detach"  # capture writes it for no-grad regions


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Per value id or node index of one OpDag.

    reads: value ids each node reads, in order, without repeats. needed: the loss or a buffer update depends on it.
    live: depends on a weight or on a buffer that training changes; what does not (masks, positions, anything made of
    the batch alone) is computed again wherever it is used. grad: training sends a gradient back through this value.
    """

    reads: tuple[tuple[int, ...], ...]
    producer: dict[int, int]
    needed: tuple[bool, ...]
    live: tuple[bool, ...]
    grad: tuple[bool, ...]
    order: tuple[int, ...]  # the needed live nodes, in the graph's order: what atoms are made of
    weights: dict[int, int]  # value id of each parameter -> its place in dag.params


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def analyse(dag: OpDag) -> Flow:
    """One pass forward, one back. InputError if the loss depends on no weight."""
    reads = tuple(tuple(dict.fromkeys(refs(n.args) + refs(n.kwargs))) for n in dag.nodes)
    producer = {v: i for i, n in enumerate(dag.nodes) for v in n.outs if v >= 0}
    live = [False] * len(dag.values)
    wants = [False] * len(dag.values)  # depends on a trainable weight through differentiable operators
    for p in dag.params:
        live[p.value], wants[p.value] = True, p.trainable
    for b in dag.buffers:
        live[b.value] = b.update is not None
    for i, node in enumerate(dag.nodes):
        is_live = any(live[v] for v in reads[i])
        wants_grad = node.op != DETACH and any(wants[v] for v in reads[i])
        for v in node.outs:
            if v >= 0:
                live[v], wants[v] = is_live, wants_grad and is_float(dag.values[v].dtype)
    if not live[dag.loss]:
        raise InputError("the loss depends on no parameter; return the loss of the model's own output")
    grad = [False] * len(dag.values)
    grad[dag.loss] = wants[dag.loss]
    used = {dag.loss} | {b.update for b in dag.buffers if b.update is not None}
    needed = [False] * len(dag.nodes)
    for i in range(len(dag.nodes) - 1, -1, -1):
        outs = dag.nodes[i].outs
        needed[i] = any(v in used for v in outs)
        if needed[i]:
            used.update(reads[i])
        if any(v >= 0 and grad[v] for v in outs):
            for v in reads[i]:
                grad[v] = wants[v]
    order = tuple(i for i, n in enumerate(dag.nodes) if needed[i] and any(v >= 0 and live[v] for v in n.outs))
    return Flow(
        reads=reads,
        producer=producer,
        needed=tuple(needed),
        live=tuple(live),
        grad=tuple(grad),
        order=order,
        weights={p.value: i for i, p in enumerate(dag.params)},
    )


def cone(dag: OpDag, flow: Flow, wanted: set[int]) -> list[int]:
    """Nodes, in order, that compute the values `wanted` from the batch, constants and fixed buffers alone."""
    found: set[int] = set()
    stack = [v for v in wanted if not flow.live[v]]
    while stack:
        i = flow.producer.get(stack.pop())
        if i is not None and i not in found:
            found.add(i)
            stack.extend(flow.reads[i])
    return sorted(found)

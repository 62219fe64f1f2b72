"""Any contiguous cut of an OP-DAG into stage programs (DESIGN section 4, "Split").

A program is a pure function of (OP-DAG, cuts): a volunteer that holds both builds its own and trusts nobody's.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.flow import Flow, analyse, cone
from fusion_p2p.ir import OpDag
from fusion_p2p.workload import Atom, atom_bounds, atoms

__all__ = ["Atom", "Edge", "SharedWeight", "StageProgram", "atoms", "split"]


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """Value `value` goes from stage `src` straight to `dst` once per micro-batch; `grad`: a gradient comes back."""

    value: int
    src: int
    dst: int
    grad: bool


class SharedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A weight read in several stages. `stages` ascend; the first owns it.

    The owner sends it to each other stage once per tick. Gradients come back as one running sum: each stage adds its
    uses, the latest first, to what the next stage in `stages` sent, and passes it down. So the order of the sum is
    the same for every cut. `grad` False: frozen, nothing comes back.
    """

    value: int
    stages: tuple[int, ...]
    grad: bool

    def below(self, stage: int) -> int | None:
        """The stage that takes `stage`'s running sum; None for the owner."""
        i = self.stages.index(stage)
        return self.stages[i - 1] if i else None

    def above(self, stage: int) -> int | None:
        """The stage whose running sum `stage` continues; None for the last."""
        i = self.stages.index(stage)
        return self.stages[i + 1] if i + 1 < len(self.stages) else None


class StageProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. `nodes`: indices into `dag.nodes`, in order, cones included; `inputs` (batch tensors it reads, which
    the trainer sends) and `consts`: value ids; `params` and `buffers`: names.

    params: weights it owns, in the graph's order. shared: weights it has in common with other stages. buffers: those
    it holds; one that training changes has one holder, a fixed one is held by every stage that reads it.
    backward: there is something to differentiate here.
    """

    stage: int
    stages: int
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    edges_in: tuple[Edge, ...]
    edges_out: tuple[Edge, ...]
    params: tuple[str, ...]
    shared: tuple[SharedWeight, ...]
    buffers: tuple[str, ...]
    consts: tuple[int, ...]
    has_loss: bool
    backward: bool

    @property
    def foreign(self) -> tuple[SharedWeight, ...]:
        """Shared weights that another stage owns."""
        return tuple(w for w in self.shared if w.stages[0] != self.stage)


def split(dag: OpDag, cuts: Sequence[int]) -> tuple[StageProgram, ...]:
    """`dag` as stages: stage k holds atoms cuts[k-1] .. cuts[k]-1; no cuts: one stage (DESIGN section 4, "Split").

    InputError unless cuts ascend strictly within 1 .. (number of atoms - 1).
    """
    flow = analyse(dag)
    bounds = atom_bounds(dag, flow)
    last = len(bounds) - 2
    ends = [0, *cuts, last + 1]
    if any(a >= b for a, b in itertools.pairwise(ends)):
        raise InputError(f"cuts {tuple(cuts)} must ascend within 1..{last}: the model has {last + 1} atoms")
    starts = [bounds[e] for e in ends[1:-1]]
    home = {n: bisect.bisect_right(starts, p) for p, n in enumerate(flow.order)}
    return tuple(_Splitter(dag, flow, home, len(starts) + 1).program(k) for k in range(len(starts) + 1))


class _Splitter:
    """The tables that all programs of one split share. `home`: node of `flow.order` -> stage."""

    def __init__(self, dag: OpDag, flow: Flow, home: dict[int, int], stages: int) -> None:
        self._dag, self._flow, self._stages = dag, flow, stages
        self._live_nodes: list[list[int]] = [[] for _ in range(stages)]
        self._readers: dict[int, set[int]] = {}  # live value -> stages that read it
        for n, k in home.items():
            self._live_nodes[k].append(n)
            for v in flow.reads[n]:
                if flow.live[v]:
                    self._readers.setdefault(v, set()).add(k)
        self._made = {v: k for n, k in home.items() for v in dag.nodes[n].outs if v >= 0}
        self._owner = {p.value: min(self._readers.get(p.value, {0})) for p in dag.params}
        self._holder = {
            b.value: min(self._readers.get(b.value, {self._made.get(b.update, 0)}))
            for b in dag.buffers
            if b.update is not None
        }

    def program(self, k: int) -> StageProgram:
        dag, flow = self._dag, self._flow
        held = {v for v, stage in self._holder.items() if stage == k}
        updates = {b.update for b in dag.buffers if b.update is not None and b.value in held}
        wanted = {v for n in self._live_nodes[k] for v in flow.reads[n]} | updates
        nodes = tuple(sorted({*self._live_nodes[k], *cone(dag, flow, wanted)}))
        read = {v for n in nodes for v in flow.reads[n]} | wanted
        fixed = {b.value for b in dag.buffers if b.update is None}
        unread = {b.value for b in dag.buffers if b.value in fixed and k == 0} - self._read_anywhere()
        edges_in = tuple(e for e in self._edges() if e.dst == k)
        shared = tuple(w for w in self._shared() if k in w.stages)
        own = tuple(p.name for p in dag.params if self._owner[p.value] == k)
        weights = [v for v in read if v in flow.weights]
        return StageProgram(
            stage=k,
            stages=self._stages,
            nodes=nodes,
            inputs=tuple(i.value for i in dag.inputs if i.value in read),
            edges_in=edges_in,
            edges_out=tuple(e for e in self._edges() if e.src == k),
            params=own,
            shared=shared,
            buffers=tuple(b.name for b in dag.buffers if b.value in held | unread | (fixed & read)),
            consts=tuple(c.value for c in dag.consts if c.value in read),
            has_loss=self._made[dag.loss] == k,
            backward=any(e.grad for e in edges_in) or any(flow.grad[v] for v in weights),
        )

    def _edges(self) -> list[Edge]:
        """Every value that crosses between stages, by value id, then by consumer."""
        return [
            Edge(v, self._made[v], dst, self._flow.grad[v])
            for v in sorted(self._readers)
            if v in self._made
            for dst in sorted(self._readers[v])
            if dst != self._made[v]
        ]

    def _shared(self) -> list[SharedWeight]:
        return [
            SharedWeight(p.value, tuple(sorted(self._readers[p.value])), self._flow.grad[p.value])
            for p in self._dag.params
            if len(self._readers.get(p.value, ())) > 1
        ]

    def _read_anywhere(self) -> set[int]:
        flow = self._flow
        return {v for n, needed in enumerate(flow.needed) if needed for v in flow.reads[n]}

"""The tensors of one stage: forward and backward of a micro-batch, gradients per use of a weight. No frames here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fusion_p2p.codec import wire
from fusion_p2p.errors import InputError
from fusion_p2p.flow import analyse
from fusion_p2p.interp import Program
from fusion_p2p.ir import Arg, ListArg, Node, OpDag, Ref
from fusion_p2p.opset import dtype_of
from fusion_p2p.seeded import RngKey
from fusion_p2p.split import StageProgram

Tensors = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """What a forward is a function of, beside weights and buffers. `data`: batch tensors by value id."""

    size: int
    training: bool
    rng: RngKey
    data: Tensors


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward. `outputs` None: recompute from what is beside it."""

    micro_batch: MicroBatch
    received: dict[int, torch.Tensor]
    buffers: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor] | None


class Compute:
    """`weights` (value id -> tensor: owned ones, updated in place from outside, and foreign ones, set each tick)
    and `buffers` (value id -> tensor) are the stage's; `dtype` "bfloat16" computes under autocast.

    Each node that reads a weight is one use: it gets a leaf of its own, so that gradients of different uses never
    meet before the end of the tick.
    """

    def __init__(self, dag: OpDag, program: StageProgram, *, dtype: str, device: torch.device, recompute: bool) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise InputError(f"numerics.dtype {dtype!r} is unknown; use float32 or bfloat16")
        flow = analyse(dag)
        self._dag, self._bfloat16, self._device, self._recompute = dag, dtype == "bfloat16", device, recompute
        self._grad_in = {e.value for e in program.edges_in if e.grad}
        self.uses: dict[int, list[int]] = {}  # weight with a gradient -> ids of its uses, in the graph's order
        self._nodes = [self._own_leaves(dag.nodes[n], flow.grad, set(flow.weights)) for n in program.nodes]
        self._out = list(dict.fromkeys(e.value for e in program.edges_out)) + [dag.loss] * program.has_loss
        self._updates = {b.value: b.update for b in dag.buffers if b.name in program.buffers and b.update is not None}
        self._run = Program(self._nodes, [*self._out, *self._updates.values()])
        self._consts = {
            c.value: wire.dense_tensor(c.data, dag.values[c.value].at(1), dtype_of(dag.values[c.value].dtype)).to(
                device
            )
            for c in dag.consts
            if c.value in program.consts
        }
        self._backward = program.backward
        self.weights: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()  # uses whose sum is still autograd's own tensor, not ours to change
        self._in_flight: dict[int, _InFlight] = {}

    def begin_tick(self, foreign: Tensors) -> None:
        """New leaves over the weights of this tick; gradient sums are empty."""
        self.weights.update(foreign)
        self._sums.clear()
        self._leaves = dict(self.weights)
        for v, uses in self.uses.items():
            for use in uses:
                self._leaves[use] = self.weights[v].detach().requires_grad_()

    def forward(self, m: int, micro_batch: MicroBatch, received: Tensors) -> dict[int, torch.Tensor]:
        """Run micro-batch `m`; the values to send and the loss, detached, in their declared types."""
        keep = micro_batch.training and self._backward
        leaves = {v: x.requires_grad_(keep and v in self._grad_in) for v, x in received.items()}
        buffers = dict(self.buffers)
        env = self._evaluate(micro_batch, leaves, buffers, grad=keep)
        if micro_batch.training:
            for v, update in self._updates.items():
                self.buffers[v] = env[update].detach()
        outputs = self._outputs(env)
        if keep:
            self._in_flight[m] = _InFlight(micro_batch, leaves, buffers, None if self._recompute else outputs)
        return {v: x.detach() for v, x in outputs.items()}

    def backward(self, m: int, grads: Tensors, loss_weight: float) -> dict[int, torch.Tensor | None]:
        """Gradients of what micro-batch `m` received, given those of what it sent; weights' are added to the sums.

        `loss_weight` seeds the loss, where this stage has it: the micro-batch's share of the tick's samples.
        """
        held = self._in_flight.pop(m)
        outputs = held.outputs
        if outputs is None:
            outputs = self._outputs(self._evaluate(held.micro_batch, held.received, held.buffers, grad=True))
        given = dict(grads)
        if self._dag.loss in outputs:
            seed = torch.full_like(outputs[self._dag.loss], loss_weight)
            given[self._dag.loss] = seed + given[self._dag.loss] if self._dag.loss in given else seed
        roots = [v for v in outputs if v in given and outputs[v].requires_grad]
        wanted = {v: x for v, x in held.received.items() if v in self._grad_in}
        wanted.update((use, self._leaves[use]) for uses in self.uses.values() for use in uses)
        if not roots or not wanted:
            return dict.fromkeys(self._grad_in)
        found = torch.autograd.grad(
            [outputs[v] for v in roots], list(wanted.values()), [given[v] for v in roots], allow_unused=True
        )
        by_id = dict(zip(wanted, found, strict=True))
        for uses in self.uses.values():
            for use in uses:
                self._accumulate(use, by_id[use])
        return {v: by_id[v] for v in self._grad_in}

    def gradient(self, v: int, above: torch.Tensor | None) -> torch.Tensor | None:
        """The running sum of weight `v` over its uses, the latest first, starting from a later stage's."""
        total = above
        for use in reversed(self.uses.get(v, [])):
            g = self._sums.get(use)
            if g is not None:
                total = g if total is None else total + g
        return total

    def end_tick(self) -> None:
        self._sums.clear()
        self._leaves.clear()

    def _accumulate(self, use: int, g: torch.Tensor | None) -> None:
        """Add to the use's sum. The first gradient may share memory with another, so it is never changed."""
        if g is None:
            return
        if use not in self._sums:
            self._sums[use] = g
            self._fresh.add(use)
        elif use in self._fresh:
            self._sums[use] = self._sums[use] + g
            self._fresh.discard(use)
        else:
            self._sums[use].add_(g)

    def _evaluate(
        self, micro_batch: MicroBatch, received: Tensors, buffers: Tensors, *, grad: bool
    ) -> dict[int, torch.Tensor]:
        env = {**self._consts, **buffers, **self._leaves, **micro_batch.data, **received}
        with torch.set_grad_enabled(grad), self._precision():
            self._run(
                env,
                batch=micro_batch.size,
                training=micro_batch.training,
                rng=micro_batch.rng,
                device=self._device,
            )
        return env

    def _outputs(self, env: Tensors) -> dict[int, torch.Tensor]:
        """Under autocast a value may be narrower than declared; what is sent never is."""
        return {v: env[v].to(dtype_of(self._dag.values[v].dtype)) for v in self._out}

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if not self._bfloat16:
            yield
            return
        with torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False):
            yield

    def _own_leaves(self, node: Node, grad: tuple[bool, ...], weights: set[int]) -> Node:
        """The node with each weight it reads replaced by the id of this use; the first use keeps the weight's id."""
        names: dict[int, int] = {}

        def own(a: Arg) -> Arg:
            if isinstance(a, ListArg):
                return ListArg(tuple(own(i) for i in a.items))
            if not isinstance(a, Ref) or a.id not in weights or not grad[a.id]:
                return a
            if a.id not in names:
                uses = self.uses.setdefault(a.id, [])
                names[a.id] = a.id if not uses else len(grad) + sum(map(len, self.uses.values()))
                uses.append(names[a.id])
            return Ref(names[a.id])

        args = tuple(own(a) for a in node.args)
        kwargs = {k: own(a) for k, a in node.kwargs.items()}
        return Node(node.op, args, kwargs, node.outs, node.site) if names else node

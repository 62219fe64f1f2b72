"""Tensors of one stage to payloads and back: which codec each edge has, how long a payload may be (DESIGN 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fusion_p2p.codec import Aux, Codec, Direction, FrameKey, parse
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import TRAINER, CutReport, Kind, StepHeader
from fusion_p2p.inbox import MICRO_BATCHES, Slot
from fusion_p2p.ir import OpDag
from fusion_p2p.meter import Meter
from fusion_p2p.opset import dtype_of
from fusion_p2p.plan import Numerics
from fusion_p2p.split import Edge, StageProgram


class At(NamedTuple):
    """A micro-batch of an open tick."""

    header: StepHeader
    micro_batch: int

    @property
    def size(self) -> int:
        return self.header.sizes[self.micro_batch]


class Payloads:
    """One codec instance per edge and end; batch tensors, weights and their gradients travel dense."""

    def __init__(
        self,
        program: StageProgram,
        dag: OpDag,
        numerics: Numerics,
        seed: int,
        device: torch.device,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._program, self._dag, self._seed = program, dag, seed
        self._meter = Meter(program.stage, clock)
        self._batch = numerics.micro_batch_size
        self._dense = parse("dense", device)
        names = {(c.src, c.dst): c.codec for c in numerics.codecs}
        self._codecs: dict[Edge, Codec] = {
            e: parse(names.get((e.src, e.dst), "dense"), device) for e in (*program.edges_in, *program.edges_out)
        }
        self._inputs = {i.value: i for i in dag.inputs}
        self._aux: dict[tuple[Edge, int], Aux] = {}

    def bounds(self) -> dict[Slot, int]:
        """Every slot of the program, with the longest payload at the full micro-batch size."""
        p, me = self._program, self._program.stage
        bounds = {Slot(Kind.STEP, TRAINER, 0): 64 + 9 * MICRO_BATCHES}
        bounds.update((Slot(Kind.DATA, TRAINER, v), self._bound(self._dense, v, "forward")) for v in p.inputs)
        for e in p.edges_in:
            bounds[Slot(Kind.ACT, e.src, e.value)] = self._bound(self._codecs[e], e.value, "forward")
        for e in p.edges_out:
            if e.grad:
                bounds[Slot(Kind.GRAD, e.dst, e.value)] = self._bound(self._codecs[e], e.value, "backward")
        for w in p.shared:
            if w.stages[0] != me:
                bounds[Slot(Kind.WEIGHT, w.stages[0], w.value)] = self._bound(self._dense, w.value, "forward")
            above = w.above(me)
            if w.grad and above is not None:
                bounds[Slot(Kind.WGRAD, above, w.value)] = self._bound(self._dense, w.value, "forward")
        if me:
            bounds[Slot(Kind.VERDICT, 0, 0)] = 64
        else:
            norms = 16 + sum(len(q.name.encode()) + 14 for q in self._dag.params)
            bounds.update((Slot(Kind.NORM, s, 0), norms) for s in range(1, p.stages))
        return bounds

    def _bound(self, codec: Codec, v: int, direction: Direction) -> int:
        shape, dtype = self._spec(v, self._batch)
        return codec.bound(shape, dtype, direction)

    def _spec(self, v: int, size: int) -> tuple[tuple[int, ...], torch.dtype]:
        spec = self._dag.values[v]
        return spec.at(size), dtype_of(spec.dtype)

    # --- dense: weights and their gradients, batch tensors

    def encode(self, x: torch.Tensor, v: int) -> bytes:
        return self._dense.encode_forward(x.detach(), FrameKey(self._seed, 0, 0, v))[0]

    def decode(self, payload: bytes, v: int, size: int = 1) -> torch.Tensor:
        shape, dtype = self._spec(v, size)
        return self._dense.decode_forward(payload, shape, dtype, FrameKey(self._seed, 0, 0, v))[0]

    def decode_data(self, payload: bytes, v: int, size: int) -> torch.Tensor:
        """A batch tensor; FrameError if its integers leave the range that the graph's indexing allows."""
        x, spec = self.decode(payload, v, size), self._inputs[v]
        if x.numel() and (spec.vmin is not None or spec.vmax is not None):
            low, high = (int(y) for y in torch.aminmax(x))
            if (spec.vmin is not None and low < spec.vmin) or (spec.vmax is not None and high > spec.vmax):
                raise FrameError(
                    f"batch tensor {spec.name!r} has values {low}..{high}, allowed {spec.vmin}..{spec.vmax}"
                )
        return x

    # --- edges, by their codec

    def encode_forward(self, x: torch.Tensor, e: Edge, at: At) -> bytes:
        start = self._meter.clock()
        payload, aux = self._codecs[e].encode_forward(x, self._key(e, at))
        if at.header.training:
            self._meter.encoded(e, x, payload, start)
        self._keep(e, at, aux)
        return payload

    def decode_forward(self, payload: bytes, e: Edge, at: At) -> torch.Tensor:
        shape, dtype = self._spec(e.value, at.size)
        start = self._meter.clock()
        x, aux = self._codecs[e].decode_forward(payload, shape, dtype, self._key(e, at))
        if at.header.training:
            self._meter.decoded(e, start)
        self._keep(e, at, aux)
        return x

    def encode_backward(self, g: torch.Tensor | None, e: Edge, at: At) -> bytes:
        """An empty payload says that the loss does not depend on the value."""
        aux = self._aux.pop((e, at.micro_batch))
        if g is None:
            return b""
        start, codec, key = self._meter.clock(), self._codecs[e], self._key(e, at)
        payload = codec.encode_backward(g, aux, key)
        self._meter.encoded(e, g, payload, start)
        if at.micro_batch == 0:
            self._meter.gradient(e, g, payload, codec, aux, key)
        return payload

    def decode_backward(self, payload: bytes, e: Edge, at: At) -> torch.Tensor | None:
        aux = self._aux.pop((e, at.micro_batch))
        if not payload:
            return None
        shape, dtype = self._spec(e.value, at.size)
        start = self._meter.clock()
        g = self._codecs[e].decode_backward(payload, shape, dtype, aux, self._key(e, at))
        self._meter.decoded(e, start)
        return g

    def cuts(self) -> tuple[CutReport, ...]:
        """What the tick that ends here measured."""
        return self._meter.take()

    def _keep(self, e: Edge, at: At, aux: Aux) -> None:
        if e.grad and at.header.training:
            self._aux[e, at.micro_batch] = aux

    def _key(self, e: Edge, at: At) -> FrameKey:
        return FrameKey(self._seed, at.header.step, at.micro_batch, e.value, at.header.training)

    # --- what codecs carry from step to step

    def state(self) -> dict[str, torch.Tensor]:
        """VALUE/SRC/DST/NAME -> tensor, not a copy."""
        return {f"{e.value}/{e.src}/{e.dst}/{k}": t for e, c in self._codecs.items() for k, t in c.state_dict().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`; FrameError if a codec does not know an entry."""
        for e, codec in self._codecs.items():
            prefix = f"{e.value}/{e.src}/{e.dst}/"
            mine = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            if mine:
                codec.load_state_dict(mine)

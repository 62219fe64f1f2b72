"""A full-shape step of a stage by itself, its neighbours played: does it fit in memory, how long does it take.

A volunteer runs this before it accepts a stage (DESIGN section 4, "Admission"), on a copy of the state that is thrown
away. As many micro-batches are in flight as the plan's window allows, so the peak of memory is the real one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import msgspec
import torch

from fusion_p2p.compute import Compute
from fusion_p2p.errors import FusionError
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader, TickReport, Verdict
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import dtype_of
from fusion_p2p.payloads import At, Payloads
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.split import StageProgram
from fusion_p2p.stage import Stage

# The first step touches memory for the first time, which can take twice as long as its arithmetic (12 us a page on a
# small virtual machine): it counts only where it is long enough for that to be little, or where there is no time.
WARM_S = 15.0
ENOUGH_S = 2.0  # of the steps after it
REPEATS = 3


class TrialTimes(msgspec.Struct, frozen=True):
    """Seconds of a micro-batch (the median: the first warms up), and of one update."""

    forward_s: float
    backward_s: float
    update_s: float


def trial(
    program: StageProgram,
    dag: OpDag,
    numerics: Numerics,
    optimizer: OptimizerSpec,
    seed: int,
    state: Mapping[str, torch.Tensor],
    *,
    window: int,
    device: str,
    clock: Callable[[], float],
    compute: type[Compute] = Compute,
) -> TrialTimes:
    """Run training ticks, each by itself: one, and if that took less than WARM_S, more until ENOUGH_S or REPEATS. The
    shortest counts.

    Whatever the stage raises (FusionError, out of memory) comes through.
    """
    count = min(window, numerics.micro_batches)

    def once() -> TrialTimes:
        took: dict[str, list[float]] = {}
        stage = Stage(
            program, dag, numerics, optimizer, seed, state, window=count, device=device, clock=clock, compute=compute,
            on_unit=lambda name, seconds: took.setdefault(name, []).append(seconds),
        )  # fmt: skip
        update_s = _tick(stage, _Neighbours(program, dag, numerics, seed, torch.device(device), count))
        return TrialTimes(statistics.median_low(took["forward"]), statistics.median_low(took["backward"]), update_s)

    start = clock()
    found = [once()]
    warm = clock()
    while warm - start < WARM_S and len(found) < REPEATS and (len(found) < 2 or clock() - warm < ENOUGH_S):
        found.append(once())
    return min(found, key=lambda t: t.forward_s + t.backward_s)


def _tick(stage: Stage, neighbours: _Neighbours) -> float:
    """One training tick between `stage` and its neighbours; seconds of the update."""
    for frame in neighbours.opening():
        stage.offer(frame)
    while True:
        sent = stage.advance()
        for frame in sent or ():
            neighbours.hear(frame)
        if neighbours.report is not None:
            return neighbours.report.update_s
        if sent is None:
            gradients = neighbours.next_gradients()
            if not gradients:
                raise FusionError(f"the trial step of stage {stage.program.stage} waits for {stage.waiting_for()}")
            for frame in gradients:
                stage.offer(frame)


class _Neighbours:
    """Everybody else: producers, consumers, the trainer. Made-up tensors of the declared shapes, the plan's codecs."""

    def __init__(
        self, program: StageProgram, dag: OpDag, numerics: Numerics, seed: int, device: torch.device, count: int
    ) -> None:
        self._program, self._dag, self._device = program, dag, device
        mirrored = msgspec.structs.replace(program, edges_in=program.edges_out, edges_out=program.edges_in)
        self._payloads = Payloads(mirrored, dag, numerics, seed, device)
        self._header = StepHeader(True, 0, (numerics.micro_batch_size,) * count)
        self._random = torch.Generator().manual_seed(seed)
        self._inputs = {i.value: i for i in dag.inputs}
        self._graded = 0
        self.report: TickReport | None = None

    def opening(self) -> list[Frame]:
        """The trainer's frames, every activation, foreign weights, and what ends the tick."""
        p, frames = self._program, [self._to(Kind.STEP, TRAINER, 0, 0, msgspec.msgpack.encode(self._header))]
        for w in p.foreign:
            payload = self._payloads.encode(self._tensor(w.value, 1), w.value)
            frames.append(self._to(Kind.WEIGHT, w.stages[0], w.value, 0, payload))
        for m, size in enumerate(self._header.sizes):
            for v in p.inputs:
                frames.append(self._to(Kind.DATA, TRAINER, v, m, self._payloads.encode(self._data(v, size), v)))
            for e in p.edges_in:
                payload = self._payloads.encode_forward(self._tensor(e.value, size), e, At(self._header, m))
                frames.append(self._to(Kind.ACT, e.src, e.value, m, payload))
        for w in p.shared:
            above = w.above(p.stage)
            if w.grad and above is not None:
                frames.append(self._to(Kind.WGRAD, above, w.value, 0, b""))
        if p.stage:
            frames.append(self._to(Kind.VERDICT, 0, 0, 0, msgspec.msgpack.encode(Verdict(1.0, True, 1.0))))
        else:
            frames += [self._to(Kind.NORM, s, 0, 0, msgspec.msgpack.encode({})) for s in range(1, p.stages)]
        return frames

    def hear(self, frame: Frame) -> None:
        """A frame that the stage sends; decoded, so that what a codec remembers of it is there for the gradient."""
        at = At(self._header, frame.micro_batch)
        if frame.kind is Kind.DONE:
            self.report = msgspec.msgpack.decode(frame.payload, type=TickReport)
        for e in self._program.edges_out:
            if frame.kind is Kind.ACT and (e.value, e.dst) == (frame.value, frame.dst):
                self._payloads.decode_forward(frame.payload, e, at)

    def next_gradients(self) -> list[Frame]:
        """When nothing else is left to do, every forward of the window is in flight: the next backward's frames."""
        m = self._graded
        self._graded += 1
        if m >= len(self._header.sizes):
            return []
        size, at = self._header.sizes[m], At(self._header, m)
        return [
            self._to(Kind.GRAD, e.dst, e.value, m, self._payloads.encode_backward(self._tensor(e.value, size), e, at))
            for e in self._program.edges_out
            if e.grad
        ]

    def _to(self, kind: Kind, src: int, value: int, m: int, payload: bytes) -> Frame:
        return Frame(kind, src, self._program.stage, value, 0, m, payload)

    def _tensor(self, v: int, size: int) -> torch.Tensor:
        spec = self._dag.values[v]
        dtype = dtype_of(spec.dtype)
        if not dtype.is_floating_point:
            return torch.zeros(spec.at(size), dtype=dtype, device=self._device)
        return torch.randn(spec.at(size), generator=self._random).mul_(0.1).to(self._device, dtype)

    def _data(self, v: int, size: int) -> torch.Tensor:
        """A batch tensor; integers at the low end of what indexing allows."""
        low = self._inputs[v].vmin
        x = self._tensor(v, size)
        return x if low is None or x.dtype.is_floating_point else x + low

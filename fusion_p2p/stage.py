"""A stage: a deterministic process between numbered streams of frames (DESIGN section 2).

`offer` takes frames in any interleaving of channels, `advance` performs one unit of work and returns what it sends.
What is sent on each channel, and in which order, depends on the frames alone, never on when they came. The same class
runs in a volunteer's executor process and in `LocalPipeline`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
import torch

from fusion_p2p.arrivals import Arrivals
from fusion_p2p.compute import Compute, MicroBatch
from fusion_p2p.errors import FrameError, FusionError, InputError
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader, TickReport, Verdict
from fusion_p2p.guard import Guard
from fusion_p2p.inbox import MICRO_BATCHES, Inbox, Slot
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import dtype_of
from fusion_p2p.optim import Optimizer
from fusion_p2p.payloads import At, Payloads
from fusion_p2p.plan import Numerics
from fusion_p2p.seeded import RngKey
from fusion_p2p.sent import SentHash
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import BUFFER, CODEC, OPTIM, PARAM
from fusion_p2p.split import StageProgram, split
from fusion_p2p.suspicion import FrameId, Suspicion

_STEP = msgspec.msgpack.Decoder(StepHeader)
_VERDICT = msgspec.msgpack.Decoder(Verdict)
_NORMS = msgspec.msgpack.Decoder(dict[str, float])
_LOSS = struct.Struct("<f")
T = TypeVar("T")


class _Unit(NamedTuple):
    """One piece of work: what it is called, which frames it needs, what does it."""

    name: str
    needs: list[tuple[Slot, int]]
    run: Callable[[], list[Frame]]


@dataclass
class _Tick:
    """What a stage holds from a tick's opening to its report."""

    header: StepHeader | None = None
    forwards: int = 0  # micro-batches done
    backwards: int = 0
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[str, float] | None = None
    verdict: Verdict | None = None
    spent: dict[str, float] = field(default_factory=dict)  # unit name -> seconds
    sent: SentHash = field(default_factory=SentHash)


class Stage:
    """One stage of a run from tick `first_tick` on, its weights and optimizer state copied from `state`.

    `window`: micro-batches between their forward and their backward at most. `clock`: seconds, for the report only.
    `compute`: what runs the operators (PyTorch's, or `jax_stage.JaxCompute`).
    `guard`: looks at what comes in; before a frame that it names the stage stops until `pass_frame`.
    A FrameError from `offer` or `advance` ends the stage: rebuild it from a snapshot. `on_unit` hears the name and the
    seconds of each unit of work.
    """

    def __init__(
        self,
        program: StageProgram,
        dag: OpDag,
        numerics: Numerics,
        optimizer: OptimizerSpec,
        seed: int,
        state: Mapping[str, torch.Tensor],
        *,
        first_tick: int = 0,
        window: int = 1,
        device: str = "cpu",
        clock: Callable[[], float] = lambda: 0.0,
        compute: type[Compute] = Compute,
        guard: Guard | None = None,
        on_unit: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        if window < 1:
            raise InputError(f"window = {window} of stage {program.stage} must be at least 1")
        self.program, self.numerics, self.tick = program, numerics, first_tick
        self._dag, self._seed, self._window, self._clock, self._on_unit = dag, seed, window, clock, on_unit
        self._device = torch.device(device)
        self._clip_norm = optimizer.clip_norm
        self._stage = program.stage
        self._compute = compute(dag, program, dtype=numerics.dtype, device=self._device, recompute=numerics.recompute)
        self._value_of = {p.name: p.value for p in dag.params}
        self._buffer_of = {b.name: b.value for b in dag.buffers}
        self._payloads = Payloads(program, dag, numerics, seed, self._device, clock)
        self._inbox = Inbox(program.stage, self._payloads.bounds())
        trainable = {p.name for p in dag.params if p.trainable}
        self._params = {name: self._load(state, PARAM, name) for name in program.params}
        self._optimizer = Optimizer(optimizer, {n: p for n, p in self._params.items() if n in trainable})
        self._restore(state)
        self._guard = guard
        self._arrivals = Arrivals(program, self._inbox, self._payloads, guard)
        self.suspicion: Suspicion | None = None  # what the guard named
        self._now = _Tick()
        self._tick_start = self._clock()

    # --- frames in, units out

    def bound(self, src: int, kind: Kind, value: int) -> int:
        """Most payload bytes of such a frame; FrameError if this stage takes none."""
        return self._inbox.bound(Slot(kind, src, value))

    def offer(self, frame: Frame) -> None:
        """Keep a received frame. FrameError if it does not fit what the program declares."""
        with _blaming(frame.src):
            self._inbox.put(frame, self.tick)
            if frame.kind is Kind.STEP:
                self._header_of(frame.payload)

    def advance(self) -> list[Frame] | None:
        """Perform one unit, backward before forward; the frames to send, or None when every unit waits for one."""
        if self.suspicion is not None:
            return None
        for unit in self._units():
            if all(self._arrivals.has(slot, self.tick, m) for slot, m in unit.needs):
                start = self._clock()
                self.suspicion = self._arrivals.decode(unit.needs, self.tick, self._now.header)
                if self.suspicion is not None:
                    return None
                frames = unit.run()
                self._now.sent.add(frames)
                took = self._clock() - start
                self._now.spent[unit.name] = self._now.spent.get(unit.name, 0.0) + took
                self._on_unit(unit.name, took)
                return [*frames, *self._report()] if unit.name in ("update", "end") else frames
        return None

    def waiting_for(self) -> str:
        """The frames that the next unit lacks, in words; "" if there is work to do."""
        if self.suspicion is not None:
            return f"another host's word on {self.suspicion.frame}"
        lacks = ""
        for unit in self._units():
            missing = [(slot, m) for slot, m in unit.needs if not self._arrivals.has(slot, self.tick, m)]
            if not missing:
                return ""
            if not lacks:
                slot, m = missing[0]
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                lacks = f"{unit.name} of tick {self.tick}, micro-batch {m}: {slot}{more}"
        return lacks

    def _units(self) -> Iterator[_Unit]:
        """What may be done now, the most urgent first."""
        header, p = self._now.header, self.program
        if header is None:
            needs = [(Slot(Kind.STEP, TRAINER, 0), 0)]
            needs += [(Slot(Kind.WEIGHT, w.stages[0], w.value), 0) for w in p.foreign]
            yield _Unit("open", needs, self._open)
            return
        count, backward = len(header.sizes), header.training and p.backward
        if backward and self._now.backwards < self._now.forwards:
            needs = [(Slot(Kind.GRAD, e.dst, e.value), self._now.backwards) for e in p.edges_out if e.grad]
            yield _Unit("backward", needs, self._do_backward)
        if self._now.forwards < count and (not backward or self._now.forwards - self._now.backwards < self._window):
            needs = [(Slot(Kind.DATA, TRAINER, v), self._now.forwards) for v in p.inputs]
            needs += [(Slot(Kind.ACT, e.src, e.value), self._now.forwards) for e in p.edges_in]
            yield _Unit("forward", needs, self._do_forward)
        if self._now.forwards < count or (backward and self._now.backwards < count):
            return
        if not header.training:
            yield _Unit("end", [], list)
        elif self._now.norms is None:
            above = [(w, w.above(self._stage)) for w in p.shared if w.grad]
            needs = [(Slot(Kind.WGRAD, s, w.value), 0) for w, s in above if s is not None]
            yield _Unit("reduce", needs, self._do_reduce)
        elif self._now.verdict is None and self._stage == 0:
            needs = [(Slot(Kind.NORM, s, 0), 0) for s in range(1, p.stages)]
            yield _Unit("verdict", needs, self._do_verdict)
        else:
            needs = [] if self._stage == 0 else [(Slot(Kind.VERDICT, 0, 0), 0)]
            yield _Unit("update", needs, self._do_update)

    def pass_frame(self, frame: FrameId) -> None:
        """The suspicious frame may be used."""
        if self._guard is not None and self.suspicion is not None and self.suspicion.frame == frame:
            self._guard.passed(self.suspicion)
            self.suspicion = None

    # --- units

    def _open(self) -> list[Frame]:
        self._now.header = self._header_of(self._inbox.take(Slot(Kind.STEP, TRAINER, 0), self.tick))
        foreign: dict[int, torch.Tensor] = {}
        for w in self.program.foreign:
            x = self._arrivals.pop(Slot(Kind.WEIGHT, w.stages[0], w.value))
            if x is not None:
                foreign[w.value] = x
        self._compute.begin_tick(foreign)
        return [
            self._frame(Kind.WEIGHT, dst, w.value, 0, self._payloads.encode(self._compute.weights[w.value], w.value))
            for w in self.program.shared
            if w.stages[0] == self._stage
            for dst in w.stages[1:]
        ]

    def _do_forward(self) -> list[Frame]:
        header, m = self._opened(), self._now.forwards
        size = header.sizes[m]
        where = At(header, m)
        data: dict[int, torch.Tensor] = {}
        received: dict[int, torch.Tensor] = {}
        with _blaming(TRAINER):
            for v in self.program.inputs:
                payload = self._inbox.take(Slot(Kind.DATA, TRAINER, v), self.tick, m)
                data[v] = self._payloads.decode_data(payload, v, size)
        for e in self.program.edges_in:
            x = self._arrivals.pop(Slot(Kind.ACT, e.src, e.value), m)
            if x is not None:
                received[e.value] = x
        rng = RngKey(self._seed, header.step, m)
        outputs = self._compute.forward(m, MicroBatch(size, header.training, rng, data), received)
        self._now.forwards += 1
        frames = [
            self._frame(Kind.ACT, e.dst, e.value, m, self._payloads.encode_forward(outputs[e.value], e, where))
            for e in self.program.edges_out
        ]
        if self.program.has_loss:
            loss = float(outputs[self._dag.loss])
            frames.append(self._frame(Kind.LOSS, TRAINER, 0, m, _LOSS.pack(loss)))
        return frames

    def _do_backward(self) -> list[Frame]:
        header, m = self._opened(), self._now.backwards
        size = header.sizes[m]
        where = At(header, m)
        grads: dict[int, torch.Tensor] = {}
        for e in sorted((e for e in self.program.edges_out if e.grad), key=lambda e: -e.dst):  # the latest first
            g = self._arrivals.pop(Slot(Kind.GRAD, e.dst, e.value), m)
            if g is not None:
                grads[e.value] = grads[e.value] + g if e.value in grads else g
        found = self._compute.backward(m, grads, size / sum(header.sizes))
        self._now.backwards += 1
        return [
            self._frame(Kind.GRAD, e.src, e.value, m, self._payloads.encode_backward(found[e.value], e, where))
            for e in self.program.edges_in
            if e.grad
        ]

    def _do_reduce(self) -> list[Frame]:
        """Sum each weight's uses, pass on the sums of foreign weights, norm those of owned ones."""
        frames = []
        sums: dict[int, torch.Tensor | None] = {}
        for w in self.program.shared:
            above = w.above(self._stage)
            if not w.grad:
                continue
            so_far = None if above is None else self._arrivals.pop(Slot(Kind.WGRAD, above, w.value))
            sums[w.value] = total = self._compute.gradient(w.value, so_far)
            below = w.below(self._stage)
            if below is not None:
                payload = b"" if total is None else self._payloads.encode(total, w.value)
                frames.append(self._frame(Kind.WGRAD, below, w.value, 0, payload))
        for name in self.program.params:
            v = self._value_of[name]
            g = sums[v] if v in sums else self._compute.gradient(v, None)
            if g is not None:
                self._now.grads[name] = g
        self._now.norms = _squared_norms(self._now.grads)
        if self._stage != 0:
            frames.append(self._frame(Kind.NORM, 0, 0, 0, msgspec.msgpack.encode(self._now.norms)))
        return frames

    @functools.cached_property
    def _owned(self) -> list[frozenset[str]]:
        """Which parameters each stage has: who names another's would have that one blamed."""
        return [frozenset(p.params) for p in split(self._dag, self.numerics.cuts)]

    def _do_verdict(self) -> list[Frame]:
        """Global norm in name order, fp64; skip on NaN or infinity; clip as torch.nn.utils.clip_grad_norm_ does."""
        squares = dict(self._now.norms or {})
        for s in range(1, self.program.stages):
            with _blaming(s):
                theirs = _decode(_NORMS, self._inbox.take(Slot(Kind.NORM, s, 0), self.tick), f"norms of stage {s}")
                if unknown := [n for n in theirs if n not in self._owned[s]]:
                    raise FrameError(f"norms of stage {s} name {unknown[0]!r}, which is not its parameter")
                if lies := [n for n, square in theirs.items() if square < 0]:
                    raise FrameError(f"norms of stage {s}: the square {theirs[lies[0]]} of {lies[0]!r} is negative")
            squares.update(theirs)
        norm = math.sqrt(sum(squares[name] for name in sorted(squares)))
        finite = math.isfinite(norm)
        clip = finite and self._clip_norm is not None
        scale = min(1.0, self._clip_norm / (norm + 1e-6)) if clip and self._clip_norm is not None else 1.0
        self._now.verdict = Verdict(norm, finite, scale)
        payload = msgspec.msgpack.encode(self._now.verdict)
        return [self._frame(Kind.VERDICT, s, 0, 0, payload) for s in range(1, self.program.stages)]

    def _do_update(self) -> list[Frame]:
        if self._now.verdict is None:
            payload = self._inbox.take(Slot(Kind.VERDICT, 0, 0), self.tick)
            with _blaming(0):
                self._now.verdict = _decode(_VERDICT, payload, "verdict of stage 0")
        scale = self._now.verdict.scale
        if self._now.verdict.apply:
            grads = self._now.grads if scale == 1.0 else {n: g * scale for n, g in self._now.grads.items()}
            self._optimizer.step(self._opened().step, grads)
        return []

    def _report(self) -> list[Frame]:
        """Close the tick; its report."""
        now = self._clock()
        spent = self._now.spent
        named = {name: spent.get(name, 0.0) for name in ("forward", "backward")}
        rest = sum(spent.values()) - sum(named.values())
        wait = max(0.0, now - self._tick_start - sum(spent.values()))
        report = TickReport(
            named["forward"], named["backward"], rest, wait, self._payloads.cuts(), self._now.sent.digest()
        )
        frame = self._frame(Kind.DONE, TRAINER, 0, 0, msgspec.msgpack.encode(report))
        if left := self._inbox.left(self.tick):
            raise FrameError(f"stage {self._stage} ends tick {self.tick} with a frame left over: {left[0]}")
        self.tick += 1
        self._close_tick()
        return [frame]

    def _close_tick(self) -> None:
        self._compute.end_tick()
        self._now = _Tick()
        self._tick_start = self._clock()

    # --- snapshots

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of all that the next tick depends on (see `snapshot.py`). FusionError inside a tick."""
        if self._now.header is not None:
            raise FusionError(f"stage {self._stage} is inside tick {self.tick}; snapshots are taken between ticks")
        out = {PARAM + n: p.detach().clone() for n, p in self._params.items()}
        out.update((BUFFER + n, self._compute.buffers[self._buffer_of[n]].clone()) for n in self.program.buffers)
        out.update((f"{OPTIM}{slot}/{n}", t.clone()) for (slot, n), t in self._optimizer.state().items())
        out.update((CODEC + k, t.clone()) for k, t in self._payloads.state().items())
        return out

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._compute.weights = {self._value_of[n]: p for n, p in self._params.items()}
        self._compute.buffers = {self._buffer_of[n]: self._load(state, BUFFER, n) for n in self.program.buffers}
        optim: dict[tuple[str, str], torch.Tensor] = {}
        for key, t in state.items():
            if key.startswith(OPTIM):
                slot, _, name = key.removeprefix(OPTIM).partition("/")
                optim[slot, name] = t
        self._optimizer.load(optim)
        self._payloads.load({k.removeprefix(CODEC): t for k, t in state.items() if k.startswith(CODEC)})

    def _load(self, state: Mapping[str, torch.Tensor], prefix: str, name: str) -> torch.Tensor:
        t = state.get(prefix + name)
        spec = self._dag.values[(self._value_of if prefix == PARAM else self._buffer_of)[name]]
        if t is None:
            raise InputError(f"the state of stage {self._stage} lacks {prefix + name}")
        if t.dtype != dtype_of(spec.dtype) or tuple(t.shape) != spec.at(1):
            raise InputError(f"{prefix + name} is {t.dtype} {tuple(t.shape)}, the model has {spec.dtype} {spec.at(1)}")
        return t.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)

    def _header_of(self, payload: bytes) -> StepHeader:
        header = _decode(_STEP, payload, "step header")
        most = self.numerics.micro_batches if header.training else MICRO_BATCHES
        if not 1 <= len(header.sizes) <= most or header.step < 0:
            raise FrameError(f"step {header.step} has {len(header.sizes)} micro-batches, the plan at most {most}")
        if not all(1 <= s <= self.numerics.micro_batch_size for s in header.sizes):
            raise FrameError(f"micro-batch sizes {header.sizes[:8]} outside 1..{self.numerics.micro_batch_size}")
        return header

    def _opened(self) -> StepHeader:
        if self._now.header is None:
            raise FusionError(f"stage {self._stage}: tick {self.tick} is not open")
        return self._now.header

    def _frame(self, kind: Kind, dst: int, value: int, m: int, payload: bytes) -> Frame:
        return Frame(kind, self._stage, dst, value, self.tick, m, payload)


@contextlib.contextmanager
def _blaming(src: int) -> Iterator[None]:
    """A FrameError inside is the fault of endpoint `src`."""
    try:
        yield
    except FrameError as error:
        error.src = src
        raise


def _squared_norms(grads: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """In double precision; fetched from the device at once."""
    if not grads:
        return {}
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in grads.values()]
    norms = torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in parts])
    return dict(zip(grads, norms.square().tolist(), strict=True))


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes, what: str) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"{what} is malformed: {error}") from None

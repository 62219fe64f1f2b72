"""All stages of a run in this process: the same `Stage` as in the swarm, frames handed over directly."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from fusion_p2p.capture import Captured
from fusion_p2p.compute import Compute
from fusion_p2p.errors import FusionError, InputError
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader, TickReport
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.release import Parts, cut_batch, release
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import initial_state, redistribute, weights, weights_blake2b
from fusion_p2p.split import StageProgram, split
from fusion_p2p.stage import Stage

_LOSS = struct.Struct("<f")


class LocalPipeline:
    """Trains `captured` over the stages that `cuts` (atom positions, see `split`) make; also plays the trainer.

    A batch has the structure of the captured example, with at most `micro_batches` x `micro_batch_size` samples.
    The model's own tensors are copied, not changed. `on_frame` sees every frame between stages,
    `on_report` each stage's report of each tick. `optimizer`: `AdamW` or `SGD`. `codecs`: one a cut, none: dense.
    `seed`: of all random tensors. `dtype`: "float32" or "bfloat16", in which it computes. `recompute`: activations are
    computed again in the backward. `device`: as torch names it.
    `compute`: stage -> what runs its operators, where that is not PyTorch. InputError for cuts, dtype or a batch that
    do not fit. Losses are in nats where the model's are; weights are bit for bit those of a swarm with these numerics
    (DESIGN section 2).
    """

    def __init__(
        self,
        captured: Captured,
        *,
        optimizer: OptimizerSpec,
        micro_batches: int,
        micro_batch_size: int,
        cuts: Sequence[int] = (),
        codecs: Sequence[LinkCodec] = (),
        seed: int = 0,
        dtype: str = "float32",
        recompute: bool = False,
        device: str = "cpu",
        on_frame: Callable[[Frame], None] | None = None,
        on_report: Callable[[int, TickReport], None] | None = None,
        compute: Mapping[int, type[Compute]] | None = None,
    ) -> None:
        self._captured, self._dag = captured, captured.opdag
        self._on_frame, self._on_report = on_frame, on_report
        self.numerics = Numerics(
            cuts=tuple(cuts),
            codecs=tuple(codecs),
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            dtype=dtype,
            recompute=recompute,
        )
        self.optimizer = optimizer
        self._seed, self._device, self._engines = seed, device, compute or {}
        self.tick = 0
        self._cut_as(self.numerics, lambda p: initial_state(captured.state, p))
        self.step = 0

    def change(self, cuts: Sequence[int], codecs: Sequence[LinkCodec] = ()) -> None:
        """Other `cuts` or `codecs` from the next step on, as a run does at a complete set. InputError as above."""
        held = [stage.snapshot() for stage in self.stages]
        numerics = msgspec.structs.replace(self.numerics, cuts=tuple(cuts), codecs=tuple(codecs))
        self._cut_as(numerics, lambda p: redistribute(held, p))

    def _cut_as(self, numerics: Numerics, state: Callable[[StageProgram], Mapping[str, torch.Tensor]]) -> None:
        self.numerics, self.programs = numerics, split(self._dag, numerics.cuts)
        self.stages = [
            Stage(
                p,
                self._dag,
                numerics,
                self.optimizer,
                self._seed,
                state(p),
                first_tick=self.tick,
                window=p.stages - p.stage,
                device=self._device,
                compute=self._engines.get(p.stage, Compute),
            )
            for p in self.programs
        ]

    def train_step(self, batch: Any) -> float:
        """One optimizer step on `batch`; the mean loss over it before the step. InputError if it does not fit."""
        loss = self._run(batch, training=True)
        self.step += 1
        return loss

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over all samples of `batches`, in eval mode; changes nothing. InputError if there are none."""
        total, samples = 0.0, 0
        for batch in batches:
            sizes, _ = self._cut(batch, training=False)
            total += self._run(batch, training=False) * sum(sizes)
            samples += sum(sizes)
        if not samples:
            raise InputError("evaluate got no batches; pass at least one")
        return total / samples

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all persistent parameters and buffers, tied names too: loads with strict=True."""
        held = self._weights()
        hidden = {b.name for b in self._dag.buffers if not b.persistent}
        held.update((alias, held[name]) for alias, name in self._dag.aliases.items())
        return {n: t for n, t in held.items() if n not in hidden and self._dag.aliases.get(n) not in hidden}

    def weights_blake2b(self) -> str:
        """Hash of every parameter and buffer (see `snapshot.weights_blake2b`)."""
        return weights_blake2b(self._weights())

    def _weights(self) -> dict[str, torch.Tensor]:
        return weights(stage.snapshot() for stage in self.stages)

    def _cut(self, batch: Any, *, training: bool) -> tuple[tuple[int, ...], Parts]:
        return cut_batch(self._dag, self._captured.feed(batch), self.numerics.micro_batch_size, training=training)

    def _run(self, batch: Any, *, training: bool) -> float:
        """Deliver frames until every stage has reported."""
        sizes, parts = self._cut(batch, training=training)
        if training and len(sizes) > self.numerics.micro_batches:
            most = self.numerics.micro_batches * self.numerics.micro_batch_size
            raise InputError(f"the batch has {sum(sizes)} samples, the pipeline takes {most} a step")
        for frame in release(self._dag, self.programs, self.tick, StepHeader(training, self.step, sizes), parts):
            self.stages[frame.dst].offer(frame)
        losses: dict[int, float] = {}
        reports = 0
        while reports < len(self.stages):
            moved = False
            for stage in self.stages:
                for frame in (frames := stage.advance()) or ():
                    if frame.kind is Kind.LOSS:
                        losses[frame.micro_batch] = _LOSS.unpack(frame.payload)[0]
                    elif frame.dst == TRAINER:
                        reports += 1
                        if self._on_report is not None:
                            self._on_report(frame.src, msgspec.msgpack.decode(frame.payload, type=TickReport))
                    else:
                        self._deliver(frame)
                moved = moved or frames is not None
            if not moved:
                raise FusionError(
                    "; ".join(f"stage {s.program.stage} waits for {s.waiting_for()}" for s in self.stages)
                )
        self.tick += 1
        return sum(losses[m] * size for m, size in enumerate(sizes)) / sum(sizes)

    def _deliver(self, frame: Frame) -> None:
        if self._on_frame is not None:
            self._on_frame(frame)
        self.stages[frame.dst].offer(frame)

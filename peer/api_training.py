"""What an open run does: steps, evaluation, complete sets, weights, reports. `peer.api.Run` opens and closes it."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import torch

from fusion_p2p.capture import feed
from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from fusion_p2p.snapshot import from_bytes, weights, weights_blake2b
from peer.api_open import Opened, position
from peer.data import Batch
from peer.data_stream import SpooledSource, in_parts
from peer.events import EvalResult, Happening, Sink, StepResult
from peer.report import Report, TrainSummary, summary
from peer.trainer import AHEAD
from peer.trainer_ticks import TickResult, step_result

REPORT_WAIT_S = 4.0


class Training:
    """The methods of `Run` that need it open; they block."""

    _model: torch.nn.Module | None
    _numerics: Numerics
    _save_every: int
    _saved_step: int
    _report: Report
    _sinks: tuple[Sink, ...]
    _open_run: Opened | None

    def _hear(self, happening: Happening) -> None:
        for sink in self._sinks:
            sink(happening)

    # --- training

    def plan(self) -> Plan:
        """The plan in force; `.explain()` says who hosts what and why."""
        return self._opened().session.trainer.plan

    def numeric_log(self) -> list[NumericLogEntry]:
        """The numerics that held so far and from which step on each, with the reason of each change."""
        return [entry for _, entry in self._opened().folder.numeric_log()]

    @property
    def step(self) -> int:
        """Optimizer steps released so far, over all sessions of this run."""
        return self._opened().session.trainer.step

    def steps(self, count: int) -> Generator[StepResult, None, None]:
        """Train `count` steps, yielding each as it ends. Who leaves early keeps the steps under way, AHEAD at most.

        Raises RunPaused (a stage is lost and nobody takes it), InputError (the run is not open, or what `data` yields
        does not fit).
        """
        under_way = deque[asyncio.Future[TickResult]]()
        released = 0
        try:
            while released < count or under_way:
                while released < count and len(under_way) < AHEAD:
                    under_way.append(self._release_next())
                    released += 1
                yield step_result(self._wait(under_way.popleft()))
        except GeneratorExit:
            while under_way and self._open_run is not None:
                self._wait(under_way.popleft())
            raise

    def train(self, count: int) -> TrainSummary:
        """Train `count` steps; blocks. Raises as `steps`."""
        begin = time.perf_counter()
        done = list(self.steps(count))
        return summary(done, time.perf_counter() - begin)

    def evaluate(self, data: Any) -> float:
        """Mean loss over every sample of `data` (batches, or a source of ours), in eval mode on the swarm.

        Changes nothing. A batch may have any number of samples: a large one passes in parts of a global batch's size.
        Raises InputError if there are none, RunPaused.
        """
        samples = self._numerics.micro_batches * self._numerics.micro_batch_size
        under_way = deque[asyncio.Future[TickResult]]()
        total, seen = 0.0, 0
        for part in itertools.chain(in_parts(data, samples), itertools.repeat(None, AHEAD)):
            if part is not None:
                self._save_if_due()
                under_way.append(self._release(part, training=False))
            if under_way and (part is None or len(under_way) >= AHEAD):
                result = self._wait(under_way.popleft())
                size = sum(result.header.sizes)
                total, seen = total + result.loss * size, seen + size
        if not seen:
            raise InputError("evaluate got no batches; pass at least one")
        self._hear(EvalResult(step=self.step, loss=total / seen, samples=seen))
        return total / seen

    def _release_next(self) -> asyncio.Future[TickResult]:
        samples = self._numerics.micro_batches * self._numerics.micro_batch_size
        self._save_if_due()  # before the batch is taken: a set holds the data's position too
        return self._release(self._opened().source.next_batch(samples), training=True)

    def _release(self, batch: Batch, *, training: bool) -> asyncio.Future[TickResult]:
        o = self._opened()
        return o.loop.call(o.session.trainer.release(feed(o.begun.dag, batch, o.begun.constants), training=training))

    def _wait(self, future: asyncio.Future[TickResult]) -> TickResult:
        o = self._opened()
        return o.loop.call(o.session.trainer.wait(future))

    # --- state

    def save(self) -> int:
        """A complete set in the run folder, verified; the step it holds. `Run.resume` goes on from the newest.
        Raises RunPaused, DiskFull."""
        o = self._opened()
        manifest = o.loop.call(o.session.trainer.save(position(o.source)))
        self._saved_step = manifest.step
        self._tidy_spool()
        return manifest.step

    def _save_if_due(self) -> None:
        """A set that comes about while training goes on; a change of plan waits for it."""
        trainer = self._opened().session.trainer
        every = self._save_every and trainer.step - self._saved_step >= self._save_every
        if trainer.change_due:
            self.save()
        elif every or trainer.sets.is_due:
            o = self._opened()
            if o.loop.call(trainer.mark(position(o.source))):
                self._saved_step = trainer.step
                self._tidy_spool()

    def _tidy_spool(self) -> None:
        """Forget the batches that no complete set needs."""
        o = self._opened()
        if isinstance(o.source, SpooledSource):
            oldest = o.folder.manifest(o.folder.sets()[0])
            o.source.forget_before(msgspec.json.decode(oldest.data_state))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every persistent parameter and buffer as it is now, tied names too: loads with strict=True."""
        dag, held = self._opened().begun.dag, self._weights()
        hidden = {b.name for b in dag.buffers if not b.persistent}
        held.update((alias, held[name]) for alias, name in dag.aliases.items())
        return {n: t for n, t in held.items() if n not in hidden and dag.aliases.get(n) not in hidden}

    def export(self, out: str | os.PathLike[str], *, adapter: bool = False) -> list[str]:
        """Load the weights into the model and write it as the folder `out` that `from_pretrained` loads; its files.

        adapter: only the adapter of a peft model; else an adapter is merged into what is written.
        Raises InputError if `out` is not empty, or the run was resumed without its model.
        """
        from peer.export import export, load_weights

        if self._model is None:
            raise InputError("export needs the model: Run.resume(run_dir, model=model, data=...)")
        load_weights(self._model, self.state_dict(), "the run's state")
        return export(self._model, Path(out), adapter=adapter)

    def report(self) -> dict[str, Any]:
        """Per-step loss and step_time_s, tokens_per_s, the plan, bytes_sent per link, events, weights_blake2b.

        exact_to: "bit", or "rounding" once a host that took over sent other bytes.
        """
        o = self._opened()
        hashed = weights_blake2b(self._weights())
        o.loop.call(o.session.trainer.watch.news(self.plan().numerics.stages, REPORT_WAIT_S))
        return self._report.as_dict(hashed)

    def _weights(self) -> dict[str, torch.Tensor]:
        self.save()
        folder = self._opened().folder
        return weights(from_bytes(data) for data in folder.snapshots(folder.manifest()).values())

    def _opened(self) -> Opened:
        if self._open_run is None:
            raise InputError("the run is not open; use it inside: with fusion_p2p.Run(...) as run")
        return self._open_run

"""`fusion-run train` and `resume`: from a configuration to a `peer.api.Run`, and what is shown at the end."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec
import torch
from torch import nn

from dht.addresses import check_swarm_address
from dht.errors import SwarmUnreachable
from dht.home import last_swarm
from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry
from peer import checkpoint as checkpoints
from peer.api import SAVE_EVERY, LocalSwarm, Run, RunPaused
from peer.config import Config
from peer.config_text import dump
from peer.data import ArraySource, Batch, TokenSource
from peer.data_open import OpenedData, open_data
from peer.data_stream import as_source
from peer.errors import DiskFull, is_disk_full
from peer.events import RunEvent, Sink, StepResult
from peer.export import load_weights, sample_text
from peer.lab.chaos import Chaos, Fault
from peer.lab.undisturbed import undisturbed_weights
from peer.models import build_model, context_of
from peer.numeric_log import read as read_log
from peer.plot import curve
from peer.run_control import ControlServer, TrainerLock
from peer.run_index import CONFIG, folder_for, load_config
from peer.runlog import open_logs, read_losses
from peer.tokenize_text import FILE as TOKENIZER_FILE
from peer.trainer_state import RunFolder, write_atomic
from peer.view import View

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
SwarmChoice: TypeAlias = LocalSwarm | tuple[str, ...]


def train(
    config: Config,
    *,
    run_dir: Path | None,
    report: Path | None,
    origin: Path | None = None,
    faults: Sequence[Fault] | None = None,
    numeric_log: Path | None = None,
) -> int:
    """Start a run, from the weights of checkpoint `origin` if given; the exit code. Raises InputError.

    `numeric_log`: of a run whose changes of cuts and codecs are repeated. `faults` befall its local swarm; then the
    exit code is 1 unless the weights are those of an undisturbed run.

    A run that cannot begin leaves nothing behind.
    """
    folder = folder_for(config, str(run_dir) if run_dir else None)
    _check_report(report)
    if numeric_log is not None:
        read_log(numeric_log)
    swarm = choose_swarm(config)
    is_new = not os.path.lexists(folder)
    RunFolder(folder).make()
    if RunFolder(folder).sets():
        raise InputError(f"{folder} holds a run already; continue it with: fusion-run resume {folder}")
    if not (folder / CONFIG).exists() and any(folder.iterdir()):
        raise InputError(f"{folder} exists and is no run folder; give a new one with --run-dir or run.dir")
    try:
        with TrainerLock(folder):
            RunFolder(folder).forget_start()
            (folder / TOKENIZER_FILE).unlink(missing_ok=True)
            write_atomic(folder / CONFIG, dump(_anchored(config)).encode("utf-8"))
            session = _Session(config, folder, swarm, report, numeric_log)
            if faults is not None and isinstance(swarm, LocalSwarm):
                session.chaos = Chaos(swarm, faults, told=partial(session.tell, "chaos"))
            return session.run(origin)
    finally:
        if is_new and not RunFolder(folder).sets():
            shutil.rmtree(folder, ignore_errors=True)


def resume(config: Config, folder: Path, *, report: Path | None) -> int:
    """Go on with the run in `folder`; the exit code. Raises InputError."""
    _check_report(report)
    run = RunFolder(folder)
    run.spec()  # says so where there is no run
    with TrainerLock(folder):
        for line in run.mend():
            print(f"fusion-run: {line}", file=sys.stderr)
    done = run.manifest().step
    if done >= config.run.steps:
        raise InputError(f"all {done} steps are done; go on with more: fusion-run resume {folder} --steps {2 * done}")
    with TrainerLock(folder):
        kept = load_config(folder)
        kept = msgspec.structs.replace(kept, run=msgspec.structs.replace(kept.run, steps=config.run.steps))
        write_atomic(folder / CONFIG, dump(kept).encode("utf-8"))
        return _Session(config, folder, choose_swarm(config), report).run(None, resuming=True)


def _check_report(file: Path | None) -> None:
    """It is written at the end: what forbids that is said before anything begins."""
    if file is not None and (file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK)):
        raise InputError(f"--report {file}: no file can be written there; give one in a folder that exists")


def choose_swarm(config: Config) -> SwarmChoice:
    """swarm.local, else swarm.address, $FUSION_SWARM, the swarm joined last. Raises InputError, also for a malformed
    address."""
    if config.swarm.local:
        return LocalSwarm(peers=config.swarm.local)
    named = (config.swarm.address or os.environ.get("FUSION_SWARM", "")).split()
    found = tuple(check_swarm_address(a) for a in named) or last_swarm()
    if not found:
        raise InputError("no swarm: give --swarm ADDR or --local N, or join one first: fusion-peer join")
    return found


def _anchored(config: Config) -> Config:
    """The configuration as the run folder keeps it: its paths hold from any working directory, and the end of the decay
    does not move when a later session asks for more steps."""
    replace = msgspec.structs.replace
    data, model = config.data, config.model
    optimizer = replace(config.optimizer, decay_steps=config.optimizer_spec().schedule.total)
    if data.kind in ("text", "tokens", "idx"):
        data = replace(data, path=str(Path(data.path).resolve()))
    if model.hf:
        model = replace(model, hf=str(Path(model.hf).resolve()))
    return replace(config, data=data, model=model, optimizer=optimizer)


class _Paused(Exception):
    """Unwinds a session that was asked to pause; everything up to `step` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class _Session:
    """One trainer process on one run folder."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        swarm: SwarmChoice,
        report_file: Path | None,
        numeric_log: Path | None = None,
    ) -> None:
        self._config, self._folder, self._swarm, self._report_file = config, folder, swarm, report_file
        self._numeric_log = numeric_log
        self._deadline_s = time.monotonic() + 60 * config.run.minutes if config.run.minutes else None
        self._held_out: tuple[int, float] | None = None  # after so many steps, this loss
        self._asked = ""  # "pause" or "stop", heard on the control socket
        self._last: StepResult | None = None
        self.chaos: Chaos | None = None
        self._sinks: tuple[Sink, ...] = ()
        self._trained: tuple[list[NumericLogEntry], str] | None = None  # under chaos: with what, and the weights' hash

    def run(self, origin: Path | None, *, resuming: bool = False) -> int:
        logging.getLogger("torch").setLevel(logging.ERROR)  # a refused model is one line of ours
        # beside busy volunteers, threads that wait for each other cost more than they bring
        torch.set_num_threads(self._config.numerics.threads)
        data = open_data(self._config, self._folder, context_of(self._config))
        # a run that goes on needs no model code: the folder holds the checked OP-DAG
        model = None if resuming else self._model(data, origin)
        try:
            with _terminable():
                model = self._train(data, model)
        except _Paused as paused:
            print(f"paused after {paused.step} steps; {self._hint()}")
            return 0
        except SwarmUnreachable as error:
            if self._last is None:  # an address that never answered is the user's to mend
                raise InputError(str(error)) from error
            raise
        except KeyboardInterrupt:
            print(f"\nfusion-run: ended by Ctrl-C; {self._hint()}", file=sys.stderr)
            return EXIT_INTERRUPTED
        except (OSError, DiskFull) as error:
            if not is_disk_full(error):
                raise
            where = getattr(error, "filename", None) or self._folder
            print(f"fusion-run: no space left on the disk of {where}; make room, then {self._hint()}", file=sys.stderr)
            return DiskFull.exit_code
        except RunPaused as error:
            print(f"fusion-run: {error}", file=sys.stderr)
            return error.exit_code
        self._show_end(data, model)
        return 0 if self._trained is None else self._compare(origin, *self._trained)

    def _model(self, data: OpenedData, origin: Path | None) -> nn.Module:
        model = build_model(self._config, data)
        if origin is not None:
            load_weights(model, checkpoints.load(origin)[1], str(origin))
        return model

    def _train(self, data: OpenedData, model: nn.Module | None) -> nn.Module:
        """The model with the trained weights; `model` None: the run in the folder goes on."""
        ratio = _bytes_per_token(data)
        with ExitStack() as stack:
            sinks: list[Sink] = []
            for log in open_logs(self._config.log, self._folder, self._config.run.name, ratio):
                stack.callback(log.close)
                sinks.append(log)
            view = View(
                self._config.run.name, self._config.run.steps, deadline_s=self._deadline_s, bytes_per_token=ratio
            )
            stack.enter_context(view)
            self._sinks = (*sinks, view)
            stack.enter_context(ControlServer(self._folder, self._status, self._hear_request))
            if self.chaos is not None:
                stack.enter_context(self.chaos)
            with self._open(data, model, [*sinks, view]) as run:
                self._loop(run, data)
                if self.chaos is not None:
                    self._trained = run.numeric_log(), run.report()["weights_blake2b"]
                if self._asked == "pause":
                    raise _Paused(run.save())
                self._evaluate(run, data)
                trained = model or self._model(data, None)
                load_weights(trained, self._checkpoint(run), str(self._folder))
                if self._report_file is not None:
                    text = json.dumps(run.report(), indent=1)
                    write_atomic(self._report_file, text.encode("utf-8"))
                return trained

    def _open(self, data: OpenedData, model: nn.Module | None, sinks: list[Sink]) -> Run:
        c = self._config
        common: dict[str, Any] = {
            "data": data.train,
            "swarm": self._swarm,
            "allow_peers": c.swarm.allow_peers,
            "compute": c.swarm.compute,
            "save_every": min(SAVE_EVERY, c.checkpoint.save_every or SAVE_EVERY),  # a lost stage goes back to a set
            "total_steps": c.run.steps,
            "numerics": c.numerics.mode,
            "stages": c.numerics.stages or None,
            "compression": c.numerics.compression,
            "on": sinks,
        }
        if model is None:
            return Run.resume(self._folder, **common)
        return Run(
            model,
            name=c.run.name,
            description=c.run.description,
            optimizer=c.optimizer_spec(),
            micro_batches=c.batch.micro_batches,
            micro_batch_size=c.batch.micro_batch_size,
            seed=c.run.seed,
            run_dir=self._folder,
            dtype=c.numerics.dtype,
            recompute=c.numerics.recompute,
            device_class=c.numerics.device_class,
            threads=c.numerics.threads,
            numeric_log=self._numeric_log,
            **common,
        )

    def _loop(self, run: Run, data: OpenedData) -> None:
        """Steps until the last one, the deadline, or a request."""
        c = self._config
        with closing(run.steps(max(0, c.run.steps - run.step))) as steps:  # closing waits for the steps under way
            for result in steps:
                self._last = result
                done = result.step + 1
                if self.chaos is not None:
                    self.chaos.after(result.step, run.plan())
                if self._asked or (self._deadline_s is not None and time.monotonic() >= self._deadline_s):
                    break
                if done < c.run.steps:
                    if c.log.eval_every and done % c.log.eval_every == 0:
                        self._evaluate(run, data)
                    if c.checkpoint.save_every and done % c.checkpoint.save_every == 0:
                        self._checkpoint(run)

    def _evaluate(self, run: Run, data: OpenedData) -> None:
        batches = held_out_batches(data, self._config)
        if batches is not None:
            self._held_out = run.step, run.evaluate(batches)

    def _checkpoint(self, run: Run) -> dict[str, Any]:
        """Save the weights as they are now; they are returned."""
        self.tell("phase", "saving a checkpoint")
        state = run.state_dict()
        checkpoints.save(
            self._folder / "checkpoints",
            state,
            run=RunFolder(self._folder).spec()[1].run,
            name=self._config.run.name,
            step=RunFolder(self._folder).manifest().step,
            loss=self._last.loss if self._last else None,
            keep=self._config.checkpoint.keep,
        )
        return state

    def _hint(self) -> str:
        begun = RunFolder(self._folder).sets()
        return f"continue with: fusion-run resume {self._folder}" if begun else "nothing was trained yet"

    def tell(self, kind: str, line: str) -> None:
        """To the view and the logs."""
        for sink in self._sinks:
            sink(RunEvent(kind=kind, text=line, time_s=time.time(), step=self._last.step if self._last else 0))

    def _compare(self, origin: Path | None, log: Sequence[NumericLogEntry], found: str) -> int:
        """Train the same without faults in this process; 1 if the weights differ."""
        data = open_data(self._config, self._folder, context_of(self._config))
        steps = self._last.step + 1 if self._last is not None else 0
        expected = undisturbed_weights(
            self._model(data, origin),
            as_source(data.train, self._folder / "undisturbed"),
            numerics=log[0].numerics,
            log=log,
            optimizer=self._config.optimizer_spec(),
            steps=steps,
            seed=self._config.run.seed,
        )
        befell = len({f.step for f, _ in self.chaos.struck}) if self.chaos is not None else 0
        if len(log) > 1:
            print(f"chaos: cuts or codecs changed at steps {', '.join(str(e.first_step) for e in log[1:])}")
        print(f"chaos: {befell} faults in {steps} steps; weights_blake2b {found}")
        print(f"chaos: undisturbed {expected}: {'equal' if found == expected else 'NOT EQUAL'}")
        return 0 if found == expected else 1

    def _status(self) -> str:
        if self._last is None:
            return "starting"
        return f"step {self._last.step + 1}/{self._config.run.steps}, loss {self._last.loss:.4f}"

    def _hear_request(self, command: str) -> None:
        self._asked = command

    def _show_end(self, data: OpenedData, model: nn.Module) -> None:
        """The curve, the held-out loss, a sample, and where the checkpoint lies."""
        losses = read_losses(self._folder / "log.jsonl")
        drawn = curve([s for s, _ in losses], [loss for _, loss in losses], label="loss over steps")
        print(f"\n{drawn}\n" if drawn else "")
        if self._held_out is not None:
            (steps, held_out), ratio = self._held_out, _bytes_per_token(data)
            per_byte = f", {held_out / ratio:.3f} nats per byte" if ratio else ""
            print(f"held-out loss after {steps} steps: {held_out:.4f}{per_byte}")
        if data.tokenizer is not None:
            print(f"\nsample:\n{sample_text(model, data.tokenizer, context=context_of(self._config)).strip()}\n")
        print(f"checkpoint: {checkpoints.find(self._folder)}")
        print(f"export it with: fusion-run export {self._folder} OUT")


def held_out_batches(data: OpenedData, config: Config) -> Iterable[Batch] | None:
    """The held-out data in global batches, as many samples as log.eval_samples says; None where there is none."""
    if isinstance(data.held_out, ArraySource):
        return data.held_out.once(config.batch.micro_batches * config.batch.micro_batch_size, config.log.eval_samples)
    held_out: Iterable[Batch] | None = data.held_out
    return held_out


def _bytes_per_token(data: OpenedData) -> float:
    return data.held_out.bytes_per_token if isinstance(data.held_out, TokenSource) else 0.0


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that volunteers started here end with the trainer."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

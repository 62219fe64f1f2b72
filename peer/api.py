"""The trainer's Python API: `fusion_p2p.Run` and `fusion_p2p.LocalSwarm`.

    with fusion_p2p.Run(model, data=data, optimizer=fusion_p2p.AdamW(lr=3e-4), micro_batches=16, micro_batch_size=4,
                        swarm=fusion_p2p.LocalSwarm(peers=4)) as run:
        for step in run.steps(200): ...

Everything asynchronous happens on a thread of the run's own; the methods here block.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from dht.home import home
from fusion_p2p.adatopk import ladder_of
from fusion_p2p.capture import Loss
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from peer.api_loop import LoopThread
from peer.api_open import (
    Opened,
    addresses_of,
    channels_of,
    created,
    optimizer_of,
    position,
    reopened,
    replay_of,
    wanted_peers,
)
from peer.api_session import open_session
from peer.api_training import Training
from peer.data_stream import as_source
from peer.events import RunEvent, Sink
from peer.interrupts import SESSION_S, undisturbed
from peer.lab.local_swarm import LocalSwarm
from peer.numeric_log import REPLAY, check_fits
from peer.numeric_log import read as read_log
from peer.plan_hosts import check_planner
from peer.report import Report, TrainSummary
from peer.run_checks import check_run
from peer.run_control import SESSION_LOCK, TrainerLock
from peer.signing import load_or_create_key
from peer.trainer_adopt import Replay
from peer.trainer_host import RunPaused
from peer.trainer_live import GATHER_S, TrainerOptions
from peer.trainer_state import RunFolder, write_atomic

__all__ = ["LocalSwarm", "Run", "RunPaused", "TrainSummary"]

DONE_S = 9.0
SAVE_EVERY = 50
PROBE_S = 15.0  # in which a new run may time its operators, and its codecs if its plan would compress a link


class Run(Training):
    """Trains `model` on a swarm. A context manager: volunteers are asked on entering and freed on leaving.

    model: any nn.Module; a dict batch calls `model(**batch)`, a tuple `model(*batch)`. data: an iterable of batches
    (dicts or tuples of tensors, dimension 0 the samples; any size, they are regrouped) or a `peer.data.Source`.
    loss: function of (output, batch), None takes `output.loss`. optimizer: `fusion_p2p.AdamW` / `SGD`, or a fresh
    `torch.optim.AdamW` / `SGD`. The global batch is micro_batches x micro_batch_size samples.
    swarm: a LocalSwarm, an address, a list of them; None: $FUSION_SWARM, then the last swarm joined.
    stages: None lets the planner choose; each volunteer of a LocalSwarm gets one. compression: "adatopk" compresses
    links that would hold the pipeline up, only as far as needed and for at most 2% of the loss ("adatopk:8": 8%);
    "none"; "adatopk-paper" and "topk:100" are the published rules; a codec's name ("int8", "rotated:4/2", ...) holds
    for every cut.
    planner: "opfence"; "equal-layers:SEED", "equal-compute:SEED", "published:SEED" are what it is measured against.
    numerics: "pinned" keeps the first plan's numerics to the end; "adaptive" may change cuts and codecs at a complete
    set where that pays, and says so in the numeric log. numeric_log: the numeric_log.jsonl of a run whose changes are
    repeated at their steps, so that the weights are that run's (its cuts and codecs hold, not the planner's).
    dtype: "bfloat16" computes in it, weights stay float32.
    name, description: what the board shows. clip_norm: as of the optimizer, which it replaces. seed: of all random
    tensors and the data's order. threads: of each stage's computation; they change bits. total_steps: what the board
    shows as the end, 0: unknown.
    device_class: stages go to "cpu" or "cuda" devices only; "auto": to what is faster in sum.
    recompute: activations are computed again in the backward instead of kept; changes no bit.
    allow_peers: only these peer ids see the run. compute: this machine hosts stages too, where `swarm` is an address.
    save_every: steps between complete sets in run_dir (None: a temporary folder). recover_s: how long a lost stage may
    wait for a new host before the run pauses. on: sinks that hear every happening, on the run's own thread.
    Raises InputError (bad input, one line with the fix), CaptureError, RunPaused.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        *,
        data: Any,
        loss: Loss | None = None,
        name: str = "run",
        description: str = "",
        optimizer: OptimizerSpec | torch.optim.Optimizer | None = None,
        micro_batches: int = 8,
        micro_batch_size: int = 8,
        clip_norm: float | None = None,
        swarm: LocalSwarm | str | Sequence[str] | None = None,
        stages: int | None = None,
        seed: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        compression: str = "adatopk",
        planner: str = "opfence",
        numerics: str = "pinned",
        dtype: str = "float32",
        recompute: bool = False,
        device_class: str = "auto",
        threads: int = 1,
        allow_peers: Sequence[str] = (),
        compute: bool = True,
        save_every: int = SAVE_EVERY,
        recover_s: float = 60.0,
        total_steps: int = 0,
        numeric_log: str | os.PathLike[str] | None = None,
        on: Sequence[Sink] = (),
    ) -> None:
        check_run(
            model=model,
            name=name,
            description=description,
            optimizer=optimizer,
            allow_peers=allow_peers,
            recover_s=recover_s,
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            seed=seed,
            threads=threads,
            stages=1 if stages is None else stages,
            save_every=save_every,
            total_steps=total_steps,
            dtype=dtype,
            device_class=device_class,
            numerics=numerics,
        )
        ladder_of(compression)  # says so now if it is no codec
        check_planner(planner)
        self._compression, self._planner = compression, planner
        self._model, self._data, self._loss = model, data, loss
        self._name, self._description, self._seed = name, description, seed
        self._optimizer = optimizer_of(optimizer, model, clip_norm)
        self._numerics = Numerics(
            cuts=(),
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            dtype=dtype,
            device_class=device_class,
            threads=threads,
            recompute=recompute,
        )
        self._swarm, self._stages, self._allow_peers, self._compute = swarm, stages, tuple(allow_peers), compute
        self._save_every, self._recover_s, self._total_steps = save_every, recover_s, total_steps
        self._resuming = False
        self._adaptive = numerics == "adaptive"
        self._given_log = None if numeric_log is None else Path(numeric_log)
        if self._given_log is not None:
            check_fits(read_log(self._given_log), self._numerics)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._report = Report()
        self._sinks: tuple[Sink, ...] = (self._report, *on)
        self._closing = contextlib.ExitStack()
        self._open_run: Opened | None = None
        self._temporary: Path | None = None
        self._created: RunFolder | None = None
        self._saved_step = 0

    @classmethod
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        data: Any,
        model: torch.nn.Module | None = None,
        swarm: LocalSwarm | str | Sequence[str] | None = None,
        allow_peers: Sequence[str] = (),
        compute: bool = True,
        save_every: int = SAVE_EVERY,
        recover_s: float = 60.0,
        total_steps: int = 0,
        numerics: str = "pinned",
        stages: int | None = None,
        compression: str = "adatopk",
        on: Sequence[Sink] = (),
    ) -> Self:
        """The run in `run_dir`, from its newest complete set on, with whatever volunteers there are now.

        No model code is needed (`model` only for `export`): the folder holds the checked OP-DAG. What the numeric log
        prescribes for later steps is done; `stages` and `compression` count where `numerics` is "adaptive". `data`,
        `swarm`, `allow_peers`, `compute`, `save_every`, `recover_s`, `total_steps` and `on` as of `Run`.
        Raises InputError (no complete set there, another model), RunPaused.
        """
        run = cls(
            model,
            data=data,
            swarm=swarm,
            run_dir=run_dir,
            allow_peers=allow_peers,
            compute=compute,
            save_every=save_every,
            recover_s=recover_s,
            total_steps=total_steps,
            numerics=numerics,
            stages=stages,
            compression=compression,
            on=on,
        )
        run._resuming = True
        return run

    # --- life

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close(failed=True)
            if self._created is not None and not self._created.sets():
                self._created.forget_start()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=kind is not None)
        if error is not None and self._temporary is not None and self._temporary.exists():
            error.add_note(
                f"the run is kept in {self._temporary}; go on with Run.resume({str(self._temporary)!r}, ...)"
            )

    def close(self, *, failed: bool = False) -> None:
        """Free the volunteers and end every process of the run; of a failed one within 8 s. It keeps its folder if that
        holds a complete set."""
        with undisturbed():
            o, self._open_run = self._open_run, None
            try:
                if o is not None:
                    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                        o.loop.call(o.session.close("paused" if failed else "done"), SESSION_S if failed else DONE_S)
            finally:
                self._closing.close()
                if self._temporary is not None and not (failed and RunFolder(self._temporary).sets()):
                    shutil.rmtree(self._temporary, ignore_errors=True)

    def _open(self) -> None:
        if self._run_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix=f"fusion-{self._name}-"))
        root = self._run_dir or self._temporary or Path()
        RunFolder(root).make()
        self._closing.enter_context(TrainerLock(root, SESSION_LOCK))
        folder, source = RunFolder(root), as_source(self._data, root / "spool")
        owner = load_or_create_key(home() / "owner.key")
        if isinstance(self._swarm, LocalSwarm) and not self._swarm.volunteers:  # else it is the caller's to end
            self._phase(f"starting {self._swarm.peers} volunteers")
            self._closing.enter_context(self._swarm)  # volunteers measure themselves while we capture
        replay: Replay | None = None
        if self._resuming:
            begun, manifest = reopened(folder, source, owner, self._notice)
            self._numerics, self._saved_step = manifest.numerics, manifest.step
            replay = replay_of(source, begun.dag, manifest)
        else:
            self._phase("capturing the model and checking it")
            begun = created(
                folder,
                source,
                owner,
                model=self._model,
                loss=self._loss,
                name=self._name,
                description=self._description,
                seed=self._seed,
                optimizer=self._optimizer,
                micro_batch_size=self._numerics.micro_batch_size,
                # on loopback no link is compressed, and what is timed beside volunteers on this CPU looks slow
                probe_s=0.0 if isinstance(self._swarm, LocalSwarm) and self._swarm.loopback else PROBE_S,
            )
            self._created = folder
            if self._given_log is not None:
                write_atomic(root / REPLAY, self._given_log.read_bytes())
        self._phase("joining the swarm")
        script = read_log(root / REPLAY) if (root / REPLAY).exists() else ()
        loop = LoopThread(f"run {self._name}")
        self._closing.callback(loop.stop)
        loop.start()
        swarm = self._swarm if isinstance(self._swarm, LocalSwarm) else None
        work = open_session(
            addresses=addresses_of(self._swarm),
            loopback=swarm is not None and swarm.loopback,
            links=lambda: None if swarm is None else swarm.links,
            compute=self._compute and swarm is None,
            allow_peers=self._allow_peers,
            folder=folder,
            owner=owner,
            dag=begun.dag,
            options=TrainerOptions(
                numerics=self._numerics,
                stages=self._stages,
                every_device=swarm is not None and swarm.every_device,
                compression=self._compression,
                planner=self._planner,
                peers=wanted_peers(swarm, self._allow_peers),
                gather_s=GATHER_S if swarm is None else swarm.gather_s,
                recover_s=self._recover_s,
                mark_interval=self._save_every,
                adaptive=self._adaptive and not script,
                probe=begun.probe,
                shape=begun.shape,
                script=script,
                channels=channels_of(self._swarm),
            ),
            initial=begun.initial,
            sink=self._hear,
            total_steps=self._total_steps,
            data_state=position(source),
            replay=replay,
        )
        self._open_run = Opened(loop, loop.call(work), folder, begun, source)

    def _notice(self, line: str) -> None:
        self._hear(RunEvent(kind="notice", text=line, time_s=time.time()))

    def _phase(self, text: str) -> None:
        self._hear(RunEvent(kind="phase", text=text, time_s=time.time()))

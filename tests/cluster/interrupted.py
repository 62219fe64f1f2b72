"""Ctrl-C on a trainer in a phase of its life: how long it takes to end, and what is left."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.trainer_process import rest_of, small_run, start, wait_for_line

# What the trainer says when a phase begins.
PHASES = {
    "starting": "starting 2 volunteers",
    "capturing": "capturing the model",
    "placing": "placing the stages",
    "training": "^step ",
    "saving": "saving a checkpoint",
}


@dataclass(frozen=True)
class End:
    """`seconds` from the signal to the trainer's end; `left`: processes of its family that are still there."""

    code: int
    seconds: float
    said: str
    left: list[psutil.Process]


def interrupt(place: Path, phase: str, *, frozen: bool = False, timeout_s: float = 240.0) -> End:
    """`frozen`: its volunteers do not answer any more when the signal comes."""
    small_run(place)
    with start(place, "train", "run.toml", "--local", "2", "--steps", "100000") as trainer:
        wait_for_line(trainer, PHASES[phase])
        family = psutil.Process(trainer.pid).children(recursive=True)
        for process in family if frozen else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        begin = time.monotonic()
        trainer.send_signal(signal.SIGINT)
        said = rest_of(trainer, timeout_s)
        seconds = time.monotonic() - begin
    _, left = psutil.wait_procs(family, timeout=timeout_s)
    return End(trainer.returncode, seconds, said, left)

"""`fusion-run` and scripts as processes of their own, in a working folder (fixture `place`) as a user has one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200.0

SMALL = """
[run]
name = "cats"
steps = 6
[model]
family = "gpt2"
[model.gpt2]
layers = 2
width = 16
heads = 2
context = 16
[data]
path = "book.txt"
tokenizer = "bytes"
[batch]
micro_batches = 2
micro_batch_size = 2
[optimizer]
lr = 3e-3
warmup = 2
decay_steps = 6
[checkpoint]
save_every = 2
"""


def small_run(place: Path) -> None:
    (place / "run.toml").write_text(SMALL)
    (place / "book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 200)


def environment(place: Path) -> dict[str, str]:
    (place / "tmp").mkdir(exist_ok=True)
    return os.environ | {
        "FUSION_HOME": str(place / "home"),
        "FUSION_TEST": str(place),
        "TMPDIR": str(place / "tmp"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def ended(place: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What `python arguments` said and how it ended."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def script(place: Path, *arguments: str | Path) -> str:
    """What a script that must end well prints."""
    done = ended(place, *arguments)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout


def fusion_run(place: Path, *arguments: str | Path) -> str:
    """What a command that must end well prints."""
    return script(place, "-m", "peer.cli_run", *arguments)


def refused(place: Path, *arguments: str | Path) -> str:
    """The line of a command that must be refused as bad input."""
    done = ended(place, "-m", "peer.cli_run", *arguments)
    assert done.returncode == 2, done.stderr[-4000:] + done.stdout[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fusion-run: ") and "Traceback" not in done.stderr
    return last


def start(place: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "peer.cli_run", *map(str, arguments)],
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(trainer: subprocess.Popen[str], pattern: str) -> str:
    """The first line the trainer prints in which `pattern` is found."""
    assert trainer.stdout is not None
    said = []
    for line in trainer.stdout:
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the trainer ended with {trainer.wait(240)} before {pattern!r}: {''.join(said)[-3000:]}")


def rest_of(trainer: subprocess.Popen[str], timeout_s: float = 600.0) -> str:
    """All that it says from here to its end. (`communicate` would lose what `wait_for_line` has in its buffer.)"""
    assert trainer.stdout is not None
    too_long = threading.Timer(timeout_s, trainer.kill)
    too_long.start()
    try:
        said = trainer.stdout.read()
        trainer.wait()
    finally:
        too_long.cancel()
    assert trainer.returncode != -signal.SIGKILL, f"no end within {timeout_s:g} s: {said[-3000:]}"
    return said

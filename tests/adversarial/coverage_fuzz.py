"""Fuzzing guided by coverage: a target module of this folder under atheris, in its own process, for a given time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def runs_of(target: str, folder: Path, *, seconds: int, max_bytes: int) -> int:
    """How many inputs of at most `max_bytes` the module `target` took in `seconds`; fails if it crashed or hung.

    Skips without atheris. The corpus lies in `folder`.
    """
    pytest.importorskip("atheris", reason="coverage-guided fuzzing needs atheris: pip install 'fusion-p2p[dev]'")
    limits = (
        f"-max_total_time={seconds}",
        "-rss_limit_mb=1500",
        "-timeout=20",
        f"-max_len={max_bytes}",
        "-seed=1",
    )
    done = subprocess.run(
        [sys.executable, "-m", f"tests.adversarial.{target}", str(folder / "corpus"), *limits],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stderr.rsplit("Done ", 1)[1].split()[0])

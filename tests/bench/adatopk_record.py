"""Training results of AdaTopK's bench on disk: results/*.json, committed, and results/local, whole and not committed.

A result counts only for the code that it was measured on: its spec covers every codec's bytes and the task.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LOCAL = RESULTS / "local"
GOLDEN = Path(__file__).parent.parent / "golden" / "codec_bytes.json"

Figures = dict[str, Any]


def spec(*task: object) -> str:
    """Of the codecs' golden bytes and the task."""
    return hashlib.blake2b(GOLDEN.read_bytes() + repr(task).encode(), digest_size=4).hexdigest()


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def read(path: Path, wanted: str) -> list[Figures]:
    """What a committed file holds for this spec; nothing if it is of another."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return list(found["runs"]) if found["spec"] == wanted else []


def write(path: Path, wanted: str, about: str, runs: Sequence[Figures]) -> None:
    """One run a line, so that a difference shows which."""
    head = json.dumps({"about": about, "spec": wanted, "torch": torch.__version__})
    lines = ",\n".join(json.dumps(run) for run in runs)
    path.write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')


def keep(path: Path, figures: Figures) -> None:
    """Writes a local result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(figures))
    part.rename(path)


def when(dates: Sequence[str], fresh: bool) -> str:
    """For a row: whether its figures were measured in this run, else from when they are."""
    return "measured now" if fresh else f"recorded {', '.join(sorted(set(dates)))}"


MOVING = 9  # steps that a curve is averaged over


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over the last MOVING values."""
    return [sum(values[max(0, i - MOVING + 1) : i + 1]) / min(i + 1, MOVING) for i in range(len(values))]

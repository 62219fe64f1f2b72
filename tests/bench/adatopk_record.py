"""Training results of AdaTopK's bench on disk: results/*.json, committed, and results/local, whole and not committed.

A result counts only for the code that it was measured on: its spec covers the bytes of the codecs used and the task.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LOCAL = RESULTS / "local"
GOLDEN = Path(__file__).parent.parent / "golden" / "codec_bytes.json"

Figures = dict[str, Any]


def spec(codecs: Collection[str], *task: object) -> str:
    """Of what a run depends on: the golden bytes of its codecs' kinds, and the task."""
    kinds = {c.partition(":")[0] for c in codecs}
    golden = json.loads(GOLDEN.read_text())
    used = {name: made for name, made in golden.items() if name.partition(":")[0] in kinds}
    return hashlib.blake2b(json.dumps([used, repr(task)], sort_keys=True).encode(), digest_size=4).hexdigest()


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def read(path: Path) -> dict[str, list[Figures]]:
    """What a committed file holds, by spec."""
    found: dict[str, list[Figures]] = {}
    for run in json.loads(path.read_text())["runs"] if path.exists() else ():
        found.setdefault(run.pop("spec"), []).append(run)
    return found


def write(path: Path, about: str, runs: Sequence[tuple[str, Figures]]) -> None:
    """(spec, figures), one run a line, so that a difference shows which."""
    head = json.dumps({"about": about, "torch": torch.__version__})
    lines = ",\n".join(json.dumps({"spec": spec} | run) for spec, run in runs)
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

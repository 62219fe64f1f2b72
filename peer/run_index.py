"""Run folders by name, and what `list` and `show` tell about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fusion_p2p.errors import InputError
from peer import config as configuration
from peer.checkpoint import checkpoints, info
from peer.config import Config
from peer.run_control import is_running
from peer.trainer_state import RunFolder

RUNS, CONFIG = "runs", "config.toml"


def folder_for(config: Config, run_dir: str | None) -> Path:
    """Where a configuration's run lives: --run-dir, then run.dir, then runs/NAME."""
    return Path(run_dir or config.run.dir or Path(RUNS, config.run.name))


def find_run(text: str) -> Path:
    """A run folder, given as a path or as the name of one under runs/. Raises InputError."""
    for path in (Path(text), Path(RUNS, text)):
        if (path / CONFIG).is_file():
            return path
    known = ", ".join(p.name for p in run_folders(Path(RUNS))) or "none"
    raise InputError(f"no run {text!r}: neither a run folder nor one under {RUNS}/ (there: {known})")


def run_folders(root: Path) -> list[Path]:
    """The run folders directly under `root`, by name. InputError where a folder was named that is not there."""
    if root != Path(RUNS) and not root.is_dir():
        raise InputError(f"{root} is no folder; give the one in which run folders lie, or none for {RUNS}/")
    return sorted(p.parent for p in root.glob(f"*/{CONFIG}"))


def load_config(folder: Path) -> Config:
    return configuration.load(folder / CONFIG)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`phase` is the last one written; "interrupted" if the trainer died in it."""

    name: str
    folder: str
    phase: str
    running: bool
    step: int = 0
    steps: int = 0
    loss: float | None = None
    checkpoint: str = ""
    reason: str = ""


def summary(folder: Path) -> RunSummary:
    """What a run folder says about its run. A damaged part is named in `reason`, never raised."""
    running = is_running(folder)
    try:
        config = load_config(folder)
        saved = checkpoints(folder / "checkpoints")
        checkpoint = str(saved[-1]) if saved else ""
        base = RunSummary(
            name=config.run.name,
            folder=str(folder),
            phase="new",
            running=running,
            steps=config.run.steps,
            checkpoint=checkpoint,
        )
        if not (folder / "progress.json").exists():
            return base
        p = RunFolder(folder).progress()
    except InputError as e:
        return RunSummary(name=folder.name, folder=str(folder), phase="damaged", running=running, reason=str(e))
    phase = p.phase if running or p.phase not in ("waiting", "training") else "interrupted"
    return msgspec.structs.replace(base, phase=phase, step=p.step, loss=p.loss, reason=p.reason)


def details(folder: Path) -> dict[str, Any]:
    """Everything `show` prints: the summary, the spec, the numeric log, the checkpoints and the configuration."""
    shown: dict[str, Any] = msgspec.to_builtins(summary(folder))
    run = RunFolder(folder)
    if run.exists:
        spec = run.spec()[1]
        shown["run"] = spec.run
        shown["owner"] = spec.owner.hex()
        shown["created"] = spec.created
        shown["opdag_hash"] = spec.opdag_hash
        shown["numeric_log"] = [msgspec.to_builtins(entry) for _, entry in run.numeric_log()]
        shown["sets"] = run.sets()
    shown["checkpoints"] = [
        {"path": str(p), **msgspec.to_builtins(info(p))} for p in checkpoints(folder / "checkpoints")
    ]
    shown["config"] = msgspec.to_builtins(load_config(folder))
    return shown

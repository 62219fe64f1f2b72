"""Sinks that keep what a run tells: JSON lines, CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from fusion_p2p.errors import InputError
from peer.config import LogSection
from peer.events import EvalResult, Happening, LinkBytes, PlanAdopted, RunEvent, StepResult


class Log(Protocol):
    """A Sink that is closed at the end."""

    def __call__(self, happening: Happening, /) -> None: ...

    def close(self) -> None: ...


class JsonlLog:
    """Every happening as one JSON object a line: its `type`, the time, its fields. A resumed run appends."""

    def __init__(self, path: Path, bytes_per_token: float = 0.0) -> None:
        self._file = path.open("ab")
        self._bytes_per_token = bytes_per_token

    def __call__(self, happening: Happening) -> None:
        record = {"type": _type(happening), "time": time.time(), **msgspec.to_builtins(happening, str_keys=True)}
        if isinstance(happening, EvalResult) and self._bytes_per_token:
            record["nats_per_byte"] = happening.loss / self._bytes_per_token
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvLog:
    """One row a step, one a evaluation; what a row has not is empty."""

    _COLUMNS = ("step", "loss", "step_time_s", "tokens_per_s", "samples_per_s", "held_out_loss", "nats_per_byte")

    def __init__(self, path: Path, bytes_per_token: float = 0.0) -> None:
        is_new = not path.exists() or path.stat().st_size == 0
        self._file: IO[str] = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._COLUMNS)
        self._bytes_per_token = bytes_per_token
        if is_new:
            self._writer.writeheader()

    def __call__(self, happening: Happening) -> None:
        row = _scalars(happening, self._bytes_per_token)
        if row:
            self._writer.writerow({k: v for k, v in row.items() if k in self._COLUMNS})
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLog:
    """Scalars under loss, held_out_loss, tokens_per_s and so on."""

    def __init__(self, folder: Path, bytes_per_token: float = 0.0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise InputError("log.tensorboard needs a package: pip install 'fusion-p2p[tensorboard]'") from e
        self._writer: Any = SummaryWriter(str(folder))
        self._bytes_per_token = bytes_per_token

    def __call__(self, happening: Happening) -> None:
        row = _scalars(happening, self._bytes_per_token)
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """The same scalars, in a Weights & Biases project."""

    def __init__(self, project: str, name: str, folder: Path, bytes_per_token: float = 0.0) -> None:
        try:
            import wandb
        except ImportError as e:
            raise InputError("log.wandb needs a package: pip install 'fusion-p2p[wandb]'") from e
        self._wandb: Any = wandb
        try:
            self._run: Any = wandb.init(project=project, name=name, dir=str(folder), resume="allow")
        except wandb.Error as e:  # no key, no network, a project that is not this user's
            why = " ".join(str(e).split())
            raise InputError(
                f"log.wandb = {project!r}: {why}; run `wandb login`, or set WANDB_MODE=offline, or leave it out"
            ) from e
        self._bytes_per_token = bytes_per_token

    def __call__(self, happening: Happening) -> None:
        row = _scalars(happening, self._bytes_per_token)
        if row:
            self._run.log({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends the service process that it started


def open_logs(settings: LogSection, folder: Path, name: str, bytes_per_token: float) -> list[Log]:
    """The logs that the configuration asks for. Raises InputError for one whose package is missing."""
    logs: list[Log] = []
    if settings.tensorboard:
        logs.append(TensorBoardLog(folder / "tensorboard", bytes_per_token))
    if settings.wandb:
        logs.append(WandbLog(settings.wandb, name, folder, bytes_per_token))
    logs.append(JsonlLog(folder / "log.jsonl", bytes_per_token))
    if settings.csv:
        logs.append(CsvLog(folder / "log.csv", bytes_per_token))
    return logs


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step in a log.jsonl; a step repeated after a resume counts as it was last."""
    losses: dict[int, float] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                record = msgspec.json.decode(line)
            except msgspec.DecodeError:  # the last line of a killed trainer may be cut
                continue
            if record.get("type") == "step":
                losses[record["step"]] = record["loss"]
    return sorted(losses.items())


def _type(happening: Happening) -> str:
    match happening:
        case StepResult():
            return "step"
        case EvalResult():
            return "eval"
        case RunEvent():
            return "event"
        case PlanAdopted():
            return "plan"
        case LinkBytes():
            return "links"


def _scalars(happening: Happening, bytes_per_token: float) -> dict[str, float]:
    """The numbers of a step or an evaluation, {} for the rest."""
    if isinstance(happening, StepResult):
        row = {
            "step": happening.step,
            "loss": happening.loss,
            "step_time_s": happening.step_time_s,
            "samples_per_s": happening.samples_per_s,
        }
        for pair, (norm, bias) in happening.cuts.items():
            row |= {f"activation_rms/{pair}": norm, f"gradient_bias/{pair}": bias}
        return row | ({"tokens_per_s": happening.tokens_per_s} if happening.tokens else {})
    if isinstance(happening, EvalResult):
        row = {"step": happening.step, "held_out_loss": happening.loss}
        return row | ({"nats_per_byte": happening.loss / bytes_per_token} if bytes_per_token else {})
    return {}

"""Weights on disk for people and other programs: RUN/checkpoints/step-00000500/{model.safetensors, checkpoint.json}.

A checkpoint is written beside its place and renamed, so it is there whole or not at all. What a run needs to go on
exactly (optimizer state, data position) is the trainer's own business, in `peer.trainer_state`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fusion_p2p.errors import InputError
from peer.trainer_state import write_atomic

if TYPE_CHECKING:
    import torch

WEIGHTS, DESCRIPTION = "model.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`aliases` maps each name of a tied tensor that is not stored to the one that is."""

    format: int = 1
    run: str  # the run's id
    name: str
    step: int
    loss: float | None = None
    created: float  # unix seconds
    bytes: int
    blake2b: str  # BLAKE2b-256 hex of model.safetensors
    aliases: dict[str, str] = {}


def save(
    folder: Path, weights: Mapping[str, torch.Tensor], *, run: str, name: str, step: int, loss: float | None, keep: int
) -> Path:
    """Write a checkpoint under `folder` and delete all but the newest `keep`. Returns its folder."""
    import safetensors.torch

    stored, aliases = _without_ties(weights)
    data = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in stored.items()}, {"format": "pt"})
    info = CheckpointInfo(
        run=run,
        name=name,
        step=step,
        loss=loss,
        created=time.time(),
        bytes=len(data),
        blake2b=hashlib.blake2b(data, digest_size=32).hexdigest(),
        aliases=aliases,
    )
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_atomic(partial / WEIGHTS, data)
    write_atomic(partial / DESCRIPTION, msgspec.json.format(msgspec.json.encode(info)))
    shutil.rmtree(final, ignore_errors=True)  # the same step, saved before a resume: the same weights
    os.replace(partial, final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints under `folder`, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{DESCRIPTION}") if _NAME.fullmatch(p.parent.name))


def find(path: Path) -> Path:
    """`path` if it is a checkpoint, the newest one if it is a run folder. Raises InputError."""
    if (path / DESCRIPTION).is_file():
        return path
    found = checkpoints(path / "checkpoints")
    if not found:
        raise InputError(f"{path} holds no checkpoint; give a run folder that has saved one, or a step-… folder")
    return found[-1]


def info(path: Path) -> CheckpointInfo:
    """The description of the checkpoint at `path`. Raises InputError if it is damaged."""
    try:
        return msgspec.json.decode((path / DESCRIPTION).read_bytes(), type=CheckpointInfo)
    except OSError as e:
        raise InputError(f"cannot read {path / DESCRIPTION}: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise InputError(f"{path / DESCRIPTION} is damaged: {e}; use an older checkpoint") from e


def load(path: Path, run: str = "") -> tuple[CheckpointInfo, dict[str, torch.Tensor]]:
    """Weights under every name the model knows. Raises InputError if the file is truncated, altered or, where `run` is
    given, of another run."""
    import safetensors.torch

    described = info(path)
    if run and described.run != run:
        raise InputError(
            f"{path} belongs to run {described.name} ({described.run[:12]}), not {run[:12]}; "
            "fusion-run fork starts a new run from it"
        )
    try:
        data = (path / WEIGHTS).read_bytes()
    except OSError as e:
        raise InputError(f"cannot read {path / WEIGHTS}: {e.strerror}") from e
    if len(data) != described.bytes:
        raise InputError(
            f"{path / WEIGHTS} is truncated: {len(data)} of {described.bytes} bytes; use an older checkpoint"
        )
    if hashlib.blake2b(data, digest_size=32).hexdigest() != described.blake2b:
        raise InputError(f"{path / WEIGHTS} was altered: its hash does not match; use an older checkpoint")
    weights = safetensors.torch.load(data)
    if missing := set(described.aliases.values()) - weights.keys():
        raise InputError(f"{path / DESCRIPTION} was altered: it ties {min(missing)!r}, which {WEIGHTS} does not hold")
    return described, weights | {name: weights[kept] for name, kept in described.aliases.items()}


def _without_ties(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that share memory are stored once, under the first name."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[int, object, object], str] = {}
    for name in sorted(weights):
        t = weights[name]
        where = (t.data_ptr(), t.shape, t.stride())
        if t.numel() and where in seen:
            aliases[name] = seen[where]
        else:
            seen[where] = name
            stored[name] = t
    return stored, aliases

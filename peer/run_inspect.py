"""What can be done with a run's checkpoint on this machine alone: evaluate, sample, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fusion_p2p.errors import InputError
from peer import checkpoint as checkpoints
from peer.checkpoint import CheckpointInfo
from peer.config import Config
from peer.data import ArraySource, TokenSource
from peer.data_open import OpenedData, open_data
from peer.evaluate import evaluate_locally
from peer.export import export as export_model
from peer.export import load_weights, sample_text
from peer.models import build_model, context_of
from peer.run_index import load_config
from peer.trainer_state import RunFolder


def trained_model(folder: Path, checkpoint: Path | None) -> tuple[Config, OpenedData, nn.Module, CheckpointInfo]:
    """The run's model with the weights of `checkpoint` (None: the newest). Raises InputError if they are another's."""
    config = load_config(folder)
    path = checkpoints.find(checkpoint or folder)
    run = RunFolder(folder)
    info, weights = checkpoints.load(path, run.spec()[1].run if run.exists else "")
    data = open_data(config, folder, context_of(config))
    model = build_model(config, data)
    load_weights(model, weights, str(path))
    return config, data, model.eval(), info


def evaluate(folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Held-out loss (and nats per byte for text, accuracy is not computed) of a checkpoint."""
    config, data, model, info = trained_model(folder, checkpoint)
    if not isinstance(data.held_out, ArraySource):
        raise InputError(f"{folder}: data.kind = {config.data.kind!r} has no held-out samples; see data.held_out")
    loss, samples = evaluate_locally(model, data.held_out.once(config.batch.micro_batch_size))
    result: dict[str, Any] = {"run": info.name, "step": info.step, "loss": loss, "samples": samples}
    ratio = data.held_out.bytes_per_token if isinstance(data.held_out, TokenSource) else 0.0
    return result | ({"nats_per_byte": loss / ratio} if ratio else {})


def sample(folder: Path, checkpoint: Path | None, **choices: Any) -> str:
    """Text drawn from a checkpoint; `choices` are those of `peer.export.sample_text`."""
    config, data, model, _ = trained_model(folder, checkpoint)
    if data.tokenizer is None:
        raise InputError(f"{folder}: data.kind = {config.data.kind!r} has no tokenizer to write text with")
    return sample_text(model, data.tokenizer, context=context_of(config), **choices)


def export(folder: Path, checkpoint: Path | None, out: Path, *, adapter: bool = False) -> list[str]:
    """Write a checkpoint for transformers' from_pretrained, or a peft model's adapter alone; the files' names."""
    _, _, model, _ = trained_model(folder, checkpoint)
    return export_model(model, out, folder, adapter=adapter)

"""Held-out loss on this machine, with the plain module; `Run.evaluate` does the same on the swarm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from peer.data import Batch, rows


@torch.no_grad()
def evaluate_locally(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss in eval mode, each batch weighing by its samples, and the number of samples."""
    was_training = model.training
    model.eval()
    total, samples = 0.0, 0
    for batch in batches:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        total += float(output.loss) * rows(batch)
        samples += rows(batch)
    model.train(was_training)
    return (total / samples if samples else float("nan")), samples

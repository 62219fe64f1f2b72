"""What `Run` is given, checked before anything begins: one line that names the value and what it may be."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from dht import errors as dht_errors
from dht.identity import peer_id_bytes
from fusion_p2p.errors import InputError
from fusion_p2p.settings import OptimizerSpec
from peer.config import MAX_BATCH, MAX_STEPS, NAME

DTYPES, DEVICE_CLASSES = ("float32", "bfloat16"), ("auto", "cpu", "cuda")
_WHOLE = {
    "micro_batches": (1, MAX_BATCH),
    "micro_batch_size": (1, MAX_BATCH),
    "seed": (0, 2**31 - 1),
    "threads": (1, 256),
    "stages": (1, 1024),
    "save_every": (0, MAX_STEPS),
    "total_steps": (0, MAX_STEPS),
}
_CHOICES = {"dtype": DTYPES, "device_class": DEVICE_CLASSES, "numerics": ("pinned", "adaptive")}


def check_run(
    *,
    model: torch.nn.Module | None,
    name: str,
    description: str,
    optimizer: Any,
    allow_peers: Sequence[str],
    recover_s: float,
    **rest: Any,
) -> None:
    """Raises InputError. `rest`: the arguments of `Run` that are whole numbers or one of a few words."""
    for what, value in rest.items():
        if what in _WHOLE:
            least, most = _WHOLE[what]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{what} = {_short(value)} must be a whole number from {least} to {most}")
        elif value not in _CHOICES[what]:
            raise InputError(f"{what} = {_short(value)} is unknown; use {', '.join(_CHOICES[what])}")
    if not isinstance(recover_s, int | float) or not (math.isfinite(recover_s) and 0 <= recover_s <= 1e9):
        raise InputError(f"recover_s = {_short(recover_s)} must be a number of seconds, 0 or more")
    if not isinstance(name, str) or not re.match(NAME, name):
        raise InputError(f"name = {_short(name)}: 1 to 64 letters, digits, . _ - and no dot in front")
    if not isinstance(description, str) or len(description) > 200:
        raise InputError(f"description = {_short(description)} must be a line of at most 200 characters")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if model is not None and not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{type(model).__name__} has no trainable parameter; set requires_grad on what to train")
    if optimizer is not None and not isinstance(optimizer, OptimizerSpec | torch.optim.Optimizer):
        raise InputError(f"optimizer = {_short(optimizer)}; use fusion_p2p.AdamW(lr=...), SGD(lr=...) or torch.optim's")
    if isinstance(allow_peers, str):
        raise InputError(f"allow_peers = {_short(allow_peers)}: give a list of peer ids")
    for peer in allow_peers:
        try:
            peer_id_bytes(peer)
        except (dht_errors.InputError, TypeError):
            raise InputError(f"allow_peers: {_short(peer)} is no peer id; one looks like 12D3KooW...") from None


def _short(value: object) -> str:
    return repr(value)[:80]

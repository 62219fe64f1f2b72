"""A user's batch as named tensors: flattening, rebuilding and cutting it into samples. Dimension 0 is the samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_p2p.errors import InputError


def _children(batch: Any) -> list[tuple[str, Any]] | None:
    if isinstance(batch, Mapping):
        return [(str(k), v) for k, v in batch.items()]
    if isinstance(batch, tuple | list):
        return [(str(i), v) for i, v in enumerate(batch)]
    return None


def flatten(batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor (or numpy array) under its dotted path: "input_ids", "0", "x.mask"; a lone tensor is "0"."""
    children = _children(batch)
    if children is None:
        children = [("0", batch)]
    out: dict[str, torch.Tensor] = {}
    for name, value in children:
        if isinstance(value, torch.Tensor):
            out[name] = value
        elif isinstance(value, np.ndarray):
            out[name] = torch.from_numpy(value)
        elif _children(value) is not None:
            out.update((f"{name}.{k}", t) for k, t in flatten(value).items())
    return out


def constants(batch: Any) -> dict[str, Any]:
    """Every leaf that is no tensor, under its dotted path; the graph holds them as they were at capture."""
    children = _children(batch)
    out: dict[str, Any] = {}
    for name, value in children if children is not None else [("0", batch)]:
        if _children(value) is not None:
            out.update((f"{name}.{k}", c) for k, c in constants(value).items())
        elif not isinstance(value, torch.Tensor | np.ndarray):
            out[name] = value
    return out


def rebuild(batch: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """`batch`'s structure (dicts, lists, tuples) with the tensors replaced by path."""
    children = _children(batch)
    if children is None:
        return tensors.get("0", batch)
    new = []
    for name, value in children:
        if _children(value) is None:
            new.append(tensors.get(name, value))
        else:
            prefix = name + "."
            new.append(rebuild(value, {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}))
    if isinstance(batch, Mapping):
        return dict(zip(batch.keys(), new, strict=True))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*new)
    return list(new) if isinstance(batch, list) else tuple(new)


def samples(tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of samples: dimension 0 of the first tensor that has one."""
    for t in tensors.values():
        if t.dim() > 0:
            if t.shape[0] == 0:
                break
            return t.shape[0]
    raise InputError("the batch holds no tensor with a first (sample) dimension above 0; pass at least one")


def resize(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The same batch with `size` samples, repeating or dropping rows. Tensors without that dimension stay."""
    have = samples(tensors)
    times = math.ceil(size / have)
    out = {}
    for name, t in tensors.items():
        if t.dim() > 0 and t.shape[0] == have:
            t = t.repeat((times,) + (1,) * (t.dim() - 1))[:size] if size != have else t
        out[name] = t.clone()
    return out

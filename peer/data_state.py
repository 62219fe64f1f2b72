"""The state of a user's data object as plain JSON: what `state_dict` may hold beside it gets a one-key tag.

Nothing is pickled; an object of another kind is refused by type.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_p2p.errors import InputError

_TAGS = ("tuple", "bytes", "tensor", "array", "map")


def to_plain(value: Any) -> Any:
    """JSON for a nest of dicts, lists, tuples, numbers, strings, bytes, tensors and arrays. Raises InputError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [to_plain(v) for v in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        return {"tensor": to_plain(value.detach().cpu().numpy())}
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode("ascii")]}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and not (len(value) == 1 and next(iter(value)) in _TAGS):
            return {k: to_plain(v) for k, v in value.items()}
        return {"map": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    raise InputError(f"the data's state_dict holds a {type(value).__name__}, which cannot be saved without pickle")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, inner = next(iter(value.items()))
        if tag == "tuple":
            return tuple(from_plain(v) for v in inner)
        if tag == "bytes":
            return base64.b64decode(inner)
        if tag == "tensor":
            return torch.from_numpy(from_plain(inner))
        if tag == "array":
            dtype, shape, data = inner
            return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
        if tag == "map":
            return {from_plain(k): from_plain(v) for k, v in inner}
    return {k: from_plain(v) for k, v in value.items()}

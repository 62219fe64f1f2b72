"""Codecs of tensor frames: `parse(name)` gives one end of an edge's codec (DESIGN section 6; README.md beside this)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_p2p.codec import rotated, subspace, topk, topk_masked, transform
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.dense import Dense, DenseBf16
from fusion_p2p.codec.int8 import Int8
from fusion_p2p.errors import InputError

__all__ = ["Aux", "Codec", "Direction", "FrameKey", "Shape", "parse"]


def _dense(arg: str, device: torch.device) -> Codec:
    if arg not in ("", "bf16"):
        raise InputError(f"codec 'dense:{arg}' is unknown; use dense or dense:bf16")
    return DenseBf16(device) if arg else Dense(device)


def _int8(arg: str, device: torch.device) -> Codec:
    if arg:
        raise InputError(f"codec 'int8:{arg}' is unknown; int8 takes no argument")
    return Int8(device)


_PARSERS: dict[str, Callable[[str, torch.device], Codec]] = {
    "dense": _dense,
    "int8": _int8,
    "topk": topk.make,
    "topk-masked": topk_masked.make,
    "rotated": rotated.make,
    "subspace": subspace.make,
    "transform": transform.make,
}


def parse(name: str, device: str | torch.device = "cpu") -> Codec:
    """A fresh instance of the codec `name` for one end of one edge; decoded tensors lie on `device`.

    Names: dense, dense:bf16, int8, topk:DENSITY, topk-masked:DENSITY, rotated:BITS/BITS, subspace:RANK/BITS,
    transform:BITS/BITS.
    InputError for any other.
    """
    kind, _, arg = name.partition(":")
    if kind not in _PARSERS:
        raise InputError(f"codec {name!r} is unknown; use one of {', '.join(sorted(_PARSERS))}")
    return _PARSERS[kind](arg, torch.device(device))

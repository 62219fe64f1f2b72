"""A (components, rows) array of integers as bytes: components of like spread together, rare large ones listed apart."""

from __future__ import annotations

import struct

import numpy as np

from fusion_p2p.codec import entropy, indices, wire
from fusion_p2p.errors import FrameError

_PEAKS = (0, 1, 2, 3, 7, 127)  # greatest symbol of each class; beyond the last, two planes
_WIDE = len(_PEAKS)
_LOW = 7  # bits of the low plane
LIMIT = (127 << _LOW) - 1  # greatest magnitude of a symbol


def _classes(spread: np.ndarray) -> np.ndarray:
    """Class of each component, not rising: the peak is over 3.5 times the spread (in steps) and half a step."""
    need = np.floor(3.5 * spread + 0.5)
    classes = np.searchsorted(np.array(_PEAKS), need)
    return np.maximum.accumulate(classes[::-1])[::-1]


def encode(q: np.ndarray, spread: np.ndarray) -> list[wire.Buffer]:
    """int16 `q` (components, rows) within LIMIT; `spread` is each component's standard deviation, about."""
    classes = _classes(spread)
    counts = np.bincount(classes, minlength=_WIDE + 1)
    out: list[wire.Buffer] = [struct.pack(f"<{_WIDE + 1}H", *counts.tolist())]
    peaks = np.array((*_PEAKS, LIMIT), dtype=np.int16)[classes][:, None]
    clipped = np.minimum(np.maximum(q, -peaks), peaks)  # np.clip is slow with arrays as bounds
    start = 0
    for kind in range(_WIDE, -1, -1):
        part = clipped[start : start + counts[kind]].reshape(-1)
        start += int(counts[kind])
        if kind == _WIDE and part.size:
            out += entropy.encode((part >> _LOW).astype(np.int8), 127)
            out += entropy.encode(((part & ((1 << _LOW) - 1)) - 64).astype(np.int8), 64)
        elif kind and part.size:
            out += entropy.encode(part.astype(np.int8), _PEAKS[kind])
    outliers = np.flatnonzero(clipped.reshape(-1) != q.reshape(-1))
    out.append(int(outliers.size).to_bytes(4, "little"))
    if outliers.size:
        out += indices.encode(outliers, q.size)
        out.append(q.reshape(-1)[outliers].astype("<i2").tobytes())
    return out


def decode(body: wire.Reader, components: int, rows: int) -> np.ndarray:
    """int16 (components, rows) written by `encode`; FrameError for anything else."""
    counts = struct.unpack(f"<{_WIDE + 1}H", body.take(2 * (_WIDE + 1)))
    if sum(counts) != components:
        raise FrameError(f"frame holds {sum(counts)} components, {components} expected")
    out = np.zeros((components, rows), dtype=np.int16)
    flat, start = out.reshape(-1), 0
    for kind in range(_WIDE, -1, -1):
        size = counts[kind] * rows
        part = flat[start : start + size]
        start += size
        if kind == _WIDE and size:
            part[:] = entropy.decode(body, size, 127)
            part <<= _LOW
            part += entropy.decode(body, size, 64)
            part += 64
        elif kind and size:
            part[:] = entropy.decode(body, size, _PEAKS[kind])
    outliers = body.u32()
    if outliers > flat.size:
        raise FrameError(f"frame holds {outliers} outliers among {flat.size} values")
    if outliers:
        at = indices.decode(body, outliers, flat.size)
        flat[at] = body.array("<i2", outliers)
    return out

"""Bytes of a tensor frame's payload, version 1: a header all codecs share, and bounded readers for their bodies.

Header: u8 version, u8 codec id, u8 dtype, u8 flags, u8 dimensions, then one u32 per dimension. Integers are
little-endian, index lists ascend. Lengths, checksums and who may send belong to the envelope (`peer`).
"""

from __future__ import annotations

import math
import struct
from typing import TypeAlias

import numpy as np
import torch

from fusion_p2p.errors import FrameError

VERSION = 1
BACKWARD = 1  # flags
NONFINITE = 2
_KNOWN_FLAGS = BACKWARD | NONFINITE
MAX_DIMS = 16

DENSE, BF16, INT8, TOPK, TOPK_MASKED, ROTATED, SUBSPACE, TRANSFORM = range(1, 9)  # codec ids, never reused

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
_CODE = {dtype: i for i, dtype in enumerate(_DTYPES)}

Buffer: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = Buffer | list[Buffer]


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def header_bytes(dims: int) -> int:
    return 5 + 4 * dims


def dense_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return numel(shape) * dtype.itemsize


def header(codec: int, dtype: torch.dtype, shape: tuple[int, ...], flags: int) -> bytes:
    if dtype not in _CODE or len(shape) > MAX_DIMS or any(d >= 1 << 32 for d in shape):
        raise FrameError(f"no frame can hold a tensor of type {dtype} and shape {shape}")
    return struct.pack(f"<5B{len(shape)}I", VERSION, codec, _CODE[dtype], flags, len(shape), *shape)


def open_header(payload: bytes, codec: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, memoryview]:
    """(flags, body) of a payload that must be of this codec, type and shape; FrameError otherwise."""
    if len(payload) < 5:
        raise FrameError(f"frame of {len(payload)} bytes is shorter than a header")
    version, got_codec, code, flags, dims = struct.unpack_from("<5B", payload)
    if version != VERSION:
        raise FrameError(f"frame of payload version {version}, this build reads {VERSION}: update the older side")
    if got_codec != codec:
        raise FrameError(f"frame of codec {got_codec}, the edge uses {codec}")
    if code >= len(_DTYPES) or _DTYPES[code] != dtype:
        raise FrameError(f"frame of dtype code {code}, the edge carries {dtype}")
    if flags & ~_KNOWN_FLAGS:
        raise FrameError(f"frame with unknown flags {flags:#x}")
    if dims != len(shape) or len(payload) < header_bytes(dims):
        raise FrameError(f"frame of {dims} dimensions and {len(payload)} bytes, the edge carries {shape}")
    got_shape = struct.unpack_from(f"<{dims}I", payload, 5)
    if got_shape != tuple(shape):
        raise FrameError(f"frame of shape {got_shape}, the edge carries {shape}")
    return flags, memoryview(payload)[header_bytes(dims) :]


def join(head: bytes, body: Body) -> bytes:
    return b"".join([head, *body]) if isinstance(body, list) else b"".join([head, body])


def tensor_bytes(x: torch.Tensor) -> memoryview:
    """The tensor's elements, contiguous, little-endian, as a view where possible."""
    flat = x.detach().contiguous().reshape(-1).cpu()
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def dense_tensor(body: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose elements are exactly `body`, in aligned storage of its own."""
    need = dense_bytes(shape, dtype)
    if len(body) != need:
        raise FrameError(f"frame body of {len(body)} bytes, {need} expected for shape {shape} of {dtype}")
    out = torch.empty(shape, dtype=dtype)
    if need:
        out.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(body, dtype=np.uint8)
    if dtype == torch.bool and need and int(out.view(torch.uint8).max()) > 1:
        raise FrameError("frame of dtype torch.bool holds a byte that is neither 0 nor 1")
    return out


class Reader:
    """Takes fields off a body in order; FrameError when it is too short or, at `done`, too long."""

    def __init__(self, body: memoryview) -> None:
        self.rest = body

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.rest):
            raise FrameError(f"frame is truncated: {count} bytes wanted, {len(self.rest)} left")
        out, self.rest = self.rest[:count], self.rest[count:]
        return out

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u8(self) -> int:
        return self.take(1)[0]

    def f32(self) -> float:
        value: float = struct.unpack("<f", self.take(4))[0]
        if not math.isfinite(value):
            raise FrameError(f"frame holds the scale {value}")
        return value

    def array(self, dtype: str, count: int) -> np.ndarray:
        """`count` elements of a little-endian numpy dtype, copied (so aligned and owned)."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype=dtype).copy()

    def floats(self, count: int, what: str) -> np.ndarray:
        """`count` finite float32."""
        out = self.array("<f4", count)
        if not np.isfinite(out).all():
            raise FrameError(f"frame holds a {what} that is not finite")
        return out

    def done(self) -> None:
        if len(self.rest):
            raise FrameError(f"frame has {len(self.rest)} bytes too many")

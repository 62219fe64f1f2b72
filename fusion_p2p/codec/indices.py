"""Ascending index lists as gaps: bytes through zstd (Huffman) where dense, Rice codes where sparse."""

from __future__ import annotations

import math

import numpy as np

from fusion_p2p.codec import entropy, wire
from fusion_p2p.errors import FrameError

_RICE, _ZSTD = 0, 1
_ESCAPE = 255  # a byte of this adds 255 and says that the gap goes on
_DENSE = 1 / 200


def rice_parameter(k: int, n: int) -> int:
    """Low bits per gap: the best for random masks of this density."""
    return max(0, round(math.log2(max(n / k, 1) * math.log(2))))


def bound(k: int, n: int) -> int:
    """Most bytes that `encode` gives for k of n indices."""
    low = rice_parameter(k, n)
    return 5 + -(-k * low // 8) + (k + (n >> low) + 7) // 8


def expected(k: int, n: int) -> float:
    """Bytes that `encode` gives for a random mask."""
    p = min(k / n, 1 - 1e-9)
    return 9 - n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8 * 1.02


def encode(indices: np.ndarray, n: int) -> list[wire.Buffer]:
    """Of k ascending int64 indices below n; the reader must know k and n."""
    k = indices.size
    gaps = np.diff(indices, prepend=-1) - 1
    if k / n >= _DENSE:
        packed = _zstd_encode(gaps)
        if len(packed) + 1 <= bound(k, n):
            return [bytes([_ZSTD]), packed]
    return [bytes([_RICE]), *_rice_encode(gaps, rice_parameter(k, n))]


def decode(body: wire.Reader, k: int, n: int) -> np.ndarray:
    """k ascending int64 indices below n; FrameError for anything else."""
    kind = body.u8()
    if kind == _ZSTD:
        gaps = _zstd_decode(body, k, n)
    elif kind == _RICE:
        gaps = _rice_decode(body, k, n, rice_parameter(k, n))
    else:
        raise FrameError(f"frame with index coding {kind}, this build reads 0 and 1")
    indices = np.cumsum(gaps + 1) - 1
    if indices[-1] >= n:
        raise FrameError(f"frame holds the index {int(indices[-1])}, the tensor has {n} elements")
    return indices


def _zstd_encode(gaps: np.ndarray) -> bytes:
    if gaps.max() < _ESCAPE:
        raw = gaps.astype(np.uint8)
    else:
        escapes = gaps // _ESCAPE
        raw = np.full(gaps.size + int(escapes.sum()), _ESCAPE, dtype=np.uint8)
        raw[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
    packed = entropy.compress(raw.tobytes())
    return len(packed).to_bytes(4, "little") + packed


def _zstd_decode(body: wire.Reader, k: int, n: int) -> np.ndarray:
    codes = np.frombuffer(entropy.expand(body.take(body.u32()), k, k + n // _ESCAPE), dtype=np.uint8)
    ends = np.flatnonzero(codes != _ESCAPE)
    if ends.size != k or codes.size == 0 or codes[-1] == _ESCAPE:
        raise FrameError(f"frame holds {ends.size} gaps, {k} expected")
    if codes.size == k:
        return codes.astype(np.int64)
    return (np.diff(ends, prepend=-1) - 1) * _ESCAPE + codes[ends]


def _rice_encode(gaps: np.ndarray, low: int) -> list[wire.Buffer]:
    high = gaps >> low
    stops = np.cumsum(high + 1) - 1
    unary = np.zeros(int(stops[-1]) + 1, dtype=np.uint8)
    unary[stops] = 1
    out: list[wire.Buffer] = [int(unary.size).to_bytes(4, "little"), np.packbits(unary).tobytes()]
    if low:
        bits = (gaps[:, None] >> np.arange(low)) & 1
        out.append(np.packbits(bits.astype(np.uint8)).tobytes())
    return out


def _rice_decode(body: wire.Reader, k: int, n: int, low: int) -> np.ndarray:
    length = body.u32()
    if not k <= length <= k + (n >> low):
        raise FrameError(f"frame holds {length} unary bits, between {k} and {k + (n >> low)} expected")
    unary = np.unpackbits(np.frombuffer(body.take(-(-length // 8)), dtype=np.uint8), count=length)
    stops = np.flatnonzero(unary)
    if stops.size != k or stops[-1] != length - 1:
        raise FrameError(f"frame holds {stops.size} gaps, {k} expected")
    gaps = (np.diff(stops, prepend=-1) - 1) << low
    if low:
        bits = np.unpackbits(np.frombuffer(body.take(-(-k * low // 8)), dtype=np.uint8), count=k * low)
        gaps += bits.reshape(k, low).astype(np.int64) @ (1 << np.arange(low))
    return gaps

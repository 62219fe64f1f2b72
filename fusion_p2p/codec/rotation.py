"""Randomised Hadamard rotation in blocks, and few-bit quantisers of what it gives (near Gaussian coefficients).

`encode`/`decode` turn n float32 values into bytes and back. `unbiased` scales each block by |c|^2 / <c, u>, which
makes the estimate unbiased over the random signs (DRIVE, arXiv 2105.08339; EDEN, arXiv 2108.08842): what a gradient
needs. Otherwise the scale is the least-squares one, which has the smaller error: what an activation needs.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec
import numpy as np
import torch

from fusion_p2p.codec import wire
from fusion_p2p.codec.base import FrameKey
from fusion_p2p.errors import FrameError

BLOCK = 1024  # a Hadamard of 1024 is two multiplications by one of 32
_SIDE = 32
_SIGN_BLOCKS = 256  # blocks before the signs repeat
# Best steps of a uniform quantiser of 2^bits levels on a unit Gaussian.
STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}


def random_words(key: FrameKey, salt: int, count: int) -> np.ndarray:
    """`count` uint64 that depend on the key and salt alone; Philox's raw stream does not change with numpy."""
    digest = hashlib.blake2b(msgspec.msgpack.encode((key, salt)), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def signs(key: FrameKey, salt: int, blocks: int, device: torch.device) -> torch.Tensor:
    """(blocks, BLOCK) of +-1/sqrt(BLOCK), so that the Hadamard that follows is orthonormal."""
    raw = random_words(key, salt, blocks * BLOCK // 64)
    bits = torch.from_numpy(np.unpackbits(raw.astype("<u8").view(np.uint8))).to(device)
    return (bits.to(torch.float32).mul_(2).sub_(1)).mul_(BLOCK**-0.5).view(blocks, BLOCK)


@functools.cache
def _hadamard(device: torch.device) -> torch.Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < _SIDE:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h.to(device)


def _transform(blocks: torch.Tensor) -> torch.Tensor:
    h = _hadamard(blocks.device)
    return torch.matmul(h, (blocks.reshape(-1, _SIDE) @ h).view(-1, _SIDE, _SIDE)).view(-1, BLOCK)


def _signed(blocks: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """blocks * sign, the signs repeating; a new tensor."""
    period = sign.shape[0]
    if blocks.shape[0] <= period:
        return blocks * sign[: blocks.shape[0]]
    whole = blocks.shape[0] // period * period
    head = (blocks[:whole].view(-1, period, BLOCK) * sign).view(-1, BLOCK)
    return torch.cat((head, blocks[whole:] * sign[: blocks.shape[0] - whole]))


def rotate(flat: torch.Tensor, key: FrameKey, salt: int) -> torch.Tensor:
    """(blocks, BLOCK) coefficients of n values, padded with zeros."""
    count = -(-flat.numel() // BLOCK)
    if flat.numel() != count * BLOCK:
        flat = torch.nn.functional.pad(flat, (0, count * BLOCK - flat.numel()))
    return _transform(_signed(flat.view(count, BLOCK), signs(key, salt, min(count, _SIGN_BLOCKS), flat.device)))


def unrotate(coefficients: torch.Tensor, n: int, key: FrameKey, salt: int) -> torch.Tensor:
    """The first n values, inverse of `rotate`."""
    sign = signs(key, salt, min(coefficients.shape[0], _SIGN_BLOCKS), coefficients.device)
    return _signed(_transform(coefficients), sign).view(-1)[:n]


def pack(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """uint8 codes below 2^bits (a multiple of 8 of them) in planes of 4, 2 and 1 bits, low bits first."""
    planes, shift = [], 0
    for width in (4, 2, 1):
        while bits - shift >= width:
            plane = (codes >> shift) & ((1 << width) - 1) if bits != width else codes
            parts = plane.view(8 // width, -1)  # far apart elements share a byte: contiguous, so fast
            packed = parts[0].clone()
            for i in range(1, 8 // width):
                packed |= parts[i] << (i * width)
            planes.append(packed)
            shift += width
    return planes


def unpack(body: wire.Reader, count: int, bits: int, device: torch.device) -> torch.Tensor:
    """`count` codes (a multiple of 8) written by `pack`."""
    codes = torch.empty(count, dtype=torch.uint8, device=device)
    shift = 0
    for width in (4, 2, 1):
        while bits - shift >= width:
            raw = torch.from_numpy(body.array("u1", count * width // 8)).to(device)
            parts = codes.view(8 // width, -1)
            for i in range(8 // width):
                piece = ((raw >> (i * width)) & ((1 << width) - 1)) << shift
                parts[i] = piece if shift == 0 else parts[i] | piece
            shift += width
    return codes


def size(n: int, bits: int) -> int:
    """Bytes that `encode` gives for n values."""
    blocks = -(-n // BLOCK)
    return blocks * (2 + BLOCK * bits // 8)


def encode(flat: torch.Tensor, bits: int, key: FrameKey, salt: int, unbiased: bool) -> list[wire.Buffer]:
    c = rotate(flat, key, salt)
    step, half = STEP[bits], 1 << (bits - 1)
    norm2 = torch.einsum("ij,ij->i", c, c)
    inverse = torch.where(norm2 > 0, (norm2 / BLOCK).rsqrt(), 0).unsqueeze(1)
    level = (c * (inverse / step)).floor_().clamp_(-half, half - 1)
    u = (level + 0.5).mul_(step)
    cu = torch.einsum("ij,ij->i", c, u)
    scale = norm2 / cu if unbiased else cu / torch.einsum("ij,ij->i", u, u)
    scale = torch.where(cu > 0, scale, 0).to(torch.bfloat16)
    codes = level.add_(half).to(torch.uint8).view(-1)
    return [wire.tensor_bytes(scale), *(wire.tensor_bytes(p) for p in pack(codes, bits))]


def decode(body: wire.Reader, n: int, bits: int, key: FrameKey, salt: int, device: torch.device) -> torch.Tensor:
    """The n values; FrameError if the body is too short or a scale is not finite."""
    blocks = -(-n // BLOCK)
    scale = wire.dense_tensor(body.take(2 * blocks), (blocks,), torch.bfloat16).to(torch.float32)
    if not bool(torch.isfinite(scale).all()):
        raise FrameError("frame holds a block scale that is not finite")
    step, half = STEP[bits], 1 << (bits - 1)
    u = unpack(body, blocks * BLOCK, bits, device).view(blocks, BLOCK).to(torch.float32)
    u.sub_(half - 0.5).mul_((scale.to(device) * step).unsqueeze(1))
    return unrotate(u, n, key, salt)

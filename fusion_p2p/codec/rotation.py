"""Randomised Hadamard rotation in blocks, and an entropy-coded uniform quantiser of what it gives (near Gaussian).

`encode`/`decode` turn n float32 values into about n * bits / 8 bytes and back. `unbiased` scales each block by
|c|^2 / <c, u>, which makes the estimate unbiased over the random signs (DRIVE, arXiv 2105.08339; EDEN, arXiv
2108.08842): what a gradient needs. Otherwise the scale is the least-squares one, of smaller error: what an activation
needs. Next to fixed-length codes of as many bits, the entropy coder halves the error from 4 bits on.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec
import numpy as np
import torch

from fusion_p2p.codec import entropy, wire
from fusion_p2p.codec.base import FrameKey
from fusion_p2p.errors import FrameError

BLOCK = 1024
_LEAST_BLOCK = 64
_SIGN_BLOCKS = 256  # blocks before the signs repeat
# Step of a uniform quantiser on a unit Gaussian whose symbols have this entropy in bits.
STEP = {
    0.5: 3.456,
    1.0: 2.422,
    1.5: 1.610,
    2.0: 1.082,
    2.5: 0.747,
    3.0: 0.522,
    3.5: 0.367,
    4.0: 0.259,
    5.0: 0.129,
    6.0: 0.0646,
}


def random_words(key: FrameKey, salt: int, count: int) -> np.ndarray:
    """`count` uint64 that depend on the key and salt alone; Philox's raw stream does not change with numpy."""
    digest = hashlib.blake2b(msgspec.msgpack.encode((key, salt)), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def shapes(n: int) -> list[tuple[int, int]]:
    """(blocks, size) of n values: whole blocks of BLOCK, and the rest padded to a power of two."""
    whole, rest = divmod(n, BLOCK)
    out = [(whole, BLOCK)] if whole else []
    if rest:
        out.append((1, max(_LEAST_BLOCK, 1 << (rest - 1).bit_length())))
    return out


def _signs(key: FrameKey, salt: int, blocks: int, size: int, device: torch.device) -> torch.Tensor:
    """(min(blocks, _SIGN_BLOCKS), size) of +-1/sqrt(size), so that the Hadamard that follows is orthonormal."""
    blocks = min(blocks, _SIGN_BLOCKS)
    raw = random_words(key, salt * BLOCK + size - 1, blocks * size // 64)
    bits = torch.from_numpy(np.unpackbits(raw.astype("<u8").view(np.uint8))).to(device)
    return bits.to(torch.float32).mul_(2 * size**-0.5).sub_(size**-0.5).view(blocks, size)


@functools.cache
def _hadamard(side: int, device: torch.device) -> torch.Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < side:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h.to(device)


def _transform(blocks: torch.Tensor) -> torch.Tensor:
    """The Hadamard of each row, not normalised: that of a product of sides is one multiplication by each."""
    size = blocks.shape[1]
    left = 1 << (size.bit_length() // 2)
    right = size // left
    inner = (blocks.reshape(-1, right) @ _hadamard(right, blocks.device)).view(-1, left, right)
    return torch.matmul(_hadamard(left, blocks.device), inner).view(-1, size)


def _signed(blocks: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """blocks * sign, the signs repeating; a new tensor."""
    count, period = blocks.shape[0], sign.shape[0]
    if count == period:
        return blocks * sign
    whole = count // period * period
    head = (blocks[:whole].view(-1, period, sign.shape[1]) * sign).view(whole, -1)
    return torch.cat((head, blocks[whole:] * sign[: count - whole]))


def rotate(flat: torch.Tensor, key: FrameKey, salt: int) -> list[torch.Tensor]:
    """(blocks, size) coefficients of n values, one tensor per block size."""
    out, start = [], 0
    for blocks, size in shapes(flat.numel()):
        part = flat[start : start + blocks * size]
        start += part.numel()
        if part.numel() != blocks * size:
            part = torch.nn.functional.pad(part, (0, blocks * size - part.numel()))
        out.append(_transform(_signed(part.view(blocks, size), _signs(key, salt, blocks, size, flat.device))))
    return out


def unrotate(coefficients: list[torch.Tensor], n: int, key: FrameKey, salt: int) -> torch.Tensor:
    """The n values, inverse of `rotate`."""
    parts = [_signed(_transform(c), _signs(key, salt, c.shape[0], c.shape[1], c.device)).view(-1) for c in coefficients]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:n]


def _peak(bits: float) -> int:
    """Greatest symbol: so few that more share a byte where that pays, and clipping (beyond 3 sigma) costs nothing."""
    step = STEP[bits]
    return 1 if step > 1.8 else 2 if step > 1.2 else 7 if step > 0.6 else 127


def bound(n: int, bits: float) -> int:
    """Most bytes that `encode` gives for n values."""
    parts = shapes(n)
    return 2 * sum(b for b, _ in parts) + entropy.bound(sum(b * s for b, s in parts), _peak(bits))


def expected(n: int, bits: float) -> float:
    """Bytes that `encode` gives for n values, about."""
    parts = shapes(n)
    return 2 * sum(b for b, _ in parts) + sum(b * s for b, s in parts) * bits * 1.025 / 8 + 20


def read_scales(body: wire.Reader, count: int) -> torch.Tensor:
    """`count` finite bfloat16 as float32."""
    scale = wire.dense_tensor(body.take(2 * count), (count,), torch.bfloat16).to(torch.float32)
    if not bool(torch.isfinite(scale).all()):
        raise FrameError("frame holds a block scale that is not finite")
    return scale


def encode(flat: torch.Tensor, bits: float, key: FrameKey, salt: int, unbiased: bool) -> list[wire.Buffer]:
    """A (elements,) tensor as scales and symbols of `bits` each, rotated by `key`, `salt`; `unbiased`: in the mean."""
    step, peak = STEP[bits], _peak(bits)
    scales, symbols = [], []
    for c in rotate(flat, key, salt):
        norm2 = torch.linalg.vecdot(c, c)
        inverse = torch.where(norm2 > 0, (norm2 / c.shape[1]).rsqrt() / step, 0).clamp_(max=1e38).unsqueeze(1)
        u = (c * inverse).round_().clamp_(-peak, peak)
        cu = torch.linalg.vecdot(c, u)
        scale = norm2 / cu if unbiased else cu / torch.linalg.vecdot(u, u)
        scales.append(torch.where(cu > 0, scale, 0))
        symbols.append(u.to(torch.int8).view(-1))
    packed = entropy.encode(torch.cat(symbols).cpu().numpy(), peak)
    return [wire.tensor_bytes(torch.cat(scales).to(torch.bfloat16)), *packed]


def decode(body: wire.Reader, n: int, bits: float, key: FrameKey, salt: int, device: torch.device) -> torch.Tensor:
    """The n values; FrameError if the body is damaged."""
    parts = shapes(n)
    blocks = sum(b for b, _ in parts)
    scale = read_scales(body, blocks)
    symbols = torch.from_numpy(entropy.decode(body, sum(b * s for b, s in parts), _peak(bits))).to(device)
    coefficients, scale, start, first = [], scale.to(device), 0, 0
    for count, size in parts:
        u = symbols[start : start + count * size].view(count, size).to(torch.float32)
        coefficients.append(u.mul_(scale[first : first + count].unsqueeze(1)))
        start, first = start + count * size, first + count
    return unrotate(coefficients, n, key, salt)

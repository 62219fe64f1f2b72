"""`topk-masked:D[/B]`: Top-K whose gradient travels at the forward mask: the exact gradient of the masked network.

Forward: channel means, and of what is left the largest: gap-coded indices and 4-bit logarithmic values. Backward: a
hash of the mask, B-bit unbiased rotated values (4 unless named) and the channel means of the gradient beside the mask,
which is what the forward means pass on; no indices, `include_indices(aux)` adds them. Without those means a bias before
the cut sees a part of its gradient only, and activations grow. A receiver whose mask differs (it was rebuilt on
hardware that rounds otherwise) raises EndsDiffer.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import torch

from fusion_p2p.codec import channels, rotation, wire
from fusion_p2p.codec import indices as index_codec
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import bits, numbers
from fusion_p2p.codec.names import density as parse_density
from fusion_p2p.codec.selection import select
from fusion_p2p.codec.topk import kept
from fusion_p2p.errors import EndsDiffer, FrameError

_BLOCK = 512  # kept values that share a range
_TOP = 7  # highest of the eight magnitudes
_HASH = 8


class Mask(msgspec.Struct, frozen=True):
    """Aux of a micro-batch. `indices` ascend, int64; `digest` names them; `explicit`: send them backward too."""

    indices: torch.Tensor
    digest: bytes
    explicit: bool = False


def _digest(indices: np.ndarray) -> bytes:
    return hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=_HASH).digest()


def _log_encode(values: torch.Tensor) -> list[wire.Buffer]:
    """Sign and one of 8 magnitudes, geometric between the least and the greatest of each block."""
    k = values.numel()
    blocks = -(-k // _BLOCK)
    # Padding with the last value changes no range.
    padded = torch.cat((values, values[-1:].expand(blocks * _BLOCK - k))).view(blocks, _BLOCK)
    magnitude = padded.abs()
    high = magnitude.amax(1).to(torch.bfloat16)
    low = magnitude.amin(1).to(torch.bfloat16)
    base, span = _log_range(low, high)
    level = (magnitude.clamp_min_(torch.finfo(torch.float32).tiny).log2_() - base) * (_TOP / span)
    code = level.round_().clamp_(0, _TOP).to(torch.uint8) | ((padded < 0).to(torch.uint8) << 3)
    code = code.view(2, -1)  # elements far apart share a byte: contiguous, so fast
    packed = code[0] | (code[1] << 4)
    return [wire.tensor_bytes(low), wire.tensor_bytes(high), wire.tensor_bytes(packed)]


def _log_range(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log2 of the least magnitude and the span to the greatest, (blocks, 1) float32; at most 2^16 apart."""
    top = high.to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny).log2()
    base = torch.maximum(low.to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny).log2(), top - 16)
    return base.unsqueeze(1), (top - base).clamp_min(1e-6).unsqueeze(1)


def _log_size(k: int) -> int:
    blocks = -(-k // _BLOCK)
    return blocks * (4 + _BLOCK // 2)


def _log_decode(body: wire.Reader, k: int, device: torch.device) -> torch.Tensor:
    blocks = -(-k // _BLOCK)
    low = wire.dense_tensor(body.take(2 * blocks), (blocks,), torch.bfloat16)
    high = wire.dense_tensor(body.take(2 * blocks), (blocks,), torch.bfloat16)
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low >= 0) & (high >= low)).all()):
        raise FrameError("frame holds a value range that is not finite and ascending")
    base, span = _log_range(low, high)
    table = torch.exp2(base + span * torch.arange(_TOP + 1) / _TOP)
    table = torch.where(high.to(torch.float32).unsqueeze(1) > 0, table, 0)
    table = torch.cat((table, -table), 1).to(device)
    packed = torch.from_numpy(body.array("u1", blocks * _BLOCK // 2)).to(device)
    codes = torch.cat((packed & 15, packed >> 4)).view(blocks, _BLOCK)
    return table.gather(1, codes.to(torch.int64)).view(-1)[:k]


class TopKMasked(Codec):
    """The largest `density` of the activation; the gradient at those places, without indices (DESIGN section 6)."""

    id = wire.TOPK_MASKED

    def __init__(self, density: float, backward_bits: float = 4, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.density = density
        self.backward_bits = backward_bits
        self.name = f"topk-masked:{density:g}" + (f"/{backward_bits:g}" if backward_bits != 4 else "")

    @staticmethod
    def include_indices(aux: Mask) -> Mask:
        """The same mask, to be sent with the gradient."""
        return Mask(aux.indices, aux.digest, True)

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        shape = tuple(x.shape)
        rows, mean = channels.remove_mean(channels.to_rows(x))
        flat = channels.from_rows(rows, shape).reshape(-1)
        indices = select(flat, kept(shape, self.density))
        host = indices.cpu().numpy()
        body = [*mean, *index_codec.encode(host, flat.numel()), *_log_encode(flat[indices])]
        return body, Mask(indices, _digest(host))

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        k, n = kept(shape, self.density), wire.numel(shape)
        reader = wire.Reader(body)
        mean = channels.read_mean(reader, shape, self.device)
        host = index_codec.decode(reader, k, n)
        values = _log_decode(reader, k, self.device)
        reader.done()
        indices = torch.from_numpy(host).to(self.device)
        return self._with_mean(self._scatter(indices, values, shape), mean), Mask(indices, _digest(host))

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        flat, n = g.view(-1), g.numel()
        if not isinstance(aux, Mask):
            raise FrameError(f"{self.name} was given {type(aux).__name__} for the mask of this gradient's activation")
        explicit = index_codec.encode(aux.indices.cpu().numpy(), n) if aux.explicit else []
        kept_at = aux.indices.to(g.device)
        values = rotation.encode(flat[kept_at], self.backward_bits, key, 1, unbiased=True)
        rest = flat.clone()
        rest[kept_at] = 0.0
        _, mean = channels.remove_mean(channels.to_rows(rest.view(g.shape)))
        return [bytes([aux.explicit]), aux.digest, *explicit, *mean, *values]

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        k = kept(shape, self.density)
        reader = wire.Reader(body)
        explicit, digest = reader.u8(), bytes(reader.take(_HASH))
        if explicit > 1:
            raise FrameError(f"gradient frame with index mark {explicit}, 0 or 1 expected")
        if explicit:
            host = index_codec.decode(reader, k, wire.numel(shape))
            if _digest(host) != digest:
                raise FrameError("gradient frame's indices do not match the hash that it names")
            indices = torch.from_numpy(host).to(self.device)
        elif isinstance(aux, Mask) and aux.digest == digest:
            indices = aux.indices.to(self.device)
        else:
            raise EndsDiffer(f"gradient frame at mask {digest.hex()}, which is not the one sent")
        mean = channels.read_mean(reader, shape, self.device)
        values = rotation.decode(reader, k, self.backward_bits, key, 1, self.device)
        reader.done()
        return self._with_mean(self._scatter(indices, values, shape), mean)

    @staticmethod
    def _with_mean(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
        return x if mean is None else channels.from_rows(channels.to_rows(x) + mean, tuple(x.shape))

    def _scatter(self, indices: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = torch.zeros(wire.numel(shape), dtype=torch.float32, device=self.device)
        out[indices] = values
        return out.view(shape)

    def _bound(self, shape: Shape, direction: Direction) -> int:
        k, n = kept(shape, self.density), wire.numel(shape)
        if direction == "forward":
            return channels.mean_bytes(shape) + index_codec.bound(k, n) + _log_size(k)
        return 1 + _HASH + channels.mean_bytes(shape) + index_codec.bound(k, n) + rotation.bound(k, self.backward_bits)

    def _bytes(self, shape: Shape, direction: Direction) -> float:
        k, n = kept(shape, self.density), wire.numel(shape)
        if direction == "forward":
            return channels.mean_bytes(shape) + index_codec.expected(k, n) + _log_size(k)
        return 1 + _HASH + channels.mean_bytes(shape) + rotation.expected(k, self.backward_bits)


def make(arg: str, device: torch.device) -> TopKMasked:
    share, slash, width = arg.partition("/")
    backward = numbers(width, "topk-masked:0.01/2", 1)[0] if slash else 4.0
    bits(backward, tuple(rotation.STEP), f"topk-masked:{arg}")
    return TopKMasked(parse_density(share, "topk-masked:0.01"), backward, device)

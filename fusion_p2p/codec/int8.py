"""`int8`: eight-bit integers with one float32 scale per block of 1024 values, both directions."""

from __future__ import annotations

import torch

from fusion_p2p.codec import wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape

_BLOCK = 1024


class Int8(Codec):
    """Eight bits an element and one scale a row: just under 4x."""

    id = wire.INT8
    name = "int8"

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        return self._encode(x), None

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        return self._decode(body, shape), None

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        return self._encode(g)

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        return self._decode(body, shape)

    @staticmethod
    def _encode(x: torch.Tensor) -> wire.Body:
        n = x.numel()
        whole = n // _BLOCK * _BLOCK
        flat, codes, peaks = x.view(-1), torch.empty(n, dtype=torch.int8, device=x.device), []
        for part, out in ((flat[:whole].view(-1, _BLOCK), codes[:whole]), (flat[whole:].view(1, -1), codes[whole:])):
            if part.numel():
                peak = part.abs().amax(1)
                inverse = torch.where(peak > 0, 127 / peak, 0).clamp_(max=torch.finfo(torch.float32).max)
                out.copy_((part * inverse.unsqueeze(1)).round_().clamp_(-127, 127).view(-1))
                peaks.append(peak)
        return [wire.tensor_bytes(torch.cat(peaks)), wire.tensor_bytes(codes)]

    def _decode(self, body: memoryview, shape: Shape) -> torch.Tensor:
        n = wire.numel(shape)
        reader = wire.Reader(body)
        peaks = torch.from_numpy(reader.floats(-(-n // _BLOCK), "block scale")).to(self.device).div_(127)
        codes = torch.from_numpy(reader.array("i1", n)).to(self.device)
        reader.done()
        out = codes.to(torch.float32)
        whole = n // _BLOCK
        out[: whole * _BLOCK].view(-1, _BLOCK).mul_(peaks[:whole].unsqueeze(1))
        if n % _BLOCK:
            out[whole * _BLOCK :].mul_(peaks[-1])
        return out.view(shape)

    def _bound(self, shape: Shape, direction: Direction) -> int:
        n = wire.numel(shape)
        return n + 4 * -(-n // _BLOCK)

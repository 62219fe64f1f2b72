"""`topk:D`: the published baseline (AdaTopK, FusionLLM section 5), masks chosen apart forward and backward.

k float32 values and int32 indices. It is here to be compared with: gradients at a mask of their own are biased, and
activations grow under it (README.md).
"""

from __future__ import annotations

import torch

from fusion_p2p.codec import wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import density
from fusion_p2p.codec.selection import select
from fusion_p2p.errors import FrameError


def kept(shape: Shape, density: float) -> int:
    """Elements kept: the density's share, rounded, at least one."""
    return max(1, round(wire.numel(shape) * density))


class TopK(Codec):
    """The published baseline: the largest `density` of the elements, chosen anew forward and backward."""

    id = wire.TOPK

    def __init__(self, density: float, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.density = density
        self.name = f"topk:{density:g}"

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        return self._encode(x), None

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        return self._decode(body, shape), None

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        return self._encode(g)

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        return self._decode(body, shape)

    def _encode(self, x: torch.Tensor) -> wire.Body:
        flat = x.view(-1)
        indices = select(flat, kept(tuple(x.shape), self.density))
        return [wire.tensor_bytes(indices.to(torch.int32)), wire.tensor_bytes(flat[indices])]

    def _decode(self, body: memoryview, shape: Shape) -> torch.Tensor:
        k, n = kept(shape, self.density), wire.numel(shape)
        reader = wire.Reader(body)
        indices = torch.from_numpy(reader.array("<i4", k)).to(torch.int64)
        values = torch.from_numpy(reader.floats(k, "value"))
        reader.done()
        if int(indices[0]) < 0 or int(indices[-1]) >= n or not bool((indices[1:] > indices[:-1]).all()):
            raise FrameError(f"frame holds indices that do not ascend between 0 and {n - 1}")
        out = torch.zeros(n, dtype=torch.float32, device=self.device)
        out[indices.to(self.device)] = values.to(self.device)
        return out.view(shape)

    def _bound(self, shape: Shape, direction: Direction) -> int:
        return 8 * kept(shape, self.density)


def make(arg: str, device: torch.device) -> TopK:
    return TopK(density(arg, "topk:0.01"), device)

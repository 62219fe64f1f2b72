"""`dense`: the tensor's own bytes, exact for every dtype. `dense:bf16`: floating-point tensors rounded to bfloat16."""

from __future__ import annotations

import torch

from fusion_p2p.codec import wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape


class Dense(Codec):
    """Every element as it is: no loss, 1x."""

    id = wire.DENSE
    name = "dense"

    def exact(self, shape: Shape, dtype: torch.dtype) -> bool:
        return True


class DenseBf16(Codec):
    """Every element in bfloat16: 2x, rounded to 8 bits of mantissa."""

    id = wire.BF16
    name = "dense:bf16"

    def exact(self, shape: Shape, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 or super().exact(shape, dtype)

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        return wire.tensor_bytes(x.to(torch.bfloat16)), None

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        return wire.dense_tensor(body, shape, torch.bfloat16).to(self.device).to(torch.float32), None

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        return wire.tensor_bytes(g.to(torch.bfloat16))

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        return wire.dense_tensor(body, shape, torch.bfloat16).to(self.device).to(torch.float32)

    def _bound(self, shape: Shape, direction: Direction) -> int:
        return 2 * wire.numel(shape)

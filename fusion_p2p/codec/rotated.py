"""`rotated:F/B`: F-bit activations, randomly rotated, channel means sent apart; B-bit unbiased gradients.

F and B are bits per element after entropy coding (0.5 to 6, see `rotation.STEP`).
"""

from __future__ import annotations

import torch

from fusion_p2p.codec import channels, rotation, wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import bits, numbers


class Rotated(Codec):
    """Randomly rotated blocks in few bits an element; unbiased in the backward (`rotation.py`)."""

    id = wire.ROTATED

    def __init__(self, forward_bits: float, backward_bits: float, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.bits = {"forward": forward_bits, "backward": backward_bits}
        self.name = f"rotated:{forward_bits:g}/{backward_bits:g}"

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        rows, mean = channels.remove_mean(channels.to_rows(x))
        return [*mean, *rotation.encode(rows.reshape(-1), self.bits["forward"], key, 0, unbiased=False)], None

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        reader = wire.Reader(body)
        mean = channels.read_mean(reader, shape, self.device)
        flat = rotation.decode(reader, wire.numel(shape), self.bits["forward"], key, 0, self.device)
        reader.done()
        rows = flat.view(channels.split(shape))
        return channels.from_rows(rows if mean is None else rows + mean, shape), None

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        return rotation.encode(g.reshape(-1), self.bits["backward"], key, 1, unbiased=True)

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        reader = wire.Reader(body)
        flat = rotation.decode(reader, wire.numel(shape), self.bits["backward"], key, 1, self.device)
        reader.done()
        return flat.view(shape)

    def _bound(self, shape: Shape, direction: Direction) -> int:
        mean = channels.mean_bytes(shape) if direction == "forward" else 0
        return mean + rotation.bound(wire.numel(shape), self.bits[direction])

    def _bytes(self, shape: Shape, direction: Direction) -> float:
        mean = channels.mean_bytes(shape) if direction == "forward" else 0
        return mean + rotation.expected(wire.numel(shape), self.bits[direction])


def make(arg: str, device: torch.device) -> Rotated:
    forward, backward = (bits(b, tuple(rotation.STEP), f"rotated:{arg}") for b in numbers(arg, "rotated:4/2", 2))
    return Rotated(forward, backward, device)

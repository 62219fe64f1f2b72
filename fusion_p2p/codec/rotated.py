"""`rotated:F/B`: F-bit activations, randomly rotated, channel means sent apart; B-bit unbiased gradients."""

from __future__ import annotations

import torch

from fusion_p2p.codec import channels, rotation, wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import integers
from fusion_p2p.errors import InputError


class Rotated(Codec):
    id = wire.ROTATED

    def __init__(self, forward_bits: int, backward_bits: int, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.bits = {"forward": forward_bits, "backward": backward_bits}
        self.name = f"rotated:{forward_bits}/{backward_bits}"

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
        return mean + rotation.size(wire.numel(shape), self.bits[direction])

    def _passes(self, direction: Direction) -> float:
        return 30.0


def make(arg: str, device: torch.device) -> Rotated:
    bits = integers(arg, "rotated:4/2", 2)
    if bits[0] not in (2, 3, 4, 5, 6) or bits[1] not in (1, 2, 3, 4, 5, 6):
        raise InputError(f"codec 'rotated:{arg}' has bits out of range; use 2-6 forward and 1-6 backward")
    return Rotated(bits[0], bits[1], device)

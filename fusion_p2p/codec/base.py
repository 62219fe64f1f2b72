"""The interface of every tensor-frame codec (DESIGN section 6) and what all of them share.

A codec is a pair: what the sender of an activation does forward, and what its receiver does with the gradient on the
way back. Both ends of an edge hold one instance each, made by `fusion_p2p.codec.parse(name)`; instances are not shared
between edges, since a few carry state (a subspace basis, a threshold within one step).
"""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from fusion_p2p.codec import wire
from fusion_p2p.errors import FrameError

Direction: TypeAlias = Literal["forward", "backward"]
Shape: TypeAlias = tuple[int, ...]
Aux: TypeAlias = Any  # opaque; what a codec keeps of a micro-batch between its forward and its backward frame

SKIPPED = "skipped"  # aux of an activation that was not finite: its gradient is sent as such too
SMALL = 256  # elements; a lossy codec sends fewer than this exactly, there is nothing to win


class FrameKey(msgspec.Struct, frozen=True):
    """All randomness of a frame is a function of this. `value` is the OP-DAG value id, `step` the optimizer step."""

    seed: int
    step: int
    micro_batch: int
    value: int
    training: bool = True  # False: an evaluation pass, which changes no codec's state


class Codec:
    """Base: headers, special frames and checks; subclasses implement the four `_` methods on float32 tensors.

    Special frames of every lossy codec: integers, bools and tensors under SMALL elements are sent exactly; a tensor
    with NaN or infinity becomes a few bytes that decode to all NaN (the step's verdict then skips it).
    A payload depends only on (tensor, key, frames of the same edge and step before it, `state_dict`).
    """

    id: int = -1
    name: str = ""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    # --- public, called by the stage

    def encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[bytes, Aux]:
        """Payload of an activation, and what `decode_backward` of the same micro-batch needs."""
        exact = self._special(x, backward=False)
        if exact is not None:
            return exact, SKIPPED if exact[3] & wire.NONFINITE else None
        body, aux = self._encode_forward(x.detach().to(torch.float32).contiguous(), key)
        return wire.join(wire.header(self.id, x.dtype, tuple(x.shape), 0), body), aux

    def decode_forward(
        self, payload: bytes, shape: Shape, dtype: torch.dtype, key: FrameKey
    ) -> tuple[torch.Tensor, Aux]:
        """The activation, in storage of its own, and what `encode_backward` needs. FrameError if the bytes lie."""
        body, exact = self._open(payload, shape, dtype, "forward")
        if exact is not None:
            return exact, SKIPPED if payload[3] & wire.NONFINITE else None
        x, aux = self._decode_forward(body, shape, key)
        return x.to(dtype), aux

    def encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> bytes:
        """Payload of the gradient of an activation whose `decode_forward` gave `aux`."""
        exact = self._special(g, backward=True)
        if exact is not None:
            return exact
        if aux is SKIPPED:
            return wire.header(self.id, g.dtype, tuple(g.shape), wire.BACKWARD | wire.NONFINITE)
        body = self._encode_backward(g.detach().to(torch.float32).contiguous(), aux, key)
        return wire.join(wire.header(self.id, g.dtype, tuple(g.shape), wire.BACKWARD), body)

    def decode_backward(
        self, payload: bytes, shape: Shape, dtype: torch.dtype, aux: Aux, key: FrameKey
    ) -> torch.Tensor:
        """The gradient, in storage of its own; `aux` is what `encode_forward` gave. FrameError if the bytes lie."""
        body, exact = self._open(payload, shape, dtype, "backward")
        if exact is not None:
            return exact
        return self._decode_backward(body, shape, aux, key).to(dtype)

    def bound(self, shape: Shape, dtype: torch.dtype, direction: Direction) -> int:
        """Most bytes a payload may have; receivers check a frame's length against it before they take memory."""
        head = wire.header_bytes(len(shape))
        if self.exact(shape, dtype):
            return head + wire.dense_bytes(shape, dtype)
        return head + self._bound(shape, direction)

    def bytes_estimate(self, shape: Shape, dtype: torch.dtype, direction: Direction) -> float:
        """Expected bytes of a payload."""
        head = wire.header_bytes(len(shape))
        if self.exact(shape, dtype):
            return head + wire.dense_bytes(shape, dtype)
        return head + self._bytes(shape, direction)

    def exact(self, shape: Shape, dtype: torch.dtype) -> bool:
        """Whether frames of this shape and type are sent exactly."""
        return not dtype.is_floating_point or wire.numel(shape) < SMALL

    def mirror(self) -> Codec:
        """A copy that decodes what this end sent as the other end does, and leaves this one as it is."""
        return copy.copy(self)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a snapshot at a step boundary must hold of this end of the edge; empty for most codecs."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores `state_dict`; FrameError if it is not this codec's."""
        if state:
            raise FrameError(f"codec {self.name} keeps no state, but a snapshot holds {sorted(state)}")

    # --- implemented by subclasses

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        raise NotImplementedError

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        raise NotImplementedError

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        raise NotImplementedError

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        raise NotImplementedError

    def _bound(self, shape: Shape, direction: Direction) -> int:
        raise NotImplementedError

    def _bytes(self, shape: Shape, direction: Direction) -> float:
        return self._bound(shape, direction)

    # --- special frames

    def _special(self, x: torch.Tensor, backward: bool) -> bytes | None:
        flags = wire.BACKWARD if backward else 0
        shape = tuple(x.shape)
        if self.exact(shape, x.dtype):
            return wire.join(wire.header(wire.DENSE, x.dtype, shape, flags), wire.tensor_bytes(x))
        # One pass: a sum is NaN or infinite if any element is. A finite tensor whose sum overflows is told apart.
        if not bool(torch.isfinite(x.detach().sum())) and not bool(torch.isfinite(x).all()):
            return wire.header(self.id, x.dtype, shape, flags | wire.NONFINITE)
        return None

    def _open(
        self, payload: bytes, shape: Shape, dtype: torch.dtype, direction: Direction
    ) -> tuple[memoryview, torch.Tensor | None]:
        """Checks length and header; (body, None), or (empty, the tensor) for a special frame."""
        bound = self.bound(shape, dtype, direction)
        if len(payload) > bound:
            raise FrameError(f"{self.name} frame of {len(payload)} bytes is over the bound {bound} of shape {shape}")
        exact = self.exact(shape, dtype)
        flags, body = wire.open_header(payload, wire.DENSE if exact else self.id, dtype, shape)
        if bool(flags & wire.BACKWARD) != (direction == "backward"):
            raise FrameError(f"{self.name} frame has flags {flags:#x}, expected a {direction} frame")
        if flags & wire.NONFINITE:
            if len(body) or exact or not dtype.is_floating_point:
                raise FrameError(f"{self.name} frame marked non-finite carries {len(body)} bytes")
            return body, torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        if exact:
            return body, wire.dense_tensor(body, shape, dtype).to(self.device)
        return body, None

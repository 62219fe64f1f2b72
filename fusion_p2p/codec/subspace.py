"""`subspace:R/F/B`: activations as R coefficients in a slowly refreshed shared basis, gradients in the same basis.

The sender finds the basis (principal axes of its activations, channel means removed) at the first micro-batch of
every `REFRESH`-th step and sends it along; later frames name it by hash. F bits a coefficient forward, B backward
(F if not named). The gradient at the basis is the exact gradient of the projected network.
"""

from __future__ import annotations

import hashlib

import msgspec
import torch

from fusion_p2p.codec import channels, rotation, wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import bits, numbers
from fusion_p2p.errors import EndsDiffer, FrameError, InputError

REFRESH = 32  # steps between bases
_HASH = 8


class Basis(msgspec.Struct, frozen=True):
    """`axes`: (channels, rank), bfloat16 values in float32, nearly orthonormal; `digest` names their bytes."""

    axes: torch.Tensor
    digest: bytes


def _basis(axes: torch.Tensor) -> Basis:
    half = axes.detach().to("cpu", torch.bfloat16).contiguous()
    digest = hashlib.blake2b(bytes(wire.tensor_bytes(half)), digest_size=_HASH).digest()
    return Basis(half.to(torch.float32), digest)


def principal_axes(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """(channels, rank): the leading eigenvectors of rows' second moment, signs fixed by the largest entry."""
    moment = (rows.T @ rows).to("cpu", torch.float64)
    axes: torch.Tensor = torch.linalg.eigh(moment)[1][:, -rank:].flip(1)
    top = axes.abs().argmax(0, keepdim=True)
    return axes * axes.gather(0, top).sign()


class Subspace(Codec):
    """Coordinates along the `rank` strongest directions, in few bits; the gradient in the same basis."""

    id = wire.SUBSPACE

    def __init__(
        self, rank: int, forward_bits: float, backward_bits: float, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(device)
        self.rank = rank
        self.bits = {"forward": forward_bits, "backward": backward_bits}
        self.name = f"subspace:{rank}/{forward_bits:g}" + (
            f"/{backward_bits:g}" if backward_bits != forward_bits else ""
        )
        self._current: Basis | None = None

    def _rank(self, shape: Shape) -> int:
        return min(self.rank, channels.split(shape)[1])

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        rows, mean = channels.remove_mean(channels.to_rows(x))
        basis = self._current
        fresh = basis is None or (key.training and key.micro_batch == 0 and key.step % REFRESH == 0)
        if basis is None or fresh:
            basis = _basis(principal_axes(rows, self._rank(tuple(x.shape))))
            if key.training:
                self._current = basis
        axes = basis.axes.to(x.device)
        sent = [wire.tensor_bytes(basis.axes.to(torch.bfloat16))] if fresh else []
        coefficients = rotation.encode((rows @ axes).view(-1), self.bits["forward"], key, 0, unbiased=False)
        return [bytes([fresh]), basis.digest, *sent, *mean, *coefficients], basis

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        rows, width = channels.split(shape)
        rank = self._rank(shape)
        reader = wire.Reader(body)
        basis = self._read_basis(reader, width, rank)
        mean = channels.read_mean(reader, shape, self.device)
        flat = rotation.decode(reader, rows * rank, self.bits["forward"], key, 0, self.device)
        reader.done()
        if key.training:
            self._current = basis
        x = flat.view(rows, rank) @ basis.axes.to(self.device).T
        return channels.from_rows(x if mean is None else x + mean, shape), basis

    def _read_basis(self, reader: wire.Reader, width: int, rank: int) -> Basis:
        fresh, digest = reader.u8(), bytes(reader.take(_HASH))
        if fresh > 1:
            raise FrameError(f"frame with basis mark {fresh}, 0 or 1 expected")
        if not fresh:
            if self._current is None or self._current.digest != digest or self._current.axes.shape != (width, rank):
                raise EndsDiffer(f"frame names the basis {digest.hex()}, which this end does not hold")
            return self._current
        axes = wire.dense_tensor(reader.take(2 * width * rank), (width, rank), torch.bfloat16)
        if not bool((axes.abs() <= 1.01).all()):
            raise FrameError("frame's basis holds an entry that is not finite or over 1")
        basis = _basis(axes)
        if basis.digest != digest:
            raise FrameError(f"frame's basis does not match the hash {digest.hex()} that it names")
        return basis

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        if not isinstance(aux, Basis):
            raise FrameError(f"{self.name} was given {type(aux).__name__} for the basis of this gradient's activation")
        coefficients = (channels.to_rows(g) @ aux.axes.to(g.device)).view(-1)
        return [aux.digest, *rotation.encode(coefficients, self.bits["backward"], key, 1, unbiased=True)]

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        rows, rank = channels.split(shape)[0], self._rank(shape)
        reader = wire.Reader(body)
        digest = bytes(reader.take(_HASH))
        if not isinstance(aux, Basis) or aux.digest != digest:
            raise EndsDiffer(f"gradient frame names the basis {digest.hex()}, which was not the activation's")
        flat = rotation.decode(reader, rows * rank, self.bits["backward"], key, 1, self.device)
        reader.done()
        return channels.from_rows(flat.view(rows, rank) @ aux.axes.to(self.device).T, shape)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self._current is None else {"basis": self._current.axes.to(torch.bfloat16)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if set(state) - {"basis"} or any(t.dim() != 2 or t.dtype != torch.bfloat16 for t in state.values()):
            raise FrameError(f"snapshot of codec {self.name} holds {sorted(state)}, one bfloat16 matrix expected")
        self._current = _basis(state["basis"]) if state else None

    def _bound(self, shape: Shape, direction: Direction) -> int:
        rows, width = channels.split(shape)
        coefficients = rotation.bound(rows * self._rank(shape), self.bits[direction])
        if direction == "backward":
            return _HASH + coefficients
        return 1 + _HASH + 2 * width * self._rank(shape) + channels.mean_bytes(shape) + coefficients

    def _bytes(self, shape: Shape, direction: Direction) -> float:
        rows, width = channels.split(shape)
        coefficients = rotation.expected(rows * self._rank(shape), self.bits[direction])
        if direction == "backward":
            return _HASH + coefficients
        return 1 + _HASH + 2 * width * self._rank(shape) / REFRESH + channels.mean_bytes(shape) + coefficients


def make(arg: str, device: torch.device) -> Subspace:
    """The codec of "subspace:RANK/BITS[/BITS]"; InputError names what is wrong."""
    if arg.count("/") < 2:
        arg += "/" + arg.rpartition("/")[2]
    rank, *widths = numbers(arg, "subspace:64/4", 3)
    if rank != int(rank) or not 1 <= rank <= 8192:
        raise InputError(f"codec 'subspace:{arg}' has rank {rank:g}; use a whole number from 1 to 8192")
    forward, backward = (bits(b, tuple(rotation.STEP), f"subspace:{arg}") for b in widths)
    return Subspace(int(rank), forward, backward, device)

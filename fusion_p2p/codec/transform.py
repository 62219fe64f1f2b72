"""`transform:F/B`: a learned orthogonal-like transform, one quantiser step for all components, entropy coding.

The best rate at a given error of a Gaussian vector: principal axes, and the same step on every axis, so that strong
components get many bits and weak ones none ("reverse water-filling"). Two things make it fit training. The axes of the
activation are principal under the metric of its gradient's second moment, so that the error goes where the loss does
not feel it. The gradient is rotated at random along its own axes, and each block gets the step at which the summed
variance of unbiased estimates is least. F and B are bits per element. Either encoder finds its axes at the first
micro-batch of every `REFRESH`-th step and sends them along; later frames name them by hash.
"""

from __future__ import annotations

import copy
import hashlib

import msgspec
import numpy as np
import torch

from fusion_p2p.codec import channels, rates, rotation, symbols, wire
from fusion_p2p.codec.base import Aux, Codec, Direction, FrameKey, Shape
from fusion_p2p.codec.names import bits, numbers
from fusion_p2p.errors import EndsDiffer, FrameError

REFRESH = 32  # steps between axes
_HASH = 8
_ISOTROPIC = 0.2  # share of the metric that does not trust the gradients seen
_FINEST = symbols.LIMIT / 32  # steps in the spread of the strongest component
_SCALE = 200.0  # steps of a component's reconstruction scale per unit


class Axes(msgspec.Struct, frozen=True):
    """`synthesis`: (rank, channels) float32 of bfloat16 values; `power`: (rank,) mean squares when they were made;
    `digest` names both. `analysis`, its inverse (channels, rank), is the encoder's alone."""

    synthesis: torch.Tensor
    power: torch.Tensor
    digest: bytes
    analysis: torch.Tensor | None = None
    weighted: bool = False


def _named(synthesis: torch.Tensor, power: torch.Tensor) -> Axes:
    half = synthesis.detach().to("cpu", torch.bfloat16).contiguous()
    power = power.detach().to("cpu", torch.float32).contiguous()
    text = bytes(wire.tensor_bytes(half)) + bytes(wire.tensor_bytes(power))
    return Axes(half.to(torch.float32), power, hashlib.blake2b(text, digest_size=_HASH).digest())


def fit(rows: torch.Tensor, metric: torch.Tensor | None) -> Axes:
    """Principal axes of `rows` (n, channels), strongest first, under a (channels, channels) metric or none."""
    x = rows.to("cpu", torch.float64)
    moment = x.T @ x / x.shape[0]
    root = inverse = torch.eye(x.shape[1], dtype=torch.float64)
    if metric is not None:
        values, vectors = torch.linalg.eigh(metric.to("cpu", torch.float64))
        values = values.clamp_min(1e-12)
        root = vectors @ torch.diag(values.sqrt()) @ vectors.T
        inverse = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    power, vectors = torch.linalg.eigh(root @ moment @ root)
    power, vectors = power.flip(0).clamp_min(0), vectors.flip(1)
    axes = _named(vectors.T @ inverse, power)
    analysis = torch.linalg.inv(axes.synthesis.to(torch.float64)).to(torch.float32)
    return msgspec.structs.replace(axes, analysis=analysis, weighted=metric is not None)


def metric_of(gradient: Axes) -> torch.Tensor:
    """Second moment of the gradients that `gradient` was made of, scaled to mean 1 and mixed with the identity."""
    s = gradient.synthesis.to(torch.float64)
    moment = s.T @ torch.diag(gradient.power.to(torch.float64)) @ s
    mean = moment.diagonal().mean().clamp_min(1e-300)
    eye = torch.eye(moment.shape[0], dtype=torch.float64)
    return moment / mean * (1 - _ISOTROPIC) + eye * _ISOTROPIC


class Transform(Codec):
    """Elements along axes learnt from the tensor, in bits shared out by spread; mean bits as the name says."""

    id = wire.TRANSFORM

    def __init__(self, forward_bits: float, backward_bits: float, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.bits = {"forward": forward_bits, "backward": backward_bits}
        self.name = f"transform:{forward_bits:g}/{backward_bits:g}"
        self._axes: dict[Direction, Axes | None] = {"forward": None, "backward": None}

    # --- forward

    def _encode_forward(self, x: torch.Tensor, key: FrameKey) -> tuple[wire.Body, Aux]:
        rows, mean = channels.remove_mean(channels.to_rows(x))
        gradient = self._axes["backward"]
        analysis, sent = self._refreshed("forward", rows, key, gradient)
        y = analysis.T.to(x.device) @ rows.T
        spread = (torch.linalg.vecdot(y, y) / y.shape[1]).sqrt().cpu().numpy().astype(np.float64)
        step = float(np.float32(max(rates.one_step(spread, self.bits["forward"]), float(spread.max()) / _FINEST)))
        q = (y / step).round_().clamp_(-symbols.LIMIT, symbols.LIMIT).to(torch.int16)
        u = q.to(torch.float32) * step
        uu = torch.linalg.vecdot(u, u)
        scale = torch.where(uu > 0, torch.linalg.vecdot(y, u) / uu, 0)
        codes = (scale * _SCALE).round_().clamp_(0, 255).to(torch.uint8)
        head = [*sent, *mean, np.float32(step).tobytes(), wire.tensor_bytes(codes)]
        return [*head, *symbols.encode(q.cpu().numpy(), spread / step)], None

    def _decode_forward(self, body: memoryview, shape: Shape, key: FrameKey) -> tuple[torch.Tensor, Aux]:
        reader = wire.Reader(body)
        rows, width = channels.split(shape)
        axes = self._read_axes("forward", reader, width, key)
        mean = channels.read_mean(reader, shape, self.device)
        step = reader.f32()
        scale = torch.from_numpy(reader.array("u1", width).astype(np.float32)).to(self.device).mul_(step / _SCALE)
        q = torch.from_numpy(symbols.decode(reader, width, rows)).to(self.device)
        reader.done()
        y = q.to(torch.float32).mul_(scale.unsqueeze(1))
        x = y.T @ axes.synthesis.to(self.device)
        return channels.from_rows(x if mean is None else x + mean, shape), None

    # --- backward

    def _encode_backward(self, g: torch.Tensor, aux: Aux, key: FrameKey) -> wire.Body:
        rows = channels.to_rows(g)
        analysis, sent = self._refreshed("backward", rows, key, None)
        y = analysis.T.to(g.device) @ rows.T
        scales, parts = [], []
        for c in rotation.rotate(y.reshape(-1), key, 1):
            norm2 = torch.linalg.vecdot(c, c)
            spread = (norm2 / c.shape[1]).sqrt().cpu().numpy().astype(np.float64)
            steps = rates.unbiased_steps(spread, self.bits["backward"])
            inverse = torch.from_numpy((1 / steps).astype(np.float32)).to(g.device)
            u = (c * inverse.unsqueeze(1)).round_().clamp_(-symbols.LIMIT, symbols.LIMIT)
            cu = torch.linalg.vecdot(c, u)
            scales.append(wire.tensor_bytes(torch.where(cu > 0, norm2 / cu, 0).to(torch.bfloat16)))
            parts += symbols.encode(u.to(torch.int16).cpu().numpy(), spread / steps)
        return [*sent, *scales, *parts]

    def _decode_backward(self, body: memoryview, shape: Shape, aux: Aux, key: FrameKey) -> torch.Tensor:
        reader = wire.Reader(body)
        rows, width = channels.split(shape)
        axes = self._read_axes("backward", reader, width, key)
        blocks = rotation.shapes(rows * width)
        scales = [rotation.read_scales(reader, count).to(self.device) for count, _ in blocks]
        coefficients = []
        for (count, size), scale in zip(blocks, scales, strict=True):
            q = torch.from_numpy(symbols.decode(reader, count, size)).to(self.device)
            coefficients.append(q.to(torch.float32).mul_(scale.unsqueeze(1)))
        reader.done()
        y = rotation.unrotate(coefficients, rows * width, key, 1).view(width, rows)
        return channels.from_rows(y.T @ axes.synthesis.to(self.device), shape)

    # --- axes

    def _refreshed(
        self, direction: Direction, rows: torch.Tensor, key: FrameKey, gradient: Axes | None
    ) -> tuple[torch.Tensor, list[wire.Buffer]]:
        """The analysis to use, and the bytes that tell the other end of its axes."""
        axes = self._axes[direction]
        sent: list[wire.Buffer]
        due = key.micro_batch == 0 and key.training
        due = due and (key.step % REFRESH == 0 or (axes is not None and gradient is not None and not axes.weighted))
        if axes is None or due:
            axes = fit(rows, None if gradient is None else metric_of(gradient))
            if key.training:
                self._axes[direction] = axes
            body = [wire.tensor_bytes(axes.synthesis.to(torch.bfloat16)), wire.tensor_bytes(axes.power)]
            sent = [b"\x01", axes.digest, *body]
        else:
            sent = [b"\x00", axes.digest]
        if axes.analysis is None:
            raise FrameError(f"snapshot of codec {self.name} holds {direction} axes without their analysis")
        return axes.analysis, sent

    def _read_axes(self, direction: Direction, reader: wire.Reader, width: int, key: FrameKey) -> Axes:
        fresh, digest = reader.u8(), bytes(reader.take(_HASH))
        held = self._axes[direction]
        if fresh > 1:
            raise FrameError(f"frame with axes mark {fresh}, 0 or 1 expected")
        if not fresh:
            if held is None or held.digest != digest or held.synthesis.shape != (width, width):
                raise EndsDiffer(f"frame names the axes {digest.hex()}, which this end does not hold")
            return held
        synthesis = wire.dense_tensor(reader.take(2 * width * width), (width, width), torch.bfloat16)
        power = torch.from_numpy(reader.floats(width, "axis power"))
        if not bool(torch.isfinite(synthesis).all()):
            raise FrameError("frame's axes hold an entry that is not finite")
        axes = _named(synthesis, power)
        if axes.digest != digest:
            raise FrameError(f"frame's axes do not match the hash {digest.hex()} that it names")
        if key.training:
            self._axes[direction] = axes
        return axes

    def mirror(self) -> Transform:
        other = copy.copy(self)
        other._axes = dict(self._axes)
        return other

    def state_dict(self) -> dict[str, torch.Tensor]:
        out = {}
        for direction, axes in self._axes.items():
            if axes is not None:
                out[f"{direction}.synthesis"] = axes.synthesis
                out[f"{direction}.power"] = axes.power
                if axes.analysis is not None:
                    out[f"{direction}.analysis"] = axes.analysis
                    out[f"{direction}.weighted"] = torch.tensor(axes.weighted)
        return out

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._axes = {"forward": None, "backward": None}
        known = {f"{d}.{k}" for d in self._axes for k in ("synthesis", "power", "analysis", "weighted")}
        if set(state) - known:
            raise FrameError(f"snapshot of codec {self.name} holds {sorted(set(state) - known)}")
        for d in self._axes:
            if f"{d}.synthesis" in state:
                axes = _named(state[f"{d}.synthesis"], state[f"{d}.power"])
                weighted = bool(state[f"{d}.weighted"]) if f"{d}.weighted" in state else False
                analysis = state.get(f"{d}.analysis")
                self._axes[d] = msgspec.structs.replace(axes, analysis=analysis, weighted=weighted)

    # --- estimates

    def _axes_bytes(self, shape: Shape) -> int:
        width = channels.split(shape)[1]
        return 2 * width * width + 4 * width

    def _bound(self, shape: Shape, direction: Direction) -> int:
        rows, width = channels.split(shape)
        return 1 + _HASH + self._axes_bytes(shape) + channels.mean_bytes(shape) + 4 + width + 3 * rows * width + 1024

    def _bytes(self, shape: Shape, direction: Direction) -> float:
        n, width = wire.numel(shape), channels.split(shape)[1]
        extra = channels.mean_bytes(shape) + width if direction == "forward" else 0
        return self._axes_bytes(shape) / REFRESH + extra + n * self.bits[direction] / 8 * 1.05 + 100


def make(arg: str, device: torch.device) -> Transform:
    forward, backward = (bits(b, tuple(rotation.STEP), f"transform:{arg}") for b in numbers(arg, "transform:2/1", 2))
    return Transform(forward, backward, device)

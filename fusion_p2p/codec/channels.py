"""A tensor as (rows, channels), and the channel means that activations are sent without.

Channels are the last dimension; of a 4-D tensor (images) the second.
"""

from __future__ import annotations

import torch

from fusion_p2p.codec import wire
from fusion_p2p.codec.base import Shape
from fusion_p2p.errors import FrameError

_MIN_ROWS = 32  # fewer rows than this, and the means cost more bytes than they save


def split(shape: Shape) -> tuple[int, int]:
    """(rows, channels) of a tensor with elements."""
    channels = shape[1] if len(shape) == 4 else shape[-1]
    return wire.numel(shape) // channels, channels


def to_rows(x: torch.Tensor) -> torch.Tensor:
    rows, channels = split(tuple(x.shape))
    return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).reshape(rows, channels)


def from_rows(rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    if len(shape) == 4:
        n, c, h, w = shape
        return rows.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()
    return rows.reshape(shape)


def mean_bytes(shape: Shape) -> int:
    rows, channels = split(shape)
    return 2 * channels if rows >= _MIN_ROWS else 0


def remove_mean(rows: torch.Tensor) -> tuple[torch.Tensor, list[wire.Buffer]]:
    """(rows less the channel means, the means' bytes in bfloat16); unchanged where there are few rows."""
    if rows.shape[0] < _MIN_ROWS:
        return rows, []
    mean = rows.mean(0).to(torch.bfloat16)
    return rows - mean.to(torch.float32), [wire.tensor_bytes(mean)]


def read_mean(body: wire.Reader, shape: Shape, device: torch.device) -> torch.Tensor | None:
    """The (channels,) float32 mean of a frame, None where there are too few rows for one; FrameError if not finite."""
    rows, channels = split(shape)
    if rows < _MIN_ROWS:
        return None
    mean = wire.dense_tensor(body.take(2 * channels), (channels,), torch.bfloat16).to(torch.float32)
    if not bool(torch.isfinite(mean).all()):
        raise FrameError("frame holds a channel mean that is not finite")
    return mean.to(device)

"""What is said of a frame that looks wild; see `guard`. No torch here: daemons pass it on."""

from __future__ import annotations

import math

import msgspec


class FrameId(msgspec.Struct, frozen=True, array_like=True):
    """One frame into a stage."""

    kind: int
    src: int
    value: int
    tick: int
    micro_batch: int

    def __str__(self) -> str:
        return f"value {self.value} of stage {self.src} at tick {self.tick}, micro-batch {self.micro_batch}"


class Watched(msgspec.Struct, frozen=True, array_like=True):
    """A frame that is to be named whatever it is, and the norm above which it counts as wild."""

    frame: FrameId
    bound: float


class Suspicion(msgspec.Struct, frozen=True, array_like=True):
    """`digest`: BLAKE2b-128 of the payload. `wild`: not finite, or its norm beyond `bound` (infinite: none yet)."""

    frame: FrameId
    digest: bytes
    norm: float
    bound: float

    @property
    def wild(self) -> bool:
        return not math.isfinite(self.norm) or self.norm > self.bound

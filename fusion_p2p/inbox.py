"""Received frames of one stage, checked against what its program declares before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fusion_p2p.errors import FrameError
from fusion_p2p.frame import TRAINER, Frame, Kind

TICKS_AHEAD = 64  # how far a sender may run ahead of this stage
MICRO_BATCHES = 1 << 16  # of one tick


class Slot(NamedTuple):
    """One numbered stream of frames into a stage."""

    kind: Kind
    src: int
    value: int

    def __str__(self) -> str:
        what = f" of value {self.value}" if self.kind in _VALUED else ""
        return f"{self.kind.name}{what} from {'the trainer' if self.src == TRAINER else f'stage {self.src}'}"


_VALUED = (Kind.DATA, Kind.ACT, Kind.GRAD, Kind.WEIGHT, Kind.WGRAD)
_PER_MICRO_BATCH = (Kind.DATA, Kind.ACT, Kind.GRAD)


class Inbox:
    """`bounds`: the slots this stage has, with the most bytes of a payload in each."""

    def __init__(self, stage: int, bounds: Mapping[Slot, int]) -> None:
        self._stage = stage
        self._bounds = dict(bounds)
        self._held: dict[tuple[Slot, int, int], bytes] = {}
        self._last: dict[Slot, tuple[int, int]] = {}

    def bound(self, slot: Slot) -> int:
        """Most bytes of a payload; FrameError if this stage takes no such frame."""
        most = self._bounds.get(slot)
        if most is None:
            raise FrameError(f"stage {self._stage} takes no {slot}; both sides must run the same plan")
        return most

    def put(self, frame: Frame, tick: int) -> None:
        """Keep a frame. FrameError if it is undeclared, too long, stale, out of order or too far ahead of `tick`."""
        slot = Slot(frame.kind, frame.src, frame.value)
        most = self.bound(slot)
        at = (frame.tick, frame.micro_batch)
        if frame.dst != self._stage:
            raise FrameError(f"{slot} is meant for stage {frame.dst}, this is stage {self._stage}")
        if len(frame.payload) > most:
            raise FrameError(f"{slot}: {len(frame.payload)} bytes, at most {most}")
        if not tick <= frame.tick < tick + TICKS_AHEAD:
            raise FrameError(f"{slot} of tick {frame.tick}; stage {self._stage} is at tick {tick}")
        if not 0 <= frame.micro_batch < (MICRO_BATCHES if slot.kind in _PER_MICRO_BATCH else 1):
            raise FrameError(f"{slot} of micro-batch {frame.micro_batch}")
        if at <= self._last.get(slot, (-1, -1)):
            raise FrameError(f"{slot}: micro-batch {at[1]} of tick {at[0]} comes after {self._last[slot]}")
        self._last[slot] = at
        self._held[slot, frame.tick, frame.micro_batch] = frame.payload

    def has(self, slot: Slot, tick: int, micro_batch: int = 0) -> bool:
        return (slot, tick, micro_batch) in self._held

    def take(self, slot: Slot, tick: int, micro_batch: int = 0) -> bytes:
        return self._held.pop((slot, tick, micro_batch))

    def left(self, tick: int) -> list[Slot]:
        """Slots that still hold a frame of `tick`."""
        return [slot for slot, at, _ in self._held if at == tick]

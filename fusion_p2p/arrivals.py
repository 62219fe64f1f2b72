"""Tensors that came in, decoded and looked at before a stage uses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_p2p.errors import FrameError
from fusion_p2p.frame import Kind, StepHeader
from fusion_p2p.guard import Guard
from fusion_p2p.inbox import Inbox, Slot
from fusion_p2p.payloads import At, Payloads
from fusion_p2p.split import StageProgram
from fusion_p2p.suspicion import FrameId, Suspicion

_TENSORS = (Kind.ACT, Kind.GRAD, Kind.WEIGHT, Kind.WGRAD)


class Arrivals:
    """Each payload is decoded once: codecs may remember what they have seen."""

    def __init__(self, program: StageProgram, inbox: Inbox, payloads: Payloads, guard: Guard | None) -> None:
        self._program, self._inbox, self._payloads, self._guard = program, inbox, payloads, guard
        self._ready: dict[tuple[Slot, int], torch.Tensor | None] = {}

    def has(self, slot: Slot, tick: int, m: int) -> bool:
        return (slot, m) in self._ready or self._inbox.has(slot, tick, m)

    def pop(self, slot: Slot, m: int = 0) -> torch.Tensor | None:
        """A tensor that `decode` made; None where the sender says that there is no gradient."""
        return self._ready.pop((slot, m))

    def decode(self, needs: Sequence[tuple[Slot, int]], tick: int, header: StepHeader | None) -> Suspicion | None:
        """Make ready what `needs` names of tensors, as far as none is suspicious. FrameError names its sender."""
        for slot, m in needs:
            if slot.kind not in _TENSORS or (slot, m) in self._ready:
                continue
            payload = self._inbox.take(slot, tick, m)
            try:
                x = self._ready[slot, m] = self._tensor(slot, m, payload, header)
            except FrameError as error:
                error.src = slot.src
                raise
            if self._guard is not None and x is not None and (x.is_floating_point() or x.is_complex()):
                frame = FrameId(int(slot.kind), slot.src, slot.value, tick, m)
                if (suspicion := self._guard.look(frame, payload, x)) is not None:
                    return suspicion
        return None

    def _tensor(self, slot: Slot, m: int, payload: bytes, header: StepHeader | None) -> torch.Tensor | None:
        if slot.kind is Kind.WEIGHT or (slot.kind is Kind.WGRAD and payload):
            return self._payloads.decode(payload, slot.value)
        if header is None or slot.kind is Kind.WGRAD:
            return None
        edges = self._program.edges_in if slot.kind is Kind.ACT else self._program.edges_out
        forward = slot.kind is Kind.ACT
        edge = next(e for e in edges if (e.src if forward else e.dst, e.value) == (slot.src, slot.value))
        at = At(header, m)
        return (self._payloads.decode_forward if forward else self._payloads.decode_backward)(payload, edge, at)

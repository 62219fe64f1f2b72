"""What a stage sent in a tick, as one hash: the same wherever and whenever the stage is computed (for audits)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fusion_p2p.frame import Frame, Kind

DIGEST_BYTES = 16


class SentHash:
    """BLAKE2b-128 over the streams in order, each of them over its payloads in order: units may come in any order."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int, int], hashlib.blake2b] = {}

    def add(self, frames: Iterable[Frame]) -> None:
        """A report does not count: it holds seconds."""
        for f in frames:
            if f.kind is Kind.DONE:
                continue
            h = self._streams.setdefault((int(f.kind), f.dst, f.value), hashlib.blake2b(digest_size=DIGEST_BYTES))
            h.update(len(f.payload).to_bytes(8, "little"))
            h.update(f.payload)

    def digest(self) -> bytes:
        h = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for stream in sorted(self._streams):
            h.update(repr(stream).encode())
            h.update(self._streams[stream].digest())
        return h.digest()

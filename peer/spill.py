"""Where an outbox puts what it must keep and has no memory for: files beside the blobs, within a part of --disk.

A segment is one file with payloads one after another, in the order of their numbers; it goes with its last payload.
Everything here blocks: call it from a thread.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

PREFIX = ".spill-"


class _Segment:
    def __init__(self, path: Path, size: int, payloads: int, owner: Spill) -> None:
        self.path, self.size, self.left, self.owner = path, size, payloads, owner


class Spilled:
    """A payload on disk."""

    __slots__ = ("_offset", "_segment", "length")

    def __init__(self, segment: _Segment, offset: int, length: int) -> None:
        self._segment, self._offset, self.length = segment, offset, length

    def read(self) -> bytes:
        """OSError if it is not there any more."""
        with self._segment.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(self.length)
        if len(data) != self.length:
            raise OSError(f"{self._segment.path} is truncated: {len(data)} of {self.length} bytes at {self._offset}")
        return data

    def drop(self) -> None:
        """It is not needed any more."""
        self._segment.owner.count_down(self._segment)


class Spill:
    """At most `most_bytes` in files of `folder` whose names begin with PREFIX and `name`; older ones are removed."""

    def __init__(self, folder: Path, name: str, most_bytes: int) -> None:
        self._folder, self._stem, self.most_bytes = folder, f"{PREFIX}{name}-", most_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0
        for path in folder.glob(f"{self._stem}*"):  # of an executor that died
            path.unlink(missing_ok=True)

    def write(self, payloads: Sequence[bytes]) -> list[Spilled] | None:
        """Where each is now; None if there is no room. OSError where the disk is full."""
        size = sum(map(len, payloads))
        with self._lock:
            if self.used_bytes + size > self.most_bytes:
                return None
            self.used_bytes += size
        segment = _Segment(self._folder / f"{self._stem}{secrets.token_hex(8)}", size, len(payloads), self)
        try:
            with open(segment.path, "xb", opener=_private) as file:
                for payload in payloads:
                    file.write(payload)
        except OSError:
            self._remove(segment)
            raise
        out, at = [], 0
        for payload in payloads:
            out.append(Spilled(segment, at, len(payload)))
            at += len(payload)
        return out

    def count_down(self, segment: _Segment) -> None:
        with self._lock:
            segment.left -= 1
            if segment.left:
                return
        self._remove(segment)

    def _remove(self, segment: _Segment) -> None:
        segment.path.unlink(missing_ok=True)
        with self._lock:
            self.used_bytes -= segment.size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

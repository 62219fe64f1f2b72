"""One channel as two pure state machines: what a sender keeps and numbers, what a receiver takes (DESIGN section 2).

Frames on a channel come in an order that does not depend on timing, so (tick, index) numbers them. The receiver's
cursor says what it expects next; after any break the sender goes on from that cursor. A receiver restored at tick S
therefore just opens with (S, 0), and a restored sender produces the same frames again: those that the receiver has
are offered by hash only, so that a difference (other hardware) is noticed without sending the bytes.
No sockets, no clock: `channel_io` moves the bytes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fusion_p2p.frame import Frame, Kind
from peer import wire
from peer.errors import ResumeGap, StaleError, WireError
from peer.wire import Answer, Cursor, Header, Open

Bound = Callable[[int, Kind, int], int]
"""(src stage, kind, value id) -> most payload bytes; raises WireError or FrameError if no such frame is expected."""

MAX_KEPT = 1 << 17  # frames in an outbox, small as they may be
MAX_HASHES = 4096  # 16-byte hashes of accepted frames that a receiver keeps per channel


class Stored(Protocol):
    """A payload that lies on disk."""

    def read(self) -> bytes: ...

    def drop(self) -> None: ...


class Record(NamedTuple):
    """What to put on the stream: a frame, or only its header when `payload` is None (the receiver has it)."""

    header: Header
    payload: bytes | Stored | None


@dataclass(slots=True, eq=False)
class Kept:
    """A frame in an outbox, without its payload; `payload` None: dropped meanwhile."""

    cursor: Cursor
    frame: Frame
    digest: bytes
    length: int
    payload: bytes | Stored | None


class Outbox:
    """The sender's half. Frames are kept until acknowledged and then until `trim`, as long as all that is kept does not
    pass `log_bytes` in memory (0: an edge that is not logged) and `spill_bytes` on disk. What was dropped for want of
    room can no longer be asked for. `spillable` names what should go to disk, `spilled` says that it is there."""

    def __init__(
        self,
        run: bytes,
        src: int,
        dst: int,
        incarnation: int,
        *,
        log_bytes: int,
        start: Cursor,
        spill_bytes: int = 0,
    ) -> None:
        self._run, self.src, self.dst, self.incarnation, self._log_bytes = run, src, dst, incarnation, log_bytes
        self._spill_bytes = self._may_spill = spill_bytes if log_bytes else 0
        self._trimmed = start
        self._kept: deque[Kept] = deque()
        self._next = start  # number of the next frame pushed
        self._base = start  # frames below are gone
        self._acked = start
        self._sent = start  # frames below were put on some stream before
        self._skip_below = start  # the receiver has these
        self._position = 0  # index into _kept of the next record
        self.held_bytes = 0  # in memory and on disk
        self.disk_bytes = 0
        self.unacked_bytes = 0

    @property
    def next(self) -> Cursor:
        return self._next

    @property
    def acked(self) -> Cursor:
        return self._acked

    @property
    def idle(self) -> bool:
        """Whether there is nothing to put on the stream now."""
        return self._position >= len(self._kept)

    def has(self, cursor: Cursor) -> bool:
        """Whether this frame is still kept."""
        return self._base <= cursor < self._next

    def push(self, frame: Frame) -> None:
        """Number the frame and keep it. WireError if its tick lies before the channel's."""
        if frame.src != self.src or frame.dst != self.dst:
            raise WireError(f"frame {frame.src}->{frame.dst} on channel {self.src}->{self.dst}")
        if len(frame.payload) > wire.MAX_PAYLOAD:
            raise WireError(f"frame {self.src}->{self.dst} of {len(frame.payload)} bytes, at most {wire.MAX_PAYLOAD}")
        if frame.tick < self._next.tick:
            raise WireError(f"frame {self.src}->{self.dst} of tick {frame.tick} after tick {self._next.tick}")
        cursor = self._next if frame.tick == self._next.tick else Cursor(frame.tick, 0)
        payload, size = frame.payload, len(frame.payload)
        bare = Frame(frame.kind, frame.src, frame.dst, frame.value, frame.tick, frame.micro_batch, b"")
        self._kept.append(Kept(cursor, bare, wire.digest(payload), size, payload))
        self._next = cursor.after()
        self.held_bytes += size
        if cursor >= self._acked:
            self.unacked_bytes += size

    def resume(self, cursor: Cursor) -> None:
        """The receiver's answer to Open: go on from `cursor`. ResumeGap if frames from there on are gone."""
        if cursor < self._base:
            raise ResumeGap(
                f"stage {self.dst} asks stage {self.src} for frames from tick {cursor.tick} index {cursor.index}; "
                f"kept are those from tick {self._base.tick} index {self._base.index}"
            )
        self._skip_below = cursor
        self._set_acked(cursor)
        first = min(cursor, self._sent)
        self._position = next((i for i, k in enumerate(self._kept) if k.cursor >= first), len(self._kept))
        self._drop()

    def take(self, epoch: int) -> Record | None:
        """The next record for the stream, stamped with the trainer's epoch; None when there is none."""
        if self.idle:
            return None
        kept = self._kept[self._position]
        self._position += 1
        self._sent = max(self._sent, kept.cursor.after())
        f = kept.frame
        header = Header(
            self._run, epoch, self.incarnation, f.kind, f.src, f.dst, f.value, f.tick, f.micro_batch,
            kept.cursor.index, kept.length, kept.digest,
        )  # fmt: skip
        has_it, payload = kept.cursor < self._skip_below, kept.payload
        self._drop()
        return Record(header, None if has_it else payload)

    def ack(self, cursor: Cursor) -> None:
        """The receiver has every frame below `cursor`. WireError if it was never sent."""
        if cursor > max(self._sent, self._skip_below) and cursor.index > 0:
            raise WireError(f"stage {self.dst} acknowledges {cursor}, sent was only up to {self._sent}")
        if cursor > self._acked:
            self._set_acked(cursor)
            self._drop()

    def trim(self, tick: int) -> None:
        """A complete set at `tick` exists: frames of earlier ticks are not asked for again."""
        self._trimmed, self._spill_bytes = max(self._trimmed, Cursor(tick, 0)), self._may_spill
        self._drop()

    def _set_acked(self, cursor: Cursor) -> None:
        self._acked = cursor
        unacked = 0
        for kept in reversed(self._kept):  # of which there are few
            if kept.cursor < cursor:
                break
            unacked += kept.length
        self.unacked_bytes = unacked

    def _drop(self) -> None:
        """Forget what is acknowledged and need not be kept; never what has still to go out or be compared."""
        while self._position > 0 and self._kept[0].cursor < self._acked:
            most = self._log_bytes + self._spill_bytes
            if self._kept[0].cursor >= self._trimmed and self.held_bytes <= most and len(self._kept) <= MAX_KEPT:
                return
            gone = self._kept.popleft()
            self._position -= 1
            self._base = gone.cursor.after()
            self._forget(gone)

    def _forget(self, gone: Kept) -> None:
        self.held_bytes -= gone.length
        if gone.payload is not None and not isinstance(gone.payload, bytes):
            self.disk_bytes -= gone.length
            gone.payload.drop()
        gone.payload = None

    # --- on disk

    @property
    def memory_bytes(self) -> int:
        return self.held_bytes - self.disk_bytes

    @property
    def crowded(self) -> bool:
        """More is in memory than may be, and some of it can go to disk."""
        return bool(self._spill_bytes) and self.memory_bytes > self._log_bytes + self.unacked_bytes

    def spillable(self) -> list[Kept]:
        """The oldest acknowledged frames in memory, a quarter of what may be there, once it is half full."""
        if not self._spill_bytes or self.memory_bytes <= self._log_bytes // 2:
            return []
        out, size = [], 0
        for kept in self._kept:
            if kept.cursor >= self._acked or size >= self._log_bytes // 4:
                break
            if isinstance(kept.payload, bytes) and kept.length:
                out.append(kept)
                size += kept.length
        return out

    def spilled(self, moved: Sequence[Kept], stored: Sequence[Stored]) -> None:
        """These payloads are on disk now."""
        for kept, where in zip(moved, stored, strict=True):
            if kept.payload is None:
                where.drop()
            else:
                kept.payload = where
                self.disk_bytes += kept.length

    def disk_is_full(self) -> None:
        """Until the next set no more is kept than memory may hold: with a frame missing, disk would be of no use."""
        self._spill_bytes = 0
        self._drop()

    def clear(self) -> None:
        """The channel is over."""
        while self._kept:
            self._forget(self._kept.popleft())
        self._position = 0


class Take(enum.Enum):
    """What to do with the frame whose header has come."""

    NEW = enum.auto()
    HAVE = enum.auto()  # a duplicate: read its payload off the stream and drop it


class Inbox:
    """The receiver's half: fencing, the cursor, the bound on each frame, hashes of what was accepted."""

    def __init__(self, run: bytes, src: int, dst: int, incarnation: int, *, bound: Bound, start: Cursor) -> None:
        self._run, self.src, self.dst, self.incarnation, self._bound = run, src, dst, incarnation, bound
        self.cursor = start
        self.epoch = 0
        self.src_incarnation = 0
        self._hashes: dict[Cursor, bytes] = {}
        self.differing = 0  # frames that were sent again and were not the same bytes

    def open(self, message: Open, *, expected_incarnation: int | None, epoch: int) -> Answer:
        """Answer an Open. `expected_incarnation` and `epoch` are the plan's; None: the plan names no such stage yet."""
        if message.run != self._run:
            return self._refuse("unknown", f"run {message.run.hex()} is not {self._run.hex()}")
        if message.dst != self.dst or message.src != self.src:
            return self._refuse("unknown", f"channel {message.src}->{message.dst} is not {self.src}->{self.dst}")
        least_epoch = max(self.epoch, epoch)
        if message.epoch < least_epoch:
            return self._refuse("stale", f"trainer epoch {message.epoch} is below {least_epoch}")
        least = max(self.src_incarnation, -1 if expected_incarnation is None else expected_incarnation)
        if message.src_incarnation < least:
            return self._refuse("stale", f"stage {self.src} incarnation {message.src_incarnation} is below {least}")
        if expected_incarnation is None or message.src_incarnation > expected_incarnation or message.epoch > epoch:
            return self._refuse("not-yet", f"stage {self.dst} has not been told of this host of stage {self.src}")
        if message.dst_incarnation != self.incarnation:
            code = "stale" if message.dst_incarnation > self.incarnation else "not-yet"
            return self._refuse(code, f"stage {self.dst} is incarnation {self.incarnation} here")
        self.epoch, self.src_incarnation = message.epoch, message.src_incarnation
        return Answer(self.cursor)

    def _refuse(self, code: str, reason: str) -> Answer:
        return Answer(Cursor(), code, reason)

    def header(self, h: Header) -> Take:
        """Check a header before anything is allocated. StaleError or WireError end the stream."""
        if h.run != self._run or h.src != self.src or h.dst != self.dst:
            raise WireError(f"frame {h.src}->{h.dst} of run {h.run.hex()} on channel {self.src}->{self.dst}")
        if h.epoch != self.epoch or h.incarnation != self.src_incarnation:
            raise StaleError(
                f"frame of epoch {h.epoch}, stage {h.src} incarnation {h.incarnation}; "
                f"in force are {self.epoch} and {self.src_incarnation}"
            )
        most = self._bound(h.src, h.kind, h.value)
        if h.length > most:
            raise WireError(f"{h.kind.name} {h.src}->{h.dst} of value {h.value}: {h.length} bytes, at most {most}")
        if h.cursor < self.cursor:
            return Take.HAVE
        if h.cursor != self.cursor and not (h.tick > self.cursor.tick and h.index == 0):
            raise WireError(f"frame {h.cursor} of {h.src}->{h.dst} where {self.cursor} was expected")
        return Take.NEW

    def accept(self, h: Header, payload: bytes) -> Frame | None:
        """The frame of a header that `header` let pass, its payload verified; None for a duplicate."""
        frame = h.frame(payload)
        if h.cursor < self.cursor:
            self.compare(h)
            return None
        self.cursor = h.cursor.after()
        if len(self._hashes) >= MAX_HASHES:
            del self._hashes[next(iter(self._hashes))]
        self._hashes[h.cursor] = h.digest
        if h.kind is Kind.DONE:  # a stage's last frame to the trainer in a tick
            self.advance(h.tick + 1)
        return frame

    def compare(self, h: Header) -> None:
        """A frame offered again is kept out; if it is not what was accepted, that is counted."""
        if h.kind is not Kind.DONE and self._hashes.get(h.cursor, h.digest) != h.digest:  # a report holds seconds
            self.differing += 1

    def advance(self, tick: int) -> None:
        """Every frame of the ticks before `tick` has come."""
        self.cursor = max(self.cursor, Cursor(tick, 0))

    def trim(self, tick: int) -> None:
        """Forget the hashes of the ticks before `tick`."""
        for cursor in [c for c in self._hashes if c.tick < tick]:
            del self._hashes[cursor]

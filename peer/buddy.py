"""What a volunteer keeps of other volunteers' stages: their newest snapshots, as the trainer asks (DESIGN section 2).

Bytes come from whoever holds them and are verified before they count; they go again with the next complete set.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dht.transport import Transport
from peer.blobs import BlobStore, fetch_blob
from peer.channel_io import ChannelSettings
from peer.errors import BlobError, RefusedError
from peer.policy import check_state
from peer.protocol import Keep, Kept

log = logging.getLogger(__name__)

DISK_SHARE = 0.25  # of the disk that would be free without them, for all of them together
SETS_KEPT = 2
MAX_STAGES = 64


class _Held(msgspec.Struct, frozen=True):
    blob: str
    size: int
    readers: frozenset[str]


class Buddy:
    """`keep` fetches; the rest says what is here. One loop."""

    def __init__(self, transport: Transport, store: BlobStore, folder: Path, settings: ChannelSettings) -> None:
        self._transport, self._store, self._folder, self._settings = transport, store, folder, settings
        self._held: dict[tuple[str, int], dict[int, _Held]] = {}
        self._recent: dict[str, deque[int]] = {}  # run -> ticks of the sets that were heard of last
        self._coming = 0  # bytes that are being fetched
        self.others_want: Callable[[str], bool] = lambda blob: False  # a stage that is hosted here has the same bytes

    async def keep(self, message: Keep, trainer: str) -> Kept:
        """Fetch and keep the snapshot; `Kept.reason` says why it is not kept."""
        key, ref = (message.run, message.stage), message.state
        answer = Kept(run=message.run, stage=message.stage, tick=message.tick)
        kept = self._coming + sum(held.size for _, held in self._all())
        room = int(DISK_SHARE * (shutil.disk_usage(self._folder).free + kept)) - kept
        if key not in self._held and len(self._held) >= MAX_STAGES:
            return msgspec.structs.replace(answer, reason=f"{MAX_STAGES} stages are kept here already")
        if ref.size > room:
            return msgspec.structs.replace(answer, reason=f"no room for {ref.size} bytes, {max(0, room)} may be taken")
        self._coming += ref.size
        try:
            check_state(ref)
            await fetch_blob(
                self._transport, self._store, message.run, ref, max_bytes=room, settings=self._settings
            )  # fmt: skip
        except (BlobError, RefusedError, OSError) as error:
            return msgspec.structs.replace(answer, reason=str(error)[:200])
        finally:
            self._coming -= ref.size
        held = _Held(ref.hash, ref.size, frozenset({*message.readers, trainer}))
        before = self._held.setdefault(key, {}).pop(message.tick, None)
        self._held[key][message.tick] = held
        if before is not None and before.blob != held.blob:
            self._discard(before.blob)
        self.complete(message.run, message.tick)
        return answer

    def complete(self, run: str, tick: int) -> None:
        """There is a complete set of `run` at `tick`: of older ones only the newest is kept, of whatever stage. Not the
        largest ticks count but those heard of last: a run may go back."""
        recent = self._recent.setdefault(run, deque(maxlen=SETS_KEPT))
        if tick in recent:
            recent.remove(tick)
        recent.append(tick)
        for key in [key for key in self._held if key[0] == run]:
            ticks = self._held[key]
            for old in [t for t in ticks if t not in recent]:
                self._discard(ticks.pop(old).blob)
            if not ticks:
                del self._held[key]

    def wants(self, blob: str) -> bool:
        """Whether the bytes are kept for somebody."""
        return any(held.blob == blob for _, held in self._all())

    def keeps_for(self, run: str) -> bool:
        return any(r == run for r, _ in self._all())

    def may_fetch(self, peer: str, run: str, blob: str) -> bool:
        return any(r == run and held.blob == blob and peer in held.readers for r, held in self._all())

    def drop_run(self, run: str) -> None:
        self._recent.pop(run, None)
        for key in [k for k in self._held if k[0] == run]:
            for held in self._held.pop(key).values():
                self._discard(held.blob)

    def _all(self) -> Iterator[tuple[str, _Held]]:
        return ((run, held) for (run, _), ticks in self._held.items() for held in ticks.values())

    def _discard(self, blob: str) -> None:
        if not self.wants(blob) and not self.others_want(blob):
            self._store.delete(blob)

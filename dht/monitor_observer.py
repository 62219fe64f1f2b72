"""The observer: reads the board every few seconds and says what the swarm looks like and what changed.

One refresh costs O(fences + runs) look-ups, however many peers there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from dht import p2p
from dht.clock import SwarmClock
from dht.errors import DhtError
from dht.fence_records import FenceView
from dht.monitor_events import changes
from dht.monitor_views import (
    SILENT_S,
    EventInfo,
    PeerInfo,
    Picture,
    RunInfo,
    fence_info,
    peer_info,
    run_hosts,
    run_info,
    with_traffic,
)
from dht.node import Board
from dht.receipts import Counted, Receipt, counted
from dht.records import PeerRecord, RunRecord
from dht.runs import RunView

log = logging.getLogger("dht.monitor")

EVERY_S = 5.0
MAX_DETAILED = 64  # newest runs read with their parts
KEEP_S = 600.0  # how long what is gone stays in the picture, as gone
RECEIPTS_EVERY = 4  # refreshes
_READ_S = 15.0


class Reader(Protocol):
    """What the observer needs of a `Board`."""

    clock: SwarmClock

    @property
    def refused(self) -> int: ...
    async def peers(self, *, timeout_s: float) -> tuple[PeerRecord, ...]: ...
    async def fences(self, *, timeout_s: float) -> tuple[FenceView, ...]: ...
    async def runs(self, *, timeout_s: float) -> tuple[RunRecord, ...]: ...
    async def view(self, head: RunRecord, *, timeout_s: float) -> RunView: ...
    async def receipts(self, run: str, *, timeout_s: float) -> tuple[Receipt, ...]: ...


@dataclass(frozen=True, slots=True)
class Sight:
    """One refresh: the picture, what changed since the last, receipts that count."""

    picture: Picture
    events: list[EventInfo]
    credits: list[Counted]


@dataclass(slots=True)
class Observer:
    """`pictures` refreshes for ever; `look` once."""

    board: Reader
    every_s: float = EVERY_S
    _last: Picture | None = None
    _records: dict[str, PeerRecord] = field(default_factory=dict)
    _missed: dict[str, int] = field(default_factory=dict)
    _looks: int = 0

    async def pictures(self) -> AsyncIterator[Sight]:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.every_s
            yield await self.look()
            await asyncio.sleep(max(0.2, due - loop.time()))

    async def look(self) -> Sight:
        """A board that does not answer gives the last picture again, with `error`."""
        before = self._last
        try:
            picture, receipts = await self._read()
        except DhtError as error:
            log.warning("%s", error)
            now = self.board.clock.now()
            old = before or Picture(time=now, peers=(), fences=(), runs=())
            return Sight(msgspec.structs.replace(old, time=now, error=str(error)), [], [])
        self._last = picture
        self._looks += 1
        return Sight(picture, changes(before, picture) if before else [], self._counted(picture, receipts))

    async def _read(self) -> tuple[Picture, list[Receipt]]:
        board = self.board
        peers, fences, heads = await asyncio.gather(
            board.peers(timeout_s=_READ_S), board.fences(timeout_s=_READ_S), board.runs(timeout_s=_READ_S)
        )
        views = [RunView(run=head) for head in heads[MAX_DETAILED:]]
        views = [*await asyncio.gather(*(board.view(h, timeout_s=_READ_S) for h in heads[:MAX_DETAILED])), *views]
        receipts: list[Receipt] = []
        if self._looks % RECEIPTS_EVERY == 1:
            live = [h.run for h in heads[:MAX_DETAILED] if h.state == "training"]
            found = await asyncio.gather(*(board.receipts(run, timeout_s=_READ_S) for run in live))
            receipts = [r for some in found for r in some]
        now = board.clock.now()
        self._records = {p.peer: p for p in peers}
        by_id = {v.run.run: v for v in views}
        leaders = {f.leader for f in fences}
        infos = [peer_info(p, now, by_id, p.peer in leaders) for p in peers]
        flops = {p.peer: f for p in infos if p.state == "free" for d in p.devices[:1] if (f := d.flops_per_s)}
        hosting = {s.peer for v in views for s in v.stages}
        flops |= {p.peer: f for p in infos if p.peer in hosting for d in p.devices[:1] if (f := d.flops_per_s)}
        runs = self._with_gone_runs(_unique_names([run_info(v, now, flops) for v in views]), now)
        picture = Picture(
            time=round(now, 2), peers=with_traffic(self._with_gone_peers(infos, now), runs),
            fences=tuple(fence_info(f, now) for f in fences), runs=runs, refused=board.refused,
        )  # fmt: skip
        return picture, receipts

    def _with_gone_peers(self, infos: list[PeerInfo], now: float) -> list[PeerInfo]:
        """Peers that were there and are not: silent when two refreshes are missing, left if they vanished sooner."""
        present = {p.peer for p in infos}
        out = list(infos)
        for p in self._last.peers if self._last else ():
            if p.peer in present or now - p.published > KEEP_S:
                self._missed.pop(p.peer, None)
                continue
            self._missed[p.peer] = missed = self._missed.get(p.peer, 0) + 1
            if p.state not in ("silent", "left"):
                if now - p.published > SILENT_S:
                    p = msgspec.structs.replace(p, state="silent")
                elif missed >= 2:  # a record that lives and is not read twice was withdrawn
                    p = msgspec.structs.replace(p, state="left")
            out.append(msgspec.structs.replace(p, leads=False))
        return sorted(out, key=lambda p: p.peer)

    def _with_gone_runs(self, runs: list[RunInfo], now: float) -> tuple[RunInfo, ...]:
        present = {r.run for r in runs}
        for r in self._last.runs if self._last else ():
            if r.run not in present and now - r.published < KEEP_S:
                unfinished = r.state in ("training", "waiting") and now - r.published > SILENT_S
                runs.append(msgspec.structs.replace(r, state="silent", since=r.published) if unfinished else r)
        return tuple(sorted(runs, key=lambda r: (-r.created, r.run)))

    def _counted(self, picture: Picture, receipts: list[Receipt]) -> list[Counted]:
        out: list[Counted] = []
        for run in picture.runs if receipts else ():
            good, _ = counted([r for r in receipts if r.run == run.run], run_hosts(run, self._records))
            out += good
        return out


def _unique_names(runs: list[RunInfo]) -> list[RunInfo]:
    """Names are free to choose: runs of different owners that share one say so."""
    owners: dict[str, set[str]] = {}
    for r in runs:
        owners.setdefault(r.name, set()).add(r.owner)
    text = "another owner's run has this name too"
    return [msgspec.structs.replace(r, warnings=(*r.warnings, text)) if len(owners[r.name]) > 1 else r for r in runs]


@contextlib.asynccontextmanager
async def reading_board(swarm: tuple[str, ...]) -> AsyncIterator[Board]:
    """A board that only reads, under a throw-away identity. SwarmUnreachable, TransportError."""
    with tempfile.TemporaryDirectory(prefix="fusion-monitor-") as folder:
        transport = await p2p.start(Path(folder) / "identity", host_addresses=(), bootstrap=swarm, client_only=True)
        try:
            board = await Board.start(transport, client_only=True)
            try:
                yield board
            finally:
                await board.close()
        finally:
            await transport.close()

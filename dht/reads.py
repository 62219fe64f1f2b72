"""The reading half of `Board`: what other tools are built on. Each read is a few look-ups with one deadline."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from dht import fence_records, records
from dht.clock import SwarmClock
from dht.errors import InputError, RecordError, TransportError
from dht.fence_records import FenceHead, FenceRecord, FenceView, LedLately, LinksRecord
from dht.receipts import Receipt, receipts_key
from dht.records import PeerRecord, RunPart, RunRecord
from dht.runs import RunView, join_run
from dht.storing import Replicas, dht_id

READ_TIMEOUT_S = 15.0


class BoardReads:
    """`_node`: a hivemind DHTNode, set by `Board`."""

    _node: Any
    _replicas: Replicas
    _client_only: bool
    _fences: LedLately
    clock: SwarmClock
    lookups = 0  # keys read so far

    async def peers(self, *, fence: str | None = None, timeout_s: float = READ_TIMEOUT_S) -> tuple[PeerRecord, ...]:
        """Peers that are on the swarm now, by peer id; of one fence only if `fence` names it (NO_FENCE: of none).

        Four look-ups a fence. TransportError if the board does not answer.
        """
        fences = (fence,) if fence is not None else (records.NO_FENCE, *await self._fence_ids(timeout_s))
        found = await self._read(tuple(k for f in fences for k in records.fence_keys(f)), PeerRecord, timeout_s)
        newest: dict[str, PeerRecord] = {}
        for p in found:  # a peer that changed fence is at both places for a while
            if p.peer not in newest or p.published > newest[p.peer].published:
                newest[p.peer] = p
        return tuple(sorted((p for p in newest.values() if p.state != "left"), key=lambda p: p.peer))

    async def fences(self, *, timeout_s: float = READ_TIMEOUT_S) -> tuple[FenceView, ...]:
        """Every fence with a leader whose lease runs, largest first: one look-up a fence, and those of the index."""
        keys = tuple(map(fence_records.leader_key, await self._fence_ids(timeout_s)))
        found = await self._read(keys, FenceRecord, timeout_s) if keys else []
        now = self.clock.now()
        views = [fence_records.view(r, now) for r in fence_records.leads(found, now).values() if not r.resigned_to]
        return tuple(sorted(views, key=lambda v: (-v.members, v.id)))

    async def links(self, *, fence: str | None = None, timeout_s: float = READ_TIMEOUT_S) -> tuple[LinksRecord, ...]:
        """What the peers of `fence` (of all) measured; see `dht.linkbook` for a view that fills the gaps."""
        fences = (fence,) if fence is not None else (records.NO_FENCE, *await self._fence_ids(timeout_s))
        found = await self._read(tuple(k for f in fences for k in records.links_keys(f)), LinksRecord, timeout_s)
        newest: dict[str, LinksRecord] = {}
        for r in found:
            if r.peer not in newest or r.published > newest[r.peer].published:
                newest[r.peer] = r
        return tuple(newest[peer] for peer in sorted(newest))

    async def fence_heads(self, *, timeout_s: float = READ_TIMEOUT_S) -> tuple[FenceHead, ...]:
        """The index of fences: leaders whose lease runs; what a newcomer reads every round."""
        found = await self._read_near(fence_records.index_keys(), FenceHead, timeout_s)
        return tuple(fence_records.leads(found, self.clock.now()).values())

    async def leader(self, fence: str, *, timeout_s: float = READ_TIMEOUT_S) -> tuple[FenceRecord, ...]:
        """Every leader's record of one fence, the lapsed ones too; `fence_records.leads` says which counts."""
        return tuple(await self._read_near((fence_records.leader_key(fence),), FenceRecord, timeout_s))

    async def _fence_ids(self, timeout_s: float) -> list[str]:
        """Fences with a leader, and those that had one just now: their members are there, though the index is silent
        until one of them stands."""
        found = await self._read(fence_records.index_keys(), FenceHead, timeout_s)
        now = self.clock.now()
        return self._fences.see(fence_records.leads(found, now), now)

    async def runs(self, *, timeout_s: float = READ_TIMEOUT_S) -> tuple[RunRecord, ...]:
        """Every run on the board, newest first."""
        found = await self._read(records.runs_keys(), RunRecord, timeout_s)
        return tuple(sorted(found, key=lambda r: (-r.created, r.run)))

    async def run(self, run: str, *, timeout_s: float = READ_TIMEOUT_S) -> RunView | None:
        """One run with its parts, None if it is not on the board. `run` may be a unique prefix of the id, or the name.

        InputError if several runs fit.
        """
        fits = [r for r in await self.runs(timeout_s=timeout_s) if r.run.startswith(run) or r.name == run]
        if len(fits) > 1:
            raise InputError(f"{run!r} fits several runs ({', '.join(r.run[:12] for r in fits)}); give more of the id")
        return await self.view(fits[0], timeout_s=timeout_s) if fits else None

    async def view(self, head: RunRecord, *, timeout_s: float = READ_TIMEOUT_S) -> RunView:
        """The parts of a run that `runs` has named: one look-up."""
        parts = await self._read((records.run_key(head.run),), RunPart, timeout_s)
        return join_run(head, [part for part in parts if part.owner == head.owner])

    async def receipts(self, run: str, *, timeout_s: float = READ_TIMEOUT_S) -> tuple[Receipt, ...]:
        """What the hosts of a run counted of each other's work (see `dht.receipts`): one look-up."""
        return tuple(await self._read((receipts_key(run),), Receipt, timeout_s))

    @property
    def refused(self) -> int:
        """Records refused so far, of all that others sent to this board."""
        return int(self._node.protocol.record_validator.rules.refused.total())

    async def _read(self, keys: tuple[str, ...], kind: Any, timeout_s: float) -> list[Any]:
        self.lookups += len(keys)
        try:
            ids = {dht_id(key): key for key in keys}
            async with asyncio.timeout(timeout_s):
                # An infinite sufficient expiration is `latest=True`: every replica near the key is asked and merged.
                found = await self._node.get_many_by_id(list(ids), sufficient_expiration_time=float("inf"))
        except TimeoutError as error:
            raise TransportError(f"the board has not answered in {timeout_s:g} s for {', '.join(keys)}") from error
        entries = [
            (ids[key], subkey, value, expiration)
            for key, item in found.items()
            if item is not None and isinstance(item.value, dict)
            for subkey, (value, expiration) in item.value.items()
        ]
        return self._believed(entries, kind)

    async def _read_near(self, keys: tuple[str, ...], kind: Any, timeout_s: float) -> list[Any]:
        """As `_read`, from the replicas remembered: what is read every round costs no search."""
        try:
            async with asyncio.timeout(timeout_s):
                entries = await self._replicas.read(self._node, keys, keep_here=not self._client_only)
        except TimeoutError as error:
            raise TransportError(f"the board has not answered in {timeout_s:g} s for {', '.join(keys)}") from error
        return self._believed(entries, kind)

    def _believed(self, entries: list[tuple[str, Any, bytes, float]], kind: Any) -> list[Any]:
        out, now = [], self.clock.now()
        for key, subkey, value, expiration in entries:
            with contextlib.suppress(RecordError):  # expired since, mostly; the validator has seen it
                record = records.unseal(records.key_id(key), subkey, value, expiration, now=now)
                if isinstance(record, kind):
                    out.append(record)
        return out

    async def members(
        self, fence: str, shards: tuple[int, ...], *, timeout_s: float = READ_TIMEOUT_S
    ) -> tuple[list[PeerRecord], list[LinksRecord]]:
        """Heartbeats and links in these shards of a fence, for its leader."""
        keys = [records.fence_keys(fence)[shard] for shard in shards]
        keys += [records.links_keys(fence)[shard] for shard in shards]
        found = await self._read_near(tuple(keys), (PeerRecord, LinksRecord), timeout_s)
        return [r for r in found if isinstance(r, PeerRecord)], [r for r in found if isinstance(r, LinksRecord)]

"""Storing and reading records at the peers nearest to their keys, which are looked up now and then only.

hivemind looks them up at each store, and every peer asked answers with the whole dictionary under the key: at a
thousand peers that is most of all traffic. Here the look-up asks for the key's neighbour in the id space (last bit
flipped: the same peers are nearest, and nothing is stored there), and its result is used for FIRST_S, then each time
twice as long while it stays the same, up to LOOKUP_S. Keys of one home (`records.home_key`) share look-ups and calls.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dht import records
from dht._guards import records_only
from dht._hivemind import node_parts

REPLICAS = 5
COMPARED = 3
_ENOUGH = 3  # fewer answers than this: look again, peers have left
FIRST_S, LOOKUP_S = 15.0, 480.0

Place = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class _Nearest:
    peers: tuple[Any, ...]  # hivemind PeerIDs
    here: bool  # this node is one of them
    life_s: float
    until: float


class Replicas:
    """Remembers who is nearest to the keys that this peer stores at."""

    def __init__(self) -> None:
        self._known: dict[str, _Nearest] = {}

    def forget(self) -> None:
        self._known.clear()

    async def store(
        self, node: Any, sealed: Mapping[Place, bytes], expiration: float, *, keep_here: bool
    ) -> frozenset[Place]:
        """Places of `sealed` (values signed for `expiration`) stored at one replica at least. `keep_here`: this node
        may be one."""
        by_key: dict[str, list[Place]] = defaultdict(list)
        for place in sealed:
            by_key[records.home_key(place[0])].append(place)
        for key in [k for k, known in self._known.items() if known.until + LOOKUP_S < _now()]:
            del self._known[key]
        done = await asyncio.gather(
            *(self._store_key(node, key, places, sealed, expiration, keep_here) for key, places in by_key.items())
        )
        return frozenset().union(*done)

    async def read(self, node: Any, keys: tuple[str, ...], *, keep_here: bool) -> list[tuple[str, Any, bytes, float]]:
        """(key, subkey, value, expiration) as COMPARED replicas of each key say, for what is read every round; the
        validator has seen them. A replica that leaves something out hides it from nobody while another has it."""
        homes: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            homes[records.home_key(key)].append(key)
        found = await asyncio.gather(*(self._read_home(node, home, of, keep_here) for home, of in homes.items()))
        return [entry for entries in found for entry in entries]

    async def _read_home(
        self, node: Any, home: str, keys: list[str], keep: bool
    ) -> list[tuple[str, Any, bytes, float]]:
        known = self._known.get(home)
        fresh = known is None or known.until <= _now()
        nearest = known if known is not None and not fresh else await self._look_up(node, home, keep)
        items, answers = await self._ask(node, nearest, keys)
        if answers < min(2, len(nearest.peers)) and not fresh:  # they have left: look again
            items, answers = await self._ask(node, await self._look_up(node, home, keep), keys)
        if answers < min(2, len(nearest.peers)):
            self._known.pop(home, None)
        protocol = node.protocol
        merged: dict[tuple[str, Any], tuple[bytes, float]] = {}
        for key, item in items:
            if item is None or not isinstance(item.value, node_parts().DictionaryDHTValue):
                continue
            for subkey, (value, expiration) in item.value.items():
                place = key, subkey
                if place not in merged or merged[place][1] < expiration:
                    merged[place] = protocol.serializer.loads(value), expiration
        return [(key, subkey, value, expiration) for (key, subkey), (value, expiration) in merged.items()]

    @staticmethod
    async def _ask(node: Any, nearest: _Nearest, keys: list[str]) -> tuple[list[tuple[str, Any]], int]:
        """(key and what some of the nearest, and this node if it is one, hold there; how many peers answered)."""
        ids = {dht_id(key): key for key in keys}
        asked = random.sample(nearest.peers, min(COMPARED, len(nearest.peers)))
        with records_only():
            answers = await asyncio.gather(*(node.protocol.call_find(peer, list(ids)) for peer in asked))
        items = [(ids[i], found[0]) for answer in answers if answer for i, found in answer.items() if i in ids]
        if nearest.here:
            items += [(key, node.protocol.storage.get(i)) for i, key in ids.items()]
        return items, sum(answer is not None for answer in answers)

    async def _store_key(
        self, node: Any, key: str, places: list[Place], sealed: Mapping[Place, bytes], expiration: float, keep: bool
    ) -> frozenset[Place]:
        known = self._known.get(key)
        fresh = known is None or known.until <= _now()
        nearest = known if known is not None and not fresh else await self._look_up(node, key, keep)
        stored, answers = await self._store_at(node, nearest, places, sealed, expiration)
        if answers < min(_ENOUGH, len(nearest.peers)):
            self._known.pop(key, None)
            if not fresh:
                nearest = await self._look_up(node, key, keep)
                again, _ = await self._store_at(node, nearest, places, sealed, expiration)
                stored |= again
        return stored

    async def _look_up(self, node: Any, key: str, keep: bool) -> _Nearest:
        parts = node_parts()
        beside = parts.DHTID(dht_id(key) ^ 1)
        found = await node.find_nearest_nodes([beside], k_nearest=REPLICAS, exclude_self=not keep)
        nodes = found[beside]
        peers = tuple(peer for node_id, peer in nodes.items() if node_id != node.node_id)
        last, life_s = self._known.get(key), FIRST_S
        if last is not None and (set(last.peers), last.here) == (set(peers), node.node_id in nodes):
            life_s = min(LOOKUP_S, 2 * last.life_s)
        if len(nodes) < REPLICAS:  # in a swarm of a few peers each newcomer is one of the nearest
            life_s = 0.0
        nearest = self._known[key] = _Nearest(peers, node.node_id in nodes, life_s, _now() + life_s)
        return nearest

    @staticmethod
    async def _store_at(
        node: Any, nearest: _Nearest, places: list[Place], sealed: Mapping[Place, bytes], expiration: float
    ) -> tuple[frozenset[Place], int]:
        """(what was stored, how many peers answered)."""
        protocol = node.protocol
        ids = [dht_id(place[0]) for place in places]
        values = [protocol.serializer.dumps(sealed[place]) for place in places]
        subkeys = [place[1] for place in places]
        stored = set()
        if nearest.here:
            for place, key_id, value in zip(places, ids, values, strict=True):
                if protocol.storage.store_subkey(key_id, place[1], value, expiration):
                    stored.add(place)
        results = await asyncio.gather(
            *(protocol.call_store(peer, ids, values, [expiration] * len(places), subkeys) for peer in nearest.peers)
        )
        for result in results:
            stored |= {place for place, ok in zip(places, result or (), strict=False) if ok}
        return frozenset(stored), sum(result is not None for result in results)


def dht_id(key: str) -> Any:
    """The DHT's id of the key `key` (not hivemind's hash of it: keys of one home lie side by side)."""
    return node_parts().DHTID(int.from_bytes(records.key_id(key), "big"))


def _now() -> float:
    return asyncio.get_running_loop().time()

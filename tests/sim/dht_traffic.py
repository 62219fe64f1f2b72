"""What the board costs in bytes: hivemind's own search over its own routing tables, in memory, with real messages.

CALL_BYTES a call and PING_BYTES a ping are what p2pd adds: stream negotiation, yamux, Noise, TCP, Ethernet, both ways,
as counted at the interface of a network namespace (a row of `python -m tests.bench.swarm`).
"""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import dataclass
from typing import Any

from dht import records
from dht._hivemind import node_parts
from dht.fence_records import MAX_LINKS, Beat, FenceHead, FenceLink, FenceRecord, LinkFigure, LinksRecord, LinkSummary
from dht.identity import Identity, peer_id_bytes, public_key_of
from dht.node import AROUND_S
from dht.records import Record, Signer
from dht.storing import COMPARED, LOOKUP_S, REPLICAS
from tests.dht_samples import NOW, peer_record

CALL_BYTES = 1150
PING_BYTES = 2000  # two pings on one stream, with the beats
BUCKET = 20


@functools.cache
def record_bytes(kind: str, fences: int = 12) -> int:
    """Of a typical sealed record of this kind."""
    one, two = Identity.from_seed(bytes(31) + b"\1"), Identity.from_seed(bytes(31) + b"\2")
    fence, point = "0123456789abcdef", (103.21, -88.43, 2.11)
    summary = LinkSummary(1_000_000, 850, 512, 3.25)
    figure = LinkFigure(public_key_of(two.peer_id), 1250, 940_000, 880_000, 120, False, b"12345678")
    links = (figure,) * MAX_LINKS
    address = f"/ip4/203.0.113.7/tcp/31330/p2p/{one.peer_id}"
    lead: dict[str, Any] = {
        "fence": fence,
        "leader": one.peer_id,
        "term": 3,
        "score": 4,
        "members": 83,
        "published": NOW,
    }
    made: dict[str, Record] = {
        "PeerRecord": peer_record(
            one, fence=fence, leader=two.peer_id, term=3, published=NOW, addresses=(address,)
        ),
        "LinksRecord": LinksRecord(
            peer=one.peer_id, fence=fence, links=links, coordinate=point, error=0.2, published=NOW
        ),
        "FenceRecord": FenceRecord(
            **lead, inside=summary, outside=(FenceLink(fence, summary),) * min(12, fences), spares=(two.peer_id,) * 8,
        ),
        "FenceHead": FenceHead(**lead, coordinate=point),
    }  # fmt: skip
    return len(records.seal(made[kind], Signer(one), expiration=NOW + 45)) + 38 + 20


def beat_bytes() -> int:
    import msgspec

    peer = Identity.from_seed(bytes(31) + b"\1").peer_id
    return len(msgspec.msgpack.encode(Beat(fence="0" * 16, leader=peer, term=3, score=4, members=83, near=(peer,) * 4)))


@dataclass(frozen=True)
class Search:
    """Means over many searches: requests, and bytes of requests and answers together."""

    requests: float
    bytes: float


def search_cost(nodes: int, samples: int = 40, seed: int = 0) -> Search:
    """One search for the nodes nearest to a key, in a swarm of `nodes` whose routing tables are full."""
    parts = node_parts()
    from hivemind.dht.routing import RoutingTable
    from hivemind.dht.traverse import traverse_dht

    rng = random.Random(seed)
    ids = [parts.DHTID(rng.getrandbits(160)) for _ in range(nodes)]
    peer_ids = {
        n: parts.PeerID(peer_id_bytes(Identity.from_seed(int(n).to_bytes(32, "big")).peer_id)) for n in ids[:64]
    }
    any_peer = next(iter(peer_ids.values()))
    tables: dict[Any, Any] = {}

    def table(node: Any) -> Any:
        if node not in tables:
            t = tables[node] = RoutingTable(node, BUCKET, 5)
            for other in rng.sample(ids, min(nodes, 400)) + sorted(ids, key=node.xor_distance)[1:41]:
                if other != node and other not in t:
                    t.add_or_update_node(other, any_peer)
        return tables[node]

    calls = 0

    async def one(query: Any, origin: Any) -> None:
        async def neighbours(node: Any, queries: Any) -> Any:
            nonlocal calls
            calls += 1
            found = table(node).get_nearest_neighbors(query, BUCKET, exclude=origin)
            return {q: (tuple(n for n, _ in found), False) for q in queries}

        start = [n for n, _ in table(origin).get_nearest_neighbors(query, BUCKET)]
        await traverse_dht(
            [query], initial_nodes=start, beam_size=BUCKET, num_workers=4, queries_per_call=1,
            get_neighbors=neighbours, visited_nodes={query: {origin}},
        )  # fmt: skip

    async def all_of_them() -> None:
        for _ in range(samples):
            await one(parts.DHTID(rng.getrandbits(160)), rng.choice(ids))

    asyncio.run(all_of_them())
    per_call = find_bytes(0)
    return Search(calls / samples, calls / samples * per_call)


def find_bytes(value_bytes: int, *, neighbours: int = BUCKET) -> int:
    """A FindRequest and its answer with `neighbours` and `value_bytes` of records."""
    pb = node_parts().dht_pb2
    info = pb.NodeInfo(node_id=bytes(20))
    request = pb.FindRequest(keys=[bytes(20)], peer=info)
    result = pb.FindResult(
        type=pb.FOUND_DICTIONARY, value=bytes(value_bytes), expiration_time=NOW,
        nearest_node_ids=[bytes(20)] * neighbours, nearest_peer_ids=[bytes(38)] * neighbours,
    )  # fmt: skip
    return int(request.ByteSize() + pb.FindResponse(results=[result], peer=info).ByteSize()) + CALL_BYTES


def store_bytes(*sealed: int) -> int:
    """A StoreRequest with records of these sizes, and its answer."""
    pb = node_parts().dht_pb2
    info, count = pb.NodeInfo(node_id=bytes(20)), len(sealed)
    request = pb.StoreRequest(
        keys=[bytes(20)] * count,
        subkeys=[bytes(40)] * count,
        values=[bytes(size) for size in sealed],
        expiration_time=[NOW] * count,
        in_cache=[False] * count,
        peer=info,
    )
    return int(request.ByteSize() + pb.StoreResponse(store_ok=[True] * count, peer=info).ByteSize()) + CALL_BYTES


@dataclass
class Tally:
    """What one peer's round does, summed over a world: filled by `tests.sim.fence_world.World.watch`."""

    counts: dict[str, int]

    def bytes(self, search: Search, members: float, seconds: float, peers: int) -> dict[str, float]:
        """Per kind, sent by all peers in all; each byte sent is one received."""
        out: dict[str, float] = {}
        both = store_bytes(record_bytes("PeerRecord"), record_bytes("LinksRecord"))  # one call: `records.home_key`
        out["store heartbeat and links"] = self.counts.get("PeerRecord", 0) * REPLICAS * both
        for kind in ("FenceRecord", "FenceHead"):
            out[f"store {kind}"] = self.counts.get(kind, 0) * REPLICAS * store_bytes(record_bytes(kind))
        read = self.counts.get("read leader", 0) * COMPARED
        out["read leader"] = read * find_bytes(record_bytes("FenceRecord"), neighbours=0)
        heads = find_bytes(int(record_bytes("FenceHead") * peers / members / 4), neighbours=0)
        out["read index"] = self.counts.get("read index", 0) * COMPARED * heads
        shard = members / 4 * (record_bytes("PeerRecord") + record_bytes("LinksRecord"))
        shards = self.counts.get("read shard", 0) * COMPARED
        out["read members"] = shards * (find_bytes(0, neighbours=0) + shard)
        out["pings"] = self.counts.get("ping", 0) * PING_BYTES
        # Each peer searches for the replicas of two homes every LOOKUP_S, and for a random id every AROUND_S.
        out["searches"] = peers * seconds * search.bytes * (2 / LOOKUP_S + 1 / AROUND_S)
        return out

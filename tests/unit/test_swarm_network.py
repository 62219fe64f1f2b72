"""From records of the board to the planner's network."""

from __future__ import annotations

import math

import msgspec
import pytest

from dht.fence_records import LinkFigure, LinksRecord
from dht.identity import Identity
from dht.linkbook import LinkBook
from dht.records import NO_FENCE, Device, PeerRecord
from peer.offers import ASSUMED_BYTES_PER_S, network_of, sources
from peer.pipes import circuit
from peer.swarm_network import LOOPBACK, NO_WAY_BYTES_PER_S, RELAY_SHARE, links_of, offers_of
from tests.dht_samples import CPU, peer_record

CUDA = Device(
    kind="cuda", name="card", flops_per_s=1e13, memory_bytes_per_s=1e12, memory_bytes=8 << 30, free_bytes=6 << 30
)
UNMEASURED = Device(
    kind="cuda", name="card", flops_per_s=0.0, memory_bytes_per_s=0.0, memory_bytes=8 << 30, free_bytes=6 << 30
)


def peers(count: int, **fields: object) -> tuple[list[Identity], list[PeerRecord]]:
    identities = [Identity.generate() for _ in range(count)]
    return identities, [peer_record(i, **fields) for i in identities]


def test_each_measured_device_is_an_offer() -> None:
    _, (record,) = peers(1, devices=(CPU, UNMEASURED, CUDA))
    found = offers_of(record)
    assert [(o.device, o.memory_bytes, o.machine) for o in found] == [("cpu", 4 << 30, ""), ("cuda:1", 6 << 30, "")]
    assert all(o.disk_bytes == math.inf for o in found)
    _, (capped,) = peers(1, devices=(CPU, CUDA), disk_bytes=6 << 30)
    assert [o.disk_bytes for o in offers_of(capped)] == [3 << 30, 3 << 30]  # they share it
    for state in ("left", "paused"):
        assert offers_of(peers(1, state=state)[1][0]) == []


@pytest.mark.parametrize(
    ("addresses", "machine"),
    [
        (("/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"), LOOPBACK),
        (("/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.7/tcp/4001"), ""),
        ((), ""),
    ],
)
def test_who_listens_on_loopback_only_is_on_this_machine(addresses: tuple[str, ...], machine: str) -> None:
    _, (record,) = peers(1, addresses=addresses)
    assert offers_of(record)[0].machine == machine


def test_measured_relayed_assumed_and_own_links() -> None:
    identities, records = peers(3)
    a, b, c = (i.peer_id for i in identities)
    figures = (
        LinkFigure(peer=identities[1].public_key, rtt_us=10_000, up_kbps=8_000, down_kbps=16_000),
        LinkFigure(peer=identities[2].public_key, rtt_us=40_000, up_kbps=8_000, relayed=True),
    )
    book = LinkBook(records, [LinksRecord(peer=a, fence=NO_FENCE, links=figures)])
    known = links_of(book, records, {})
    rate = {(x.src, x.dst): x.bandwidth_bytes_per_s for x in known.links}
    assert rate[a, b] == 1e6 and rate[b, a] == 2e6
    assert rate[a, c] == RELAY_SHARE * 1e6
    offers = [o for r in records for o in offers_of(r)]
    net = network_of(offers, known)
    place = {d.peer: i for i, d in enumerate(net.devices)}
    assert net.latency_s[place[a], place[b]] == pytest.approx(5e-3)
    missing = [(x, y) for x in place for y in place if x != y and (x, y) not in rate]
    assert missing and all(net.bandwidth_bytes_per_s[place[x], place[y]] == ASSUMED_BYTES_PER_S for x, y in missing)
    assert f"{len(missing)} of 6 links are not measured yet" in sources(offers, known)[0]


def test_a_link_between_hidden_peers_costs_what_its_pipe_costs() -> None:
    identities, records = peers(4)
    a, b, host, plain = (i.peer_id for i in identities)
    by_way = (circuit(f"/ip4/203.0.113.7/tcp/1/p2p/{host}", b),)
    hidden = [msgspec.structs.replace(r, reach="none") for r in records[:2]]
    hidden[1] = msgspec.structs.replace(hidden[1], addresses=by_way)
    records = [*hidden, *records[2:]]
    legs = [
        LinksRecord(
            peer=p,
            fence=NO_FENCE,
            links=(LinkFigure(peer=identities[2].public_key, rtt_us=30_000, up_kbps=rate, down_kbps=rate),),
        )
        for p, rate in ((a, 80_000), (b, 8_000))
    ]
    book = LinkBook(records, legs)
    known = {(x.src, x.dst): x for x in links_of(book, records, {host: 5e6}).links}
    assert known[a, b].bandwidth_bytes_per_s == 1e6  # the slower leg
    assert known[a, b].latency_s == pytest.approx(0.03)
    assert known[a, host].bandwidth_bytes_per_s == 1e7  # no pipe: b or a dials
    known = {(x.src, x.dst): x for x in links_of(book, records, {host: 1e6}).links}
    assert known[a, b].bandwidth_bytes_per_s == RELAY_SHARE * 1e6  # what the host offers
    assert known[b, a].bandwidth_bytes_per_s == NO_WAY_BYTES_PER_S  # a rests nowhere
    known = {(x.src, x.dst): x for x in links_of(book, records, {}).links}
    assert known[a, b].bandwidth_bytes_per_s == NO_WAY_BYTES_PER_S
    assert plain not in {x for pair in known for x in pair}

"""From the board to what a plan reads: devices from peer records, links from the book of measurements.

Between two peers that cannot be dialled tensors pass a pipe: its price is the least of both legs and of the host's
offer, which both directions share; its latency is the sum of both legs. Without a host there is no link at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dht.linkbook import LinkBook
from dht.node import Board
from dht.records import PeerRecord
from fusion_p2p.planner import Link
from peer.offers import DeviceOffer, SwarmLinks
from peer.pipes import hosts_of

RELAY_SHARE = 0.5  # of a pipe's rate that a plan may count on: the two directions share it
NO_WAY_BYTES_PER_S, NO_WAY_S = 1e3, 10.0  # between peers without a pipe: so dear that no plan uses it
LOOPBACK = "loopback"
_LOOPBACK_PREFIXES = ("/ip4/127.", "/ip6/::1/")


async def read_links(board: Board, records: Sequence[PeerRecord]) -> SwarmLinks:
    """The links between these peers that have a figure; nothing is asked where all share this machine."""
    if all(_machine(r) for r in records):
        return SwarmLinks()
    book = LinkBook(records, await board.links(), await board.fences())
    offers = {}
    if any(_hidden(r) for r in records):
        offers = {p.peer: p.relay_mbps * 1e6 / 8 for p in await board.peers() if p.relay_mbps > 0}
    return links_of(book, records, offers)


KINDS = frozenset({"cpu", "cuda"})


def links_of(book: LinkBook, records: Iterable[PeerRecord], offers: Mapping[str, float]) -> SwarmLinks:
    """What is known of the links between these peers, and their fences. `offers`: bytes per second that a peer carries
    for others."""
    known = {r.peer: r for r in records}
    links = []
    for a in sorted(known):
        for b in sorted(known):
            found = None if a == b else _link(book, known[a], known[b], offers)
            if found is not None:
                links.append(found)
    return SwarmLinks(links=tuple(links), fences=book.fences())


def _link(book: LinkBook, a: PeerRecord, b: PeerRecord, offers: Mapping[str, float]) -> Link | None:
    found = book.link(a.peer, b.peer)
    if found.source in ("measured", "one end") and not found.relayed:  # over a connection of their own
        return Link(src=a.peer, dst=b.peer, bandwidth_bytes_per_s=found.bytes_per_s, latency_s=found.rtt_s / 2)
    if _hidden(a) and _hidden(b):
        pipes = [_pipe(book, a.peer, host, b.peer, offers[host]) for host in _hosts(b) if host in offers]
        rate, latency_s = max(pipes, key=lambda p: p[0], default=(NO_WAY_BYTES_PER_S, NO_WAY_S))
        return Link(src=a.peer, dst=b.peer, bandwidth_bytes_per_s=rate, latency_s=latency_s)
    if found.bytes_per_s <= 0:
        return None
    rate = found.bytes_per_s * (RELAY_SHARE if found.relayed else 1.0)
    return Link(src=a.peer, dst=b.peer, bandwidth_bytes_per_s=rate, latency_s=found.rtt_s / 2)


def _pipe(book: LinkBook, a: str, host: str, b: str, offer: float) -> tuple[float, float]:
    """(bytes per second, seconds one way) from `a` over `host` to `b`."""
    legs = book.link(a, host), book.link(host, b)
    rates = [leg.bytes_per_s for leg in legs if leg.bytes_per_s > 0]
    return min([offer * RELAY_SHARE, *rates]), sum(leg.rtt_s for leg in legs) / 2


def _hidden(record: PeerRecord) -> bool:
    """Whether nobody can dial it."""
    return record.reach in ("relay", "none")


def _hosts(record: PeerRecord) -> list[str]:
    return [a.rpartition("/p2p/")[2] for a in hosts_of(record.addresses)]


def offers_of(record: PeerRecord) -> list[DeviceOffer]:
    """A peer's measured devices: "cpu", "cuda:0", ...; none of a peer that left or is paused, and none of a kind that
    no executor runs on: its name would be shown, and stand in plans."""
    if record.state in ("left", "paused"):
        return []
    counts: dict[str, int] = {}
    offers = []
    for d in record.devices:
        index = counts.get(d.kind, 0)
        counts[d.kind] = index + 1
        if d.kind in KINDS and d.flops_per_s > 0 and d.memory_bytes_per_s > 0 and d.free_bytes > 0:
            offer = DeviceOffer(
                peer=record.peer,
                device=d.kind if d.kind == "cpu" else f"{d.kind}:{index}",
                flops_per_s=d.flops_per_s,
                memory_bytes=d.free_bytes,
                memory_bytes_per_s=d.memory_bytes_per_s,
                disk_bytes=record.disk_bytes / len(record.devices) if record.disk_bytes else math.inf,
                machine=_machine(record),
            )
            offers.append(offer)
    return offers


def _machine(record: PeerRecord) -> str:
    """Who listens on loopback only can only be reached from its own machine, by all whom it can reach."""
    on_loopback = record.addresses and all(a.startswith(_LOOPBACK_PREFIXES) for a in record.addresses)
    return LOOPBACK if on_loopback else ""

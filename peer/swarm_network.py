"""From the board to what a plan reads: devices from peer records, links from the book of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dht.linkbook import LinkBook, LinkEstimate
from dht.node import Board
from dht.records import PeerRecord
from fusion_p2p.planner import Link
from peer.offers import DeviceOffer, SwarmLinks

RELAY_SHARE = 0.5  # of a relayed link's rate that a plan may count on: each byte passes the relay twice
LOOPBACK = "loopback"
_LOOPBACK_PREFIXES = ("/ip4/127.", "/ip6/::1/")


async def read_links(board: Board, records: Sequence[PeerRecord]) -> SwarmLinks:
    """The links between these peers that have a figure; nothing is asked where all share this machine."""
    if all(_machine(r) for r in records):
        return SwarmLinks()
    book = LinkBook(records, await board.links(), await board.fences())
    return links_of(book, (r.peer for r in records))


KINDS = frozenset({"cpu", "cuda"})


def links_of(book: LinkBook, peers: Iterable[str]) -> SwarmLinks:
    """What the book knows of the links between `peers`, and their fences."""
    named = sorted(set(peers))
    links = tuple(
        Link(src=a, dst=b, bandwidth_bytes_per_s=_counted(found), latency_s=found.rtt_s / 2)
        for a in named
        for b in named
        if a != b and (found := book.link(a, b)).bytes_per_s > 0
    )
    return SwarmLinks(links=links, fences=book.fences())


def _counted(link: LinkEstimate) -> float:
    return link.bytes_per_s * (RELAY_SHARE if link.relayed else 1.0)


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
                machine=_machine(record),
            )
            offers.append(offer)
    return offers


def _machine(record: PeerRecord) -> str:
    """Who listens on loopback only can only be reached from its own machine, by all whom it can reach."""
    on_loopback = record.addresses and all(a.startswith(_LOOPBACK_PREFIXES) for a in record.addresses)
    return LOOPBACK if on_loopback else ""

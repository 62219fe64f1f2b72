"""The planner's network from what the swarm measured: peers' devices, the book of links, the elected fences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dht.linkbook import LinkBook, LinkEstimate
from dht.node import Board
from dht.records import PeerRecord
from fusion_p2p.planner.network import Device, Link, Network, from_measurements

RELAY_SHARE = 0.5  # of a relayed link's rate that a plan may count on: each byte passes the relay twice


async def read_linkbook(board: Board) -> LinkBook:
    """The swarm's links now; `Board.peers`, `links` and `fences` of it."""
    return LinkBook(await board.peers(), await board.links(), await board.fences())


def network_of(book: LinkBook, devices: Iterable[Device], *, name: str = "swarm") -> Network:
    """`devices` (of peers that the book knows, or not yet) joined with every link that has a figure at all.

    InputError if no link of theirs has one: then nothing was measured yet.
    """
    devs = tuple(devices)
    peers = sorted({d.peer for d in devs})
    links = [
        Link(src=a, dst=b, bandwidth_bytes_per_s=_counted(found), latency_s=found.rtt_s / 2)
        for a in peers
        for b in peers
        if a != b and (found := book.link(a, b)).bytes_per_s > 0
    ]
    wanted = set(peers)
    fences = [group for f in book.fences() if (group := tuple(p for p in f if p in wanted))]
    return from_measurements(devs, links, fences=fences or None, name=name)


def _counted(link: LinkEstimate) -> float:
    return link.bytes_per_s * (RELAY_SHARE if link.relayed else 1.0)


def devices_of(records: Sequence[PeerRecord], upload: Mapping[str, float] | None = None) -> tuple[Device, ...]:
    """A planner's device per device on offer; `upload`: bytes a step that a peer may send, where it is capped."""
    out = []
    for record in records:
        cards = 0
        for d in record.devices:
            device = d.kind if d.kind == "cpu" else f"{d.kind}:{cards}"
            cards += d.kind != "cpu"
            if d.flops_per_s > 0 and d.memory_bytes_per_s > 0 and d.free_bytes > 0:
                out.append(
                    Device(
                        peer=record.peer, device=device, flops_per_s=d.flops_per_s,
                        memory_bytes_per_s=d.memory_bytes_per_s, memory_bytes=float(d.free_bytes),
                        site="" if record.fence == "0" else record.fence, node=record.peer,
                        upload_bytes_per_step=(upload or {}).get(record.peer), accepts=record.state != "paused",
                    )
                )  # fmt: skip
    return tuple(out)

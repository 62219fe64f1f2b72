"""Planner inputs from live records: devices from peer records, links from what either end measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dht.coordinates import from_point, predict_rtt_s
from dht.fence_records import LinksRecord
from dht.identity import peer_id_of
from dht.records import NO_FENCE, PeerRecord
from fusion_p2p.errors import InputError
from fusion_p2p.planner import Device, Link, Network, from_measurements

KBPS = 1000 / 8  # bytes/s
UNMEASURED_BYTES_PER_S = 10e6 / 8  # of a swarm in its first minute: a modest home uplink


def network_of(
    peers: Iterable[PeerRecord],
    links: Iterable[LinksRecord] = (),
    *,
    corrections: Mapping[str, float] | None = None,
    unconfirmed: frozenset[str] = frozenset(),
) -> Network:
    """The swarm as the planner sees it. A direction counts as the lower of both ends' figures; gaps are estimated.

    `corrections`: measured over predicted stage time per device name; `unconfirmed`: newcomers before their canary.
    """
    peers = [p for p in peers if p.state != "left"]
    devices = [d for p in peers for d in _devices(p, corrections or {}, unconfirmed)]
    if not devices:
        raise InputError("no volunteer of the swarm offers a device; start one with: fusion-peer join ADDRESS")
    links = list(links)
    measured = list(_links(links))
    if not measured and len({d.peer for d in devices}) > 1:
        measured = list(_guesses(peers, links))
    fences: dict[str, list[str]] = {}
    for p in peers:
        if p.fence != NO_FENCE:
            fences.setdefault(p.fence, []).append(p.peer)
    return from_measurements(devices, measured, fences=fences.values() or None)


def _devices(p: PeerRecord, corrections: Mapping[str, float], unconfirmed: frozenset[str]) -> list[Device]:
    out, counts = [], dict[str, int]()
    for d in p.devices:
        index = counts.get(d.kind, 0)
        counts[d.kind] = index + 1
        name = d.kind if d.kind == "cpu" else f"{d.kind}:{index}"
        if d.flops_per_s > 0 and d.free_bytes > 0 and d.memory_bytes_per_s > 0:
            device = Device(
                peer=p.peer,
                device=name,
                flops_per_s=d.flops_per_s,
                memory_bytes_per_s=d.memory_bytes_per_s,
                memory_bytes=float(d.free_bytes),
                node=p.peer,
                accepts=p.state != "paused",
                confirmed=p.peer not in unconfirmed,
                correction=corrections.get(p.peer if name == "cpu" else f"{p.peer}/{name}", 1.0),
            )
            out.append(device)
    return out


def _links(links: Iterable[LinksRecord]) -> Iterable[Link]:
    for r in links:
        for f in r.links:
            other, latency = peer_id_of(f.peer), f.rtt_us / 2e6
            if f.up_kbps > 0:
                yield Link(src=r.peer, dst=other, bandwidth_bytes_per_s=f.up_kbps * KBPS, latency_s=latency)
            if f.down_kbps > 0:
                yield Link(src=other, dst=r.peer, bandwidth_bytes_per_s=f.down_kbps * KBPS, latency_s=latency)


def _guesses(peers: list[PeerRecord], links: list[LinksRecord]) -> Iterable[Link]:
    """Before any bandwidth is measured: one modest figure, latency from network coordinates."""
    where = {r.peer: from_point(r.coordinate, r.error) for r in links}
    for a in peers:
        for b in peers:
            if a.peer != b.peer:
                ca, cb = where.get(a.peer), where.get(b.peer)
                latency = predict_rtt_s(ca, cb) / 2 if ca is not None and cb is not None else 0.02
                yield Link(src=a.peer, dst=b.peer, bandwidth_bytes_per_s=UNMEASURED_BYTES_PER_S, latency_s=latency)

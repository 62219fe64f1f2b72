"""What the planner says of safety, for a run's plan: who keeps each stage's sets, and how often sets can come about."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion_p2p.planner.durability import UPLOAD_SHARE, buddies
from peer.offers import DeviceOffer, SwarmLinks, network_of
from peer.plan_hosts import device_of


def keepers(
    sets: Sequence[float],
    hosts: Sequence[DeviceOffer],
    offers: Sequence[DeviceOffer],
    links: SwarmLinks,
) -> tuple[tuple[tuple[str, ...], ...], float]:
    """(buddies per stage, seconds until the slowest has a stage's set of `sets` bytes). A buddy is on another machine,
    over the fastest link; a stage has none where all peers share a machine."""
    network = network_of(offers, links)
    index = {(o.peer, o.device): i for i, o in enumerate(offers)}
    at = [index[h.peer, device_of(h.device)] for h in hosts]
    chosen = buddies(network, at, sets)
    rates = network.bandwidth_bytes_per_s
    slowest = max(
        (s / (UPLOAD_SHARE * float(rates[h, b])) for s, h, b in zip(sets, at, chosen, strict=True) if b >= 0),
        default=0.0,
    )
    return tuple((offers[b].peer,) if b >= 0 else () for b in chosen), slowest


def interval(wanted: int, upload_s: float, step_s: float) -> int:
    """Steps between marks: as wanted (0: none), but no fewer than a set takes to reach its buddies."""
    if not wanted or step_s <= 0:
        return wanted
    return max(wanted, math.ceil(upload_s / step_s))

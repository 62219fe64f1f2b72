"""What a swarm offers a plan: devices, and links with where each figure is from. Pure: no sockets, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fusion_p2p.planner import AtomTimes, Device, Link, Network, from_measurements
from fusion_p2p.planner.network import LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S

ASSUMED_BYTES_PER_S, ASSUMED_LATENCY_S = 10e6 / 8, 0.02  # of a link nobody measured: a modest home uplink


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOffer:
    """One device of one peer, as its signed record says.

    `disk_bytes`: its part of the peer's disk, for outboxes and others' sets. `machine`: peers of one non-empty label
    share a machine, so that no network lies between them. `correction`: measured over predicted stage seconds.
    `confirmed`: a stage's trial step was timed on it. `shape`: of the run's atoms, as the device timed its operators
    itself or trial steps showed; it says how its time divides, not how fast it is.
    """

    peer: str
    device: str = "cpu"
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float = 1e12
    disk_bytes: float = math.inf
    machine: str = ""
    correction: float = 1.0
    confirmed: bool = False
    shape: AtomTimes | None = None

    @property
    def device_class(self) -> str:
        """As in `Numerics`: "cpu" or "cuda"."""
        return self.device.partition(":")[0]


class Seconds(Protocol):
    """As `protocol.AtomSeconds`."""

    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...


def shape_of_atoms(told: Sequence[Seconds], atoms: int) -> AtomTimes | None:
    """What a volunteer says its device takes for each of the model's atoms; None where it says nothing of use."""
    forward, backward = np.array([t.forward_s for t in told]), np.array([t.backward_s for t in told])
    whole = forward.sum() + backward.sum()
    usable = len(told) == atoms and np.isfinite(whole) and whole > 0 and min(forward.min(), backward.min()) >= 0
    return AtomTimes(forward_s=forward, backward_s=backward) if usable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLinks:
    """`links`: directions that have a figure; `fences`: the elected ones, by peer id; both may be empty."""

    links: tuple[Link, ...] = ()
    fences: tuple[tuple[str, ...], ...] = ()


def network_of(
    offers: Sequence[DeviceOffer], known: SwarmLinks, *, name: str = "swarm", canary: bool = True
) -> Network:
    """The planner's network; every pair has a figure: one machine's own, measured, or assumed.

    `canary`: what is planned on it is tried before it is in force, so that devices which had no trial step may be used.

    Between processes of one machine what was measured does not count: it says how busy the CPU is.
    """
    machine = {o.peer: o.machine for o in offers}
    links = [
        Link(src=a, dst=b, bandwidth_bytes_per_s=LOOPBACK_BYTES_PER_S, latency_s=LOOPBACK_LATENCY_S)
        for a, b in _pairs(machine)
        if _together(machine, a, b)
    ]
    links += [x for x in known.links if not _together(machine, x.src, x.dst)]
    there = {(x.src, x.dst) for x in links}
    links += [
        Link(src=a, dst=b, bandwidth_bytes_per_s=ASSUMED_BYTES_PER_S, latency_s=ASSUMED_LATENCY_S)
        for a, b in _pairs(machine)
        if (a, b) not in there
    ]
    fences = [group for f in known.fences if (group := tuple(p for p in f if p in machine))]
    return from_measurements((_device(o, canary) for o in offers), links, fences=fences or None, name=name)


def sources(offers: Sequence[DeviceOffer], known: SwarmLinks) -> list[str]:
    """Where the links' figures are from, for a plan's reasons; nothing where all are measured."""
    machine = {o.peer: o.machine for o in offers}
    pairs = list(_pairs(machine))
    measured = {(x.src, x.dst) for x in known.links}
    near = sum(_together(machine, a, b) for a, b in pairs)
    assumed = sum((a, b) not in measured and not _together(machine, a, b) for a, b in pairs)
    out = []
    if near:
        out.append(f"{near} of {len(pairs)} links stay on one machine: counted as {LOOPBACK_BYTES_PER_S / 1e9:g} GB/s")
    if assumed:
        out.append(
            f"{assumed} of {len(pairs)} links are not measured yet: assumed {ASSUMED_BYTES_PER_S * 8 / 1e6:g} Mbit/s, "
            f"{ASSUMED_LATENCY_S * 1e3:g} ms"
        )
    return out


def _pairs(peers: Iterable[str]) -> Iterable[tuple[str, str]]:
    named = list(peers)
    return ((a, b) for a in named for b in named if a != b)


def _together(machine: dict[str, str], a: str, b: str) -> bool:
    return bool(machine.get(a)) and machine.get(a) == machine.get(b)


def _device(o: DeviceOffer, canary: bool) -> Device:
    return Device(
        peer=o.peer,
        device=o.device,
        flops_per_s=o.flops_per_s,
        memory_bytes_per_s=o.memory_bytes_per_s,
        memory_bytes=float(o.memory_bytes),
        disk_bytes=o.disk_bytes,
        node=o.machine or o.peer,
        correction=o.correction,
        confirmed=o.confirmed or canary,
        shape=o.shape,
    )

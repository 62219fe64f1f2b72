"""Volunteers of a lab: one process family per peer of the testbed, in its namespace and under its share of the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from fusion_p2p.planner import Link
from peer.lab.local_swarm import LocalSwarm, Volunteer
from peer.lab.netns import Lab
from peer.offers import SwarmLinks

DEAD_S = 30.0  # a peer with a tenth of a core may be silent for longer than one with its own


class LabSwarm(LocalSwarm):
    """A LocalSwarm whose volunteers lie in `lab`. Plans see the links as the lab has them now."""

    loopback = False
    every_device = False
    ready_s = 180.0
    gather_s = 300.0  # importing torch takes 5 s of a core, of which a peer may have a tenth

    def __init__(self, lab: Lab, *, memory: str = "2GiB", dead_s: float = DEAD_S) -> None:
        super().__init__(len(lab.bed.peers), memory=memory, dead_s=dead_s)
        self.lab = lab
        self._hosts: list[int] = []  # per volunteer launched: its place in `bed.peers`

    @property
    def links(self) -> SwarmLinks:
        names, network = self.names, self.lab.bed.network
        index = {p.name: i for i, p in enumerate(self.lab.bed.peers)}
        return SwarmLinks(
            links=tuple(
                Link(
                    src=a,
                    dst=b,
                    bandwidth_bytes_per_s=self.lab.bits_per_s(names[a], names[b]) / 8,
                    latency_s=float(network.latency_s[index[names[a]], index[names[b]]]),
                )
                for a, b in itertools.permutations(names, 2)
            )
        )

    @property
    def names(self) -> Mapping[str, str]:
        """The testbed's name of each volunteer, by peer id."""
        peers = self.lab.bed.peers
        return {v.ready.peer: peers[k].name for k, v in zip(self._hosts, self.volunteers, strict=False) if v.ready.peer}

    def _launch(self, addresses: Sequence[str]) -> tuple[Volunteer, int]:
        launched = super()._launch(addresses)
        self.lab.quotas.hold(self.lab.bed.peers[self._hosts[-1]].name, launched[0].pid)
        return launched

    def _place(self, number: int) -> tuple[Sequence[str], Sequence[str]]:
        k = number % len(self.lab.bed.peers)
        self._hosts.append(k)
        peer = self.lab.bed.peers[k]
        return ("--listen", f"/ip4/{peer.address}/tcp/0"), self.lab.command(peer.name)

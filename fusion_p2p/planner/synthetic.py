"""Random networks of any size, for tests and benchmarks: sites of 1 to 12 devices of one kind, measured links noisy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusion_p2p.planner.network import Device, Network
from fusion_p2p.planner.testbed import MBPS

# Effective FLOP/s, memory bytes/s, memory bytes of common devices.
KINDS = (
    (120e12, 1500e9, 40e9),
    (36e12, 900e9, 32e9),
    (66e12, 1000e9, 24e9),
    (28e12, 930e9, 24e9),
    (22e12, 760e9, 10e9),
    (13e12, 448e9, 8e9),
)


def network(count: int, seed: int = 0) -> Network:
    """`count` devices; 8 to 1,000 Mbit/s and 2 to 150 ms between sites, 1 Gbit/s and 0.3 ms inside one, +-20%."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(int(rng.integers(1, 13)))
    site = np.repeat(np.arange(len(sizes)), sizes)[:count]
    n = len(sizes)
    kind = rng.integers(0, len(KINDS), n)
    between = np.exp(rng.uniform(np.log(8), np.log(1000), (n, n))) * MBPS
    between = np.minimum(between, between.T)
    latency = rng.uniform(0.002, 0.15, (n, n))
    latency = (latency + latency.T) / 2
    bw, lat = between[np.ix_(site, site)], latency[np.ix_(site, site)]
    same = site[:, None] == site[None, :]
    bw[same], lat[same] = 1000 * MBPS, 0.0003
    devices = []
    for i, s in enumerate(site.tolist()):
        flops, moved, memory = KINDS[kind[s]]
        devices.append(
            Device(
                peer=f"p{i}",
                flops_per_s=flops,
                memory_bytes_per_s=moved,
                memory_bytes=memory,
                site=f"s{s}",
                node=f"m{i}",
            )
        )
    net = Network(devices=tuple(devices), bandwidth_bytes_per_s=bw, latency_s=lat, name=f"random-{count}")
    return noisy(net, 0.2, seed)


def noisy(net: Network, share: float, seed: int) -> Network:
    """Every directed pair's bandwidth times its own factor in 1 +- `share`."""
    factor = np.random.default_rng(seed).uniform(1 - share, 1 + share, net.bandwidth_bytes_per_s.shape)
    return replace(net, bandwidth_bytes_per_s=net.bandwidth_bytes_per_s * factor)

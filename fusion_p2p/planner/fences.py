"""Fences where none is elected: average linkage on log transfer time; Louvain (networkx) is the published way.

FusionLLM section 4.2 clusters devices of similar bandwidth; DESIGN section 5 says when which applies.
"""

from __future__ import annotations

import numpy as np

from fusion_p2p.planner.network import Network
from fusion_p2p.planner.workload import Floats

Fences = tuple[tuple[int, ...], ...]


def transfer_s(net: Network, size_bytes: float) -> Floats:
    """(D, D) seconds to send `size_bytes` both ways between two devices, latency included; 0 on the diagonal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        one = size_bytes / net.bandwidth_bytes_per_s + net.latency_s
    np.fill_diagonal(one, 0.0)
    both: Floats = one + one.T
    return both


def average_linkage(log_time: Floats) -> list[tuple[int, int, float]]:
    """Merges (a, b, height) of average linkage, nearest-neighbour chain, O(D^2). Cluster D+k is merge k's result.

    Merges come sorted by height; `log_time` is symmetric, its diagonal ignored.
    """
    n = len(log_time)
    d = log_time.astype(np.float64).copy()
    np.fill_diagonal(d, np.inf)
    size = np.ones(n)
    alive = np.ones(n, dtype=bool)
    raw: list[tuple[int, int, float]] = []
    chain: list[int] = []
    for _ in range(n - 1):
        if not chain:
            chain.append(int(np.flatnonzero(alive)[0]))
        while True:
            a = chain[-1]
            b = int(d[a].argmin())
            if len(chain) > 1 and d[a, chain[-2]] <= d[a, b]:
                b = chain[-2]
                break
            chain.append(b)
        chain = chain[:-2]
        raw.append((a, b, float(d[a, b])))
        row = (size[a] * d[a] + size[b] * d[b]) / (size[a] + size[b])
        size[a] += size[b]
        alive[b] = False
        row[~alive] = np.inf
        row[a] = np.inf
        d[a], d[:, a] = row, row
        d[b], d[:, b] = np.inf, np.inf
    return _relabel(raw, n)


def _relabel(raw: list[tuple[int, int, float]], n: int) -> list[tuple[int, int, float]]:
    """Sort merges by height and name clusters as scipy does."""
    owner = list(range(n))
    name = list(range(n))

    def find(x: int) -> int:
        while owner[x] != x:
            owner[x] = owner[owner[x]]
            x = owner[x]
        return x

    out = []
    for k, i in enumerate(sorted(range(len(raw)), key=lambda i: raw[i][2])):
        a, b = find(raw[i][0]), find(raw[i][1])
        out.append((name[a], name[b], raw[i][2]))
        owner[b] = a
        name[a] = n + k
    return out


def leaves(merges: list[tuple[int, int, float]], log_time: Floats) -> list[int]:
    """Dendrogram leaves, each merge flipped so that the nearer ends of its two halves meet."""
    n = len(log_time)
    seq: list[list[int]] = [[i] for i in range(n)]
    for a, b, _ in merges:
        x, y = seq[a], seq[b]
        ends = [
            (log_time[x[-1], y[0]], 0),
            (log_time[x[-1], y[-1]], 1),
            (log_time[x[0], y[0]], 2),
            (log_time[x[0], y[-1]], 3),
        ]
        way = min(ends)[1]
        seq.append((x if way < 2 else x[::-1]) + (y if way in (0, 2) else y[::-1]))
    return seq[-1]


def find_fences(net: Network, size_bytes: float) -> Fences:
    """The elected fences, else average linkage cut at the widest gap between merge heights (log seconds)."""
    if net.fences is not None:
        named = {d for f in net.fences for d in f}
        return net.fences + tuple((d,) for d in range(len(net)) if d not in named)
    if len(net) <= 2:
        return (tuple(range(len(net))),)
    merges = average_linkage(_log(transfer_s(net, size_bytes)))
    heights = np.array([h for _, _, h in merges])
    gaps = np.diff(heights)
    level = heights[int(gaps.argmax())] if gaps.max() > np.log(2.0) else heights[-1]
    return cut_at(merges, len(net), level)


def cut_at(merges: list[tuple[int, int, float]], n: int, level: float) -> Fences:
    """Clusters after all merges of height <= level."""
    groups: dict[int, list[int]] = {i: [i] for i in range(n)}
    for k, (a, b, h) in enumerate(merges):
        if h <= level:
            groups[n + k] = groups.pop(a) + groups.pop(b)
    return tuple(tuple(sorted(g)) for g in sorted(groups.values(), key=min))


def louvain(net: Network, seed: int = 0) -> Fences:
    """Published OP-Fence: Louvain communities of the bandwidth graph (weights in bytes/s, the slower direction)."""
    import networkx as nx

    bw = np.minimum(net.bandwidth_bytes_per_s, net.bandwidth_bytes_per_s.T)
    g = nx.Graph()
    g.add_nodes_from(range(len(net)))
    g.add_weighted_edges_from((i, j, float(bw[i, j])) for i in range(len(net)) for j in range(i))
    found = nx.community.louvain_communities(g, weight="weight", seed=seed)
    return tuple(sorted(tuple(sorted(c)) for c in found))


def _log(t: Floats) -> Floats:
    out: Floats = np.log(np.maximum(t, 1e-9))
    return out

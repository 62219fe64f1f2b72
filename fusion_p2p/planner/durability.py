"""Marks, buddies, logged edges and recovery groups of a chain under memory, disk and upload caps (DESIGN section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusion_p2p.outboxes import disk_shares, log_bytes
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.network import Network

UPLOAD_SHARE = 0.5  # of a host's idle uplink that sets may take
SETS_HELD = 3  # of a stage on one disk: two complete ones, and the one that comes
MOST_DISK_BYTES = 1e12  # of a device, that outboxes are planned with
LEAST_INTERVAL, MOST_INTERVAL = 10, 2000  # steps between marks


@dataclass(frozen=True, kw_only=True)
class Durability:
    """`mark_interval` steps between marks. `buddies[k]`: device that keeps stage k's sets, -1 if none exists.

    `logged[k]`: hop k -> k+1 keeps its frames. `groups`: stages that roll back together. Bytes: `outbox_bytes[k]`
    of stage k at the bound (frames of an interval and two steps, two complete sets back), `set_bytes[k]` of one set.
    """

    mark_interval: int
    buddies: tuple[int, ...]
    logged: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    outbox_bytes: tuple[float, ...]
    set_bytes: tuple[float, ...]
    upload_s: float  # of the slowest set to its buddy


def durability(costs: Costs, chain: Chain, score: Score) -> Durability:
    """Choose buddies by link, then the shortest interval whose sets reach them, then what may be logged."""
    bounds = chain.bounds(costs.w.atoms)
    sets = tuple(costs.w.stage_bytes(a, b, 1).snapshot for a, b in pairwise(bounds))
    keepers = buddies(costs.net, chain.hosts, sets)
    slowest = 0.0
    for k, (host, buddy) in enumerate(zip(chain.hosts, keepers, strict=True)):
        if buddy >= 0:
            idle = max(0.05, 1.0 - _busy_s(costs, chain, k) / score.step_s) * UPLOAD_SHARE
            slowest = max(slowest, sets[k] / (float(costs.net.bandwidth_bytes_per_s[host, buddy]) * idle))
    interval = min(MOST_INTERVAL, max(LEAST_INTERVAL, math.ceil(slowest / score.step_s)))
    logged, outbox = _logged(costs, chain, interval)
    groups: list[list[int]] = [[0]]
    for k, keep in enumerate(logged):
        if keep:
            groups.append([k + 1])
        else:
            groups[-1].append(k + 1)
    return Durability(
        mark_interval=interval,
        buddies=keepers,
        logged=logged,
        groups=tuple(tuple(g) for g in groups),
        outbox_bytes=outbox,
        set_bytes=sets,
        upload_s=slowest,
    )


def _frame_bytes(costs: Costs, chain: Chain, hop: int) -> float:
    return chain.rungs[hop].byte_share * float(costs.w.cut_bytes[chain.cuts[hop]])


def _busy_s(costs: Costs, chain: Chain, k: int) -> float:
    """Seconds a step that stage k's uplink sends frames, both neighbours."""
    total = 0.0
    for other, hop in ((k - 1, k - 1), (k + 1, k)):
        if 0 <= other < len(chain.hosts) and chain.hosts[other] != chain.hosts[k]:
            bw = float(costs.net.bandwidth_bytes_per_s[chain.hosts[k], chain.hosts[other]])
            total += costs.m * _frame_bytes(costs, chain, hop) / bw
    return total


def buddies(net: Network, hosts: Sequence[int], sets: Sequence[float]) -> tuple[int, ...]:
    """Per stage the device on another machine with the fastest link from the host, and disk for SETS_HELD more sets.

    `sets`: bytes of one set of each stage; a host's disk holds as many of its own. Spares count double and a device
    already named counts less, so that sets spread and survive neighbours. -1 where there is none.
    """
    disk = [disk_shares(d.disk_bytes)[0] for d in net.devices]
    for host, size in zip(hosts, sets, strict=True):
        disk[host] -= SETS_HELD * size
    load = [0] * len(net)
    out = []
    for k, host in enumerate(hosts):
        best, best_value = -1, 0.0
        for j, d in enumerate(net.devices):
            here = net.devices[host]
            if (
                d.peer == here.peer
                or (d.node and d.node == here.node)
                or disk[j] < SETS_HELD * sets[k]
                or not d.confirmed
            ):
                continue
            value = float(net.bandwidth_bytes_per_s[host, j]) * (1.0 if j in hosts else 2.0) / (1 + load[j])
            if value > best_value:
                best, best_value = j, value
        if best >= 0:
            disk[best] -= SETS_HELD * sets[k]
            load[best] += 1
        out.append(best)
    return tuple(out)


def _logged(costs: Costs, chain: Chain, interval: int) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Cheapest hops first: a hop is logged if both ends can keep its frames back to the newest complete set: in the
    memory that their stages leave, as far as an executor's outboxes may go, then on disk."""
    steps = 2 * interval + 2
    left = dict(enumerate(costs.room_bytes.tolist()))
    for host, need in zip(chain.hosts, costs.stage_bytes(chain.bounds(costs.w.atoms)).tolist(), strict=True):
        left[host] -= need
    devices = [costs.net.devices[h] for h in chain.hosts]
    disk = [disk_shares(min(d.disk_bytes, MOST_DISK_BYTES))[1] for d in devices]
    room = [
        max(0.0, min(left[h], 2.0 * log_bytes(int(d.memory_bytes)))) + on_disk
        for h, d, on_disk in zip(chain.hosts, devices, disk, strict=True)
    ]
    used = [0.0] * len(chain.hosts)
    logged = [False] * len(chain.cuts)
    for k in sorted(range(len(chain.cuts)), key=lambda k: _frame_bytes(costs, chain, k)):
        need = steps * costs.m * _frame_bytes(costs, chain, k)
        if used[k] + need <= room[k] and used[k + 1] + need <= room[k + 1]:
            logged[k] = True
            used[k] += need
            used[k + 1] += need
    return tuple(logged), tuple(used)

"""What a daemon says of itself: its record on the board, its devices in `fusion-peer status`. Pure."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from dht import records
from peer.executor_process import ExecutorProcess
from peer.local_control import DeviceView
from peer.volunteer import Volunteer


def peer_record(
    volunteer: Volunteer,
    state: Literal["free", "busy", "paused"],
    addresses: tuple[str, ...],
    reach: Literal["", "direct", "relay", "none"],
    place: str,
    *,
    relay_mbps: float,
    disk_bytes: int,
) -> records.PeerRecord:
    """As it is published now."""
    found = []
    for name, executor in volunteer.executors.items():
        ready = executor.ready
        free = 0 if ready is None else max(0, ready.memory_bytes - max(executor.resident_bytes, ready.base_bytes))
        found.append(
            records.Device(
                kind=name.partition(":")[0], name=ready.name if ready else "",
                flops_per_s=_rounded(ready.flops_per_s) if ready else 0.0,
                memory_bytes_per_s=_rounded(ready.memory_bytes_per_s) if ready else 0.0,
                memory_bytes=ready.memory_bytes if ready else 0, free_bytes=int(_rounded(free)),
            )
        )  # fmt: skip
    work = tuple(records.Work(run, stage) for run, stage in sorted(volunteer.stages))[:16]
    return records.PeerRecord(
        peer=volunteer.peer_id, version=_version(), devices=tuple(found), addresses=addresses,
        hours=volunteer.policy.hours, state=state, work=work, reach=reach, place=place,
        relay_mbps=_rounded(relay_mbps), disk_bytes=disk_bytes,
    )  # fmt: skip


def device_view(name: str, executor: ExecutorProcess) -> DeviceView:
    """One device for status."""
    ready, cap = executor.ready, executor.start.memory_bytes
    if ready is None:
        return DeviceView(device=name, state="starting", pid=executor.pid, cap_bytes=cap)
    return DeviceView(
        device=name, state="ready", name=ready.name, pid=executor.pid, flops_per_s=ready.flops_per_s,
        memory_bytes_per_s=ready.memory_bytes_per_s, resident_bytes=executor.resident_bytes,
        cap_bytes=ready.memory_bytes,
    )  # fmt: skip


def board_names(wanted: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name on the board, torch's name) of each device. On the board devices of a kind are numbered from 0."""
    cards = [d for d in wanted if d != "cpu"]
    return [("cpu", "cpu")] * ("cpu" in wanted) + [(f"cuda:{i}", d) for i, d in enumerate(cards)]


def leader_score(some_hours: bool, capped: bool) -> int:
    """What makes a good leader: it is there at all hours, and is not capped in what it may send."""
    return 1 + 2 * (not some_hours) + (not capped)


def _rounded(figure: float) -> float:
    """Three digits: what changes less is not worth storing again."""
    return float(f"{figure:.3g}")


@functools.cache
def _version() -> str:
    try:
        return version("fusion-p2p")
    except PackageNotFoundError:
        return "source"

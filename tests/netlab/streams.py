"""Goodput and CPU of one of our edge streams beside raw asyncio TCP, on the same link of a lab or on loopback."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_p2p.planner import Device, Network
from peer.lab.bed import Bed, bed_of
from peer.lab.netns import Lab
from tests.netlab.stream import RAMP_S

WAIT_S = 30.0


class StreamFailed(Exception):
    """An end said nothing in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """`cores`: CPU of both ends together, their p2pd included, in cores."""

    bits_per_s: float
    cores: float


def pairs(mbps: Sequence[float]) -> Bed:
    """A bed of two peers per rate, A0 and B0 for the first."""
    n = 2 * len(mbps)
    devices = tuple(
        Device(peer=f"{'AB'[i % 2]}{i // 2}", site=f"{'AB'[i % 2]}{i // 2}", flops_per_s=1e9, memory_bytes_per_s=1e9,
               memory_bytes=1e9)
        for i in range(n)
    )  # fmt: skip
    table = np.full((n, n), 1e9 / 8)
    for k, rate in enumerate(mbps):
        table[2 * k, 2 * k + 1] = table[2 * k + 1, 2 * k] = rate * 1e6 / 8
    latency = np.full((n, n), 1e-4)
    network = Network(devices=devices, bandwidth_bytes_per_s=table, latency_s=latency, name="pairs")
    return bed_of(network, cores=float(n))  # a whole core each: nobody is slowed down


def stream(kind: str, seconds: float, lab: Lab | None = None, pair: int = 0) -> StreamRun:
    """`kind` "ours" or "raw", between the peers of a pair of the lab, or without one on loopback. StreamFailed."""
    ends: list[subprocess.Popen[str]] = []
    try:
        for role, letter in (("take", "B"), ("send", "A")):
            peer = None if lab is None else next(p for p in lab.bed.peers if p.name == f"{letter}{pair}")
            before = () if lab is None or peer is None else lab.enter(peer.name)
            address = "127.0.0.1" if peer is None else peer.address
            command = [*before, sys.executable, "-m", "tests.netlab.stream", role, kind, address, str(seconds)]
            ends.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=os.environ.copy()
                )
            )
        taker, sender = ends
        _tell(sender, _hear(taker, WAIT_S))
        if kind == "ours":
            _tell(taker, _hear(sender, WAIT_S))
        took = _hear(taker, RAMP_S + seconds + WAIT_S)
        gave = _hear(sender, RAMP_S + seconds + WAIT_S)
    finally:
        for end in ends:
            try:
                end.wait(10.0)
            except subprocess.TimeoutExpired:
                end.kill()
                end.wait()
            for pipe in (end.stdin, end.stdout):
                if pipe is not None:
                    pipe.close()
    cores = took["cpu_s"] / took["seconds"] + gave["cpu_s"] / gave["seconds"]
    return StreamRun(bits_per_s=8 * took["bytes"] / took["seconds"], cores=cores)


def _tell(end: subprocess.Popen[str], what: Any) -> None:
    assert end.stdin is not None
    end.stdin.write(json.dumps(what) + "\n")
    end.stdin.flush()


def _hear(end: subprocess.Popen[str], timeout_s: float) -> Any:
    assert end.stdout is not None
    until = time.monotonic() + timeout_s
    ready, _, _ = select.select([end.stdout], [], [], max(0.0, until - time.monotonic()))
    line = end.stdout.readline() if ready else ""
    if not line:
        raise StreamFailed(f"an end of the stream said nothing within {timeout_s:.0f} s")
    return json.loads(line)

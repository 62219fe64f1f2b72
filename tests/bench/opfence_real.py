"""OP-Fence's rows that need real processes: predicted against measured steps, and a plan over elected fences."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

import fusion_p2p
from dht import p2p
from dht.errors import DhtError
from dht.node import Board
from fusion_p2p.planner import Device, Network
from peer.api import LocalSwarm, Run
from peer.errors import PeerError
from peer.lab.bed import bed_of
from peer.lab.lab_swarm import LabSwarm
from peer.lab.local_swarm import Volunteer
from peer.lab.netns import Lab, prefix, sweep, unsupported
from peer.lab.quota import Quotas
from peer.offers import SwarmLinks
from peer.swarm_network import read_links
from tests.bench.main_job import DISTURBED, MICRO_BATCH_SIZE, batches, model, turn
from tests.bench.rows import Row, at_most, progress

CORES = 0.45  # of each of four peers
MICRO_BATCHES, STEPS = 8, 7
ELECTION_S = 300.0
MBIT = 1e6 / 8
FAR_MBPS, NEAR_MBPS, FAR_S = 10.0, 200.0, 0.05


class HeldSwarm(LocalSwarm):
    """A LocalSwarm whose peers have CORES of a core each."""

    ready_s = 180.0
    gather_s = 300.0

    def __init__(self, peers: int) -> None:
        super().__init__(peers, memory="2GiB", dead_s=30.0)
        self._names = iter([f"held-{k}" for k in range(2 * peers)])
        self.quotas = Quotas(prefix(), {f"held-{k}": CORES for k in range(2 * peers)})

    def _launch(self, addresses: Sequence[str]) -> tuple[Volunteer, int]:
        launched = super()._launch(addresses)
        self.quotas.hold(next(self._names), launched[0].pid)
        return launched


def _run(swarm: LocalSwarm, stages: int, micro_batches: int) -> Run:
    return Run(
        model(),
        data=batches(micro_batches * MICRO_BATCH_SIZE),
        optimizer=fusion_p2p.AdamW(lr=1e-3, clip_norm=1.0),
        micro_batches=micro_batches,
        micro_batch_size=MICRO_BATCH_SIZE,
        swarm=swarm,
        stages=stages,
        save_every=0,
    )


def predicted() -> Iterator[Row]:
    """Four peers of 0.45 core: the step time of the plan in force, against the median of the steps after the first."""
    case = f"real swarm, 4 peers of {CORES} core: predicted step off the measured one by"
    sweep()
    swarm = HeldSwarm(4)
    swarm.quotas.open()
    try:
        with _run(swarm, 4, MICRO_BATCHES) as run:
            run.train(1)  # fills the pipeline and warms up
            own: list[float] = []
            taken = turn(lambda count: own.extend(s.step_time_s for s in run.steps(count)), STEPS)
            plan = run.plan()
    finally:
        swarm.stop()
        swarm.quotas.close()
    guess = plan.prediction.step_time_s if plan.prediction is not None else float("nan")
    real = statistics.median(own)
    progress(f"{swarm.quotas.how}: predicted {guess:.3g} s, measured {', '.join(f'{x:.3g}' for x in own)} s")
    row = at_most(case, abs(guess / real - 1) * 100, 15, "%")
    if taken.others > DISTURBED:
        yield Row(
            row.case, f"disturbed: others took {taken.others:.0%} of the machine ({row.figure})", row.bound, False
        )
    else:
        yield row


def two_sites(per_site: int = 3) -> Network:
    """Peers a0, b0, a1, b1, ...: what a list says of their order is of no use."""
    names = [f"{s}{k}" for k in range(per_site) for s in "ab"]
    devices = tuple(
        Device(peer=n, flops_per_s=1e9, memory_bytes_per_s=1e9, memory_bytes=2e9, site=n[0], node=n) for n in names
    )
    same = np.array([[x.site == y.site for y in devices] for x in devices])
    rates = np.where(same, NEAR_MBPS, FAR_MBPS) * MBIT
    return Network(devices=devices, bandwidth_bytes_per_s=rates, latency_s=np.where(same, 0.0, FAR_S), name="two sites")


class Measuring(LabSwarm):
    """A LabSwarm of which plans know what its peers measured and whom they elected, not what the lab was built with."""

    @property
    def links(self) -> SwarmLinks:
        return self.measured

    measured = SwarmLinks()


async def elected(addresses: tuple[str, ...], folder: Path, groups: int, members: int) -> SwarmLinks:
    """What the board says once `groups` fences of `members` peers each are elected. TimeoutError after ELECTION_S."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(ELECTION_S):
        transport = await p2p.start(folder / "reader", host_addresses=(), bootstrap=addresses, client_only=True)
        stack.push_async_callback(transport.close)
        board = await Board.start(transport, client_only=True)
        stack.push_async_callback(board.close)
        while True:
            with contextlib.suppress(DhtError):
                found = await read_links(board, await board.peers())
                pairs = len({(x.src, x.dst) for x in found.links})
                progress(f"fences {sorted(map(len, found.fences))}, {pairs} directions measured")
                if sorted(map(len, found.fences)) == [members] * groups and pairs == groups * members * (
                    groups * members - 1
                ):
                    return found
            await asyncio.sleep(5.0)


def fenced() -> Iterator[Row]:
    """Six volunteers, each in a network namespace, in two sites FAR_MBPS apart; six stages are asked for."""
    case = "real swarm, 6 peers in 2 sites with elected fences: hops of the adopted plan between fences"
    if why := unsupported():
        yield Row(case, f"not measured: {why}", "<= 1", False)
        return
    with (
        tempfile.TemporaryDirectory(prefix="fusion-fences-") as folder,
        Lab(bed_of(two_sites())) as lab,
        lab.inside(),
        Measuring(lab) as swarm,
    ):
        try:
            swarm.measured = asyncio.run(elected(swarm.addresses, Path(folder), 2, 3))
        except (TimeoutError, DhtError, PeerError) as error:
            yield Row(case, f"no fences after {ELECTION_S:.0f} s: {error}", "<= 1", False)
            return
        fence = {p: k for k, group in enumerate(swarm.measured.fences) for p in group}
        with _run(swarm, 6, 4) as run:
            losses = [s.loss for s in run.steps(2)]
            hosts = [p.peer for p in run.plan().placement]
        names = [swarm.names[p] for p in hosts]
    progress(f"hosts {' '.join(names)}; losses {losses}")
    crossings = sum(fence[a] != fence[b] for a, b in pairwise(hosts))
    yield at_most(case, crossings, 1)


def rows() -> Iterator[Row]:
    yield from predicted()
    yield from fenced()

"""Who comes and who goes: snapshots that travel to many at once, and a hundred joins and leaves."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from dht import p2p
from peer.api import LocalSwarm, Run
from peer.blobs import BlobStore, fetch_blob, serve_blobs
from peer.channel_io import ChannelSettings
from peer.protocol import BlobRef
from peer.ratelimit import BURST_BYTES, Limiter
from tests.bench.elastic_cost import in_turns, over, unless_disturbed
from tests.bench.elastic_faults import open_run
from tests.bench.rows import Row, at_most, progress
from tests.cluster.comings import visits

HOLDERS, JOINERS = 3, 6
SETTINGS = ChannelSettings(dead_s=4.0)


class _Counting(Limiter):
    """What has passed so far, and since when."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, burst=BURST_BYTES)
        self.passed, self.first_s, self.last_s = 0, 0.0, 0.0

    async def take(self, count: int) -> None:
        await super().take(count)
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.passed += count


async def spread(root: Path, size: int, bytes_per_s: float) -> tuple[bool, float, float]:
    """Six fetch a snapshot of three that are capped, one of which dies when half has passed; every end has a p2pd of
    its own. (all hashes are right, the largest rate of a holder after its burst over its cap, bytes passed over bytes
    needed)."""
    async with AsyncExitStack() as stack:

        async def peer(name: str, bootstrap: tuple[str, ...] = ()) -> p2p.P2PTransport:
            transport = await p2p.start(root / f"{name}.key", host_addresses=p2p.LOOPBACK, bootstrap=bootstrap)
            stack.push_async_callback(transport.close)
            return transport

        holders = [await peer(f"holder{k}") for k in range(HOLDERS)]
        addresses = {h.peer_id: await h.addresses() for h in holders}
        bootstrap = tuple(addresses[holders[0].peer_id])
        limiters = [_Counting(bytes_per_s) for _ in holders]
        data = os.urandom(size)
        for k, holder in enumerate(holders):
            store = BlobStore(root / f"holder{k}")
            blob, _ = await asyncio.to_thread(store.put, data)
            await serve_blobs(holder, store, lambda *_: True, limiter=limiters[k], settings=SETTINGS)
        ref = BlobRef(blob, size, tuple(addresses), addresses)

        async def fetch(k: int) -> bool:
            joiner = await peer(f"joiner{k}", bootstrap)
            store = BlobStore(root / f"joiner{k}")
            path = await fetch_blob(joiner, store, "r", ref, max_bytes=size, settings=SETTINGS)
            return path.read_bytes() == data

        tasks = [asyncio.create_task(fetch(k)) for k in range(JOINERS)]
        while sum(limiter.passed for limiter in limiters) < JOINERS * size / 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        busiest = max(range(HOLDERS), key=lambda k: limiters[k].passed)
        psutil.Process(holders[busiest].p2pd_pid or 0).kill()
        await holders[busiest].close()  # else it would start another
        found = await asyncio.gather(*tasks)
        rates = [(lim.passed - BURST_BYTES) / max(1.0, lim.last_s - lim.first_s) / bytes_per_s for lim in limiters]
        return all(found), max(rates), sum(lim.passed for lim in limiters) / (JOINERS * size)


def joiners(size: int, bytes_per_s: float) -> list[Row]:
    """While a swarm trains beside it."""
    found: list[tuple[bool, float, float]] = []
    with tempfile.TemporaryDirectory() as root, LocalSwarm(peers=3) as swarm, open_run(swarm, 2000, stages=3) as run:
        run.train(5)
        thread = threading.Thread(target=lambda: found.append(asyncio.run(spread(Path(root), size, bytes_per_s))))
        thread.start()
        steps = 0
        while thread.is_alive():
            run.train(1)
            steps += 1
        thread.join()
    ((equal, rate, passed),) = found or [(False, float("inf"), float("inf"))]
    case = f"{JOINERS} joiners, {HOLDERS} holders, the busiest killed at half"
    return [
        Row(f"{case}: hashes", "equal" if equal else "differ", "equal", equal),
        at_most(f"  the fastest holder's bytes a second over its cap, after {BURST_BYTES >> 10} KiB", rate, 1.02),
        at_most("  bytes that holders sent over bytes that were needed", passed, 1.1),
        Row("  steps trained meanwhile", str(steps), ">= 1", steps >= 1),
    ]


def comings_and_goings(count: int, seconds: float) -> list[Row]:
    """Volunteers join and leave, one of each every `seconds` / `count`, every fifth by SIGKILL, beside two that stay;
    who leaves hosts a stage."""
    with tempfile.TemporaryDirectory() as root, LocalSwarm(peers=4) as swarm:
        folder = Path(root) / "run"
        with open_run(swarm, 1000, stages=3, recover_s=120.0, run_dir=folder) as run:
            found = visits(
                swarm,
                run,
                folder,
                count,
                every_s=seconds / count,
                killed=lambda k: k % 5 == 4,
                settle_s=90.0,
                told=progress,
            )
            fresh, others = _over_a_new_run(run, swarm)
    case = f"{count} joins and leaves in {found.seconds / 60:.1f} min, {found.moves} moves of stages"
    left, grown = found.behind, found.grown()
    rss = found.after.rss_bytes / found.before.rss_bytes
    return [
        Row(f"{case}: processes, folders and records left", "; ".join(left) or "none", "none", not left),
        Row(
            "  processes, open files and sockets, threads, files of those that stay: clearly more than before",
            ", ".join(f"{name} {a} -> {b}" for name, (a, b) in grown.items()) or "none",
            "none",
            not grown,
        ),
        at_most("  their memory, over before", rss, 1.1),
        at_most("  step time after, over that of a new run on the same volunteers, in turns", fresh, 1.25),
        unless_disturbed("  step time after, over before", found.step_s_after / found.step_s_before, 1.25, others),
    ]


def _over_a_new_run(run: Run, swarm: LocalSwarm, blocks: int = 5, steps: int = 10) -> tuple[float, float]:
    """(step time of `run` over that of a run that begins now, median of blocks in turns, which whatever else the
    machine does hits alike; share of the machine that others took)."""
    ratios, others = list[float](), list[float]()
    with open_run(swarm, 200, stages=3) as new:
        new.train(2)
        for number in range(blocks):
            old, fresh = in_turns(run, new, number, steps)
            ratios.append(over(old, fresh))
            others += [t.others for t in (*old, *fresh)]
    return statistics.median(ratios), statistics.median(others)

"""The monitor's bounds: first picture, 1,000 peers on the map, the server's memory, look-ups a refresh.

The swarms are real boards on loopback; the 1,000 peers' records are
signed by 1,000 keys and published by a few boards. Browser rows are left out where there is no chromium.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

from dht.monitor_observer import Observer, reading_board
from tests.bench.rows import Row, arguments, at_most, report
from tests.cluster import monitor_swarm
from tests.cluster.monitor_swarm import Swarm

PEERS = 1000
HISTORY_S = 60.0


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


async def stop(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        await process.wait()


async def first_picture(folder: Path) -> AsyncIterator[Row]:
    """From the start of the command to a picture of all 20 peers."""
    async with monitor_swarm.swarm(folder) as swarm:
        swarm.add_peers(20)
        swarm.add_fences()
        swarm.start_run([1, 4, 7, 5])
        await swarm.board.flush()
        times = []
        for _ in range(3):
            start = time.monotonic()
            process, url = await monitor_swarm.start_monitor(swarm.address, folder)
            picture = await asyncio.to_thread(fetch, f"{url}api/picture")
            times.append(time.monotonic() - start)
            await stop(process)
            if len(picture["peers"]) != 20 or len(picture["runs"]) != 1:
                raise SystemExit(f"the first picture has {len(picture['peers'])} peers of 20")
        yield at_most("20 peers: start to first picture, middle of 3", sorted(times)[1], 3.0, " s")


async def lookups(swarm: Swarm, label: str) -> tuple[Row, int]:
    async with reading_board((swarm.address,)) as board:
        observer = Observer(board)
        await observer.look()
        before = board.lookups
        await observer.look()
        picture = (await observer.look()).picture
        count = (board.lookups - before) // 2
        fences, runs = len(picture.fences), len(picture.runs)
        bound = 16 + 5 * fences + 2 * runs
        case = f"{label}: look-ups a refresh, {fences} fences, {runs} runs"
        return at_most(case, count, bound), count


async def interactive(url: str, peers: int) -> Row:
    def measure() -> float:
        from tests.cluster.monitor_browser import browser

        with browser() as driver:
            page: Any = driver
            page.get(url)  # once, so that the browser itself is warm
            times = []
            for _ in range(3):
                page.get("about:blank")
                page.get(url)
                end = time.monotonic() + 30
                script = (
                    "return [document.documentElement.dataset.ready, document.getElementById('map')?.dataset.peers]"
                )
                while (found := page.execute_script(script))[0] is None or int(found[1] or 0) < peers:
                    if time.monotonic() > end:
                        raise SystemExit(f"the page shows {found[1]} of {peers} peers after 30 s")
                    time.sleep(0.02)
                times.append(int(found[0]) / 1e3)
            return sorted(times)[1]

    return at_most(f"{peers} peers: page interactive, middle of 3", await asyncio.to_thread(measure), 2.0, " s")


async def thousand(folder: Path, history_s: float) -> AsyncIterator[Row]:
    async with monitor_swarm.swarm(folder) as swarm:
        swarm.add_peers(20)
        swarm.add_fences()
        swarm.start_run([1, 4, 7, 5])
        await swarm.board.flush()
        row, few = await lookups(swarm, "20 peers")
        yield row
        swarm.add_peers(PEERS - 20)
        swarm.add_fences()
        await swarm.board.flush(timeout_s=120)
        row, many = await lookups(swarm, f"{PEERS} peers")
        yield row
        yield at_most(f"look-ups a refresh at {PEERS} peers over those at 20", many / few, 1.0, "x")
        process, url = await monitor_swarm.start_monitor(swarm.address, folder)
        try:
            end = time.monotonic() + history_s
            while time.monotonic() < end:
                await asyncio.sleep(2)
                swarm.advance(2)
            if shutil.which("chromium") and shutil.which("chromedriver"):
                yield await interactive(url, PEERS)
            else:
                yield Row(f"{PEERS} peers: page interactive", "no chromium here", "<= 2 s", None)
            daemon = [c.memory_info().rss for c in psutil.Process(process.pid).children(recursive=True)]
            rss = psutil.Process(process.pid).memory_info().rss
            yield at_most(f"{PEERS} peers, {history_s:.0f} s of history: server's memory", rss / 1e6, 200.0, " MB")
            yield Row("its p2pd's memory", f"{sum(daemon) / 1e6:.0f} MB", "reported", None)
            cpu = psutil.Process(process.pid).cpu_times()
            share = (cpu.user + cpu.system) / history_s
            yield Row(f"{PEERS} peers: server's CPU, one look in 5 s", f"{share:.2f} of a core", "reported", None)
        finally:
            await stop(process)


async def rows(quick: bool) -> list[Row]:
    out = []
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        out += [row async for row in first_picture(Path(a))]
        out += [row async for row in thousand(Path(b), 15.0 if quick else HISTORY_S)]
    return out


def main(args: list[str]) -> int:
    options = arguments(__doc__ or "", "15 s of history instead of 60").parse_args(args)
    return report(uvloop.run(rows(options.quick)), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

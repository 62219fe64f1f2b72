"""How soon our commands answer, and what each process takes: the figures of README.md's table. Rows of `main_job`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.rows import Row, at_most
from tests.cluster.trainer_process import ROOT, start, wait_for_line
from tests.cluster.volunteer_process import Peer

TRIES = 5
STATUS = """
import pathlib, sys
from dht.cli_monitor import main
code = main(["status", "--swarm", sys.argv[1]])
print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


def run(*arguments: str) -> tuple[float, str]:
    """Seconds from start to end, and stderr."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return time.perf_counter() - begin, done.stderr


def help_s(module: str) -> list[float]:
    return [run("-m", module, "--help")[0] for _ in range(TRIES)]


def peak_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3


def rows() -> Iterator[Row]:
    yield at_most("fusion-peer --help", statistics.median(help_s("peer.cli_peer")), 0.5, " s")
    yield Row("fusion-run --help", f"{statistics.median(help_s('peer.cli_run')):.2g} s", "reported", None)
    with tempfile.TemporaryDirectory(prefix="fb-") as place:
        peer = Peer(Path(place) / "peer")
        try:
            [address, *_] = peer.event("joined")["addresses"]
            peer.event("devices")
            looks = [run("-c", STATUS, address) for _ in range(TRIES)]
            yield at_most("fusion-monitor status", statistics.median(s for s, _ in looks), 1.5, " s")
            yield at_most("its memory at the peak", max(int(err.split()[-1]) for _, err in looks) / 1e3, 100, " MB")
            yield at_most("a volunteer's daemon", peak_mb(peer.process.pid), 100, " MB")
            yield Row("its executor before it has work", f"{peak_mb(peer.executor().pid):.0f} MB", "reported", None)
            [p2pd] = [p for p in peer.children() if "p2pd" in p.name()]
            yield Row("its p2pd", f"{peak_mb(p2pd.pid):.0f} MB", "reported", None)
            peer.end()
        finally:
            peer.close()
    with tempfile.TemporaryDirectory(prefix="fb-") as place:
        config = ROOT / "examples" / "gpt2.toml"
        with start(Path(place), "train", config, "--local", "2", "--steps", "100000") as trainer:
            wait_for_line(trainer, "^step ")
            yield Row("fusion-run training the demo", f"{peak_mb(trainer.pid):.0f} MB", "reported", None)
            executors = [
                p for p in psutil.Process(trainer.pid).children(recursive=True) if "peer.executor" in p.cmdline()
            ]
            most = max(peak_mb(p.pid) for p in executors)
            yield Row("an executor with half of the demo's model", f"{most:.0f} MB", "reported", None)
            trainer.terminate()
            trainer.communicate(timeout=60)

"""A volunteer's caps, measured from outside: the counters of its network interface, of its processes, its folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_nat import Node
from tests.netlab.network import Internet, unavailable

WHY_NOT = unavailable()
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is")]
ROOT = Path(__file__).resolve().parent.parent.parent
WINDOW_S, OVER, STEPS = 5.0, 1.03, 6
UP_MBPS, DOWN_MBPS, PIPE_MBPS = 4.0, 16.0, 6.0
BUFFERS_BYTES = 6 << 20  # what p2pd and the sockets take in of a pipe before the sender is slowed down
CAPS = "--upload-mbps", str(UP_MBPS), "--download-mbps", str(DOWN_MBPS)


class Meter:
    """Reads, a few times a second, what passes the only cable of the namespace that process `pid` lives in."""

    def __init__(self, pid: int) -> None:
        self._pid, self._end = pid, threading.Event()
        self.samples: list[tuple[float, int, int, float]] = []  # the counters were read between two times
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(0.2):
            with contextlib.suppress(OSError, IndexError):
                self.samples.append((time.monotonic(), *counters(self._pid), time.monotonic()))

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def most(self, way: int) -> float:
        """Mbps in the fullest WINDOW_S; `way` 1: received, 2: sent."""
        best, first = 0.0, 0
        for last in self.samples:
            while last[0] - self.samples[first + 1][0] >= WINDOW_S if first + 1 < len(self.samples) else False:
                first += 1
            span = last[3] - self.samples[first][0]
            if span >= WINDOW_S:
                best = max(best, (last[way] - self.samples[first][way]) * 8 / 1e6 / span)
        return best


def counters(pid: int) -> tuple[int, int]:
    """(bytes received, bytes sent)."""
    text = Path(f"/proc/{pid}/net/dev").read_text("ascii")
    figures = next(line for line in text.splitlines() if "wan:" in line).split(":")[1].split()
    return int(figures[0]), int(figures[8])


@pytest.fixture
def net() -> Iterator[Internet]:
    with Internet(("one", "two", "desk", "home1/nat", "home2/nat")) as internet:
        yield internet


def train(net: Internet, folder: Path, nodes: list[Node]) -> None:
    run = subprocess.run(
        net.command(
            "desk", sys.executable, "-m", "tests.netlab.train_once", str(folder / "run"), str(STEPS),
            ",".join(n.peer for n in nodes), *(n.address for n in nodes),
        ),
        input="\n" * (STEPS + 1), capture_output=True, text=True, cwd=ROOT, timeout=600,
        env={**os.environ, "FUSION_HOME": str(folder / "desk"), "WIDTH": "512"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_upload_download_and_the_month_hold_while_a_model_trains(net: Internet, tmp_path: Path) -> None:
    """The state of a stage, activations, gradients, the other stage's tied weight, and the probes of its fence."""
    one = Node(net, "one", tmp_path, *CAPS)
    try:
        with Meter(one.process.pid) as meter, contextlib.closing(Node(net, "two", tmp_path, one.address)) as two:
            one.measured()
            two.measured()
            for node in (one, two):
                node.until("reach", "direct")
            train(net, tmp_path, [one, two])
            time.sleep(2.5)  # the daemon reads what passed every other second
            passed = sum(counters(one.process.pid))
        down, up = meter.most(1), meter.most(2)
        print(f"most in {WINDOW_S:g} s: up {up:.2f} of {UP_MBPS}, down {down:.2f} of {DOWN_MBPS} Mbps; {passed} bytes")
        assert passed > 8e6, "the state alone has more"
        assert up <= UP_MBPS * OVER
        assert down <= DOWN_MBPS * OVER
        counted = json.loads((one.home / "traffic.json").read_text())["total_bytes"]
        print(f"the month counts {counted / passed:.3f} of what the interface counts")
        assert 0.85 < counted / passed < 1.15
    finally:
        one.close()
    one = Node(net, "one", tmp_path, "--monthly-gb", "0.01")  # less than has passed
    try:
        one.until("state", "paused")
        assert "--monthly-gb" in one.status()["paused_for"]
    finally:
        one.close()


def load(net: Internet, folder: Path, name: str, host: Node, *what: str) -> subprocess.Popen[str]:
    (folder / name).mkdir()
    command = net.command(name, sys.executable, "-m", "tests.netlab.load", str(folder / name), host.address, *what)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_probes_keep_to_the_caps_and_measure_them(net: Internet, tmp_path: Path) -> None:
    with (
        contextlib.closing(Node(net, "one", tmp_path, *CAPS)) as one,
        Meter(one.process.pid) as meter,
        load(net, tmp_path, "two", one, "probe") as prober,
    ):
        assert prober.stdout is not None
        found = json.loads(prober.stdout.readline())
        down, up = meter.most(1), meter.most(2)
        print(f"most in {WINDOW_S:g} s: up {up:.2f} of {UP_MBPS}, down {down:.2f} of {DOWN_MBPS} Mbps; probes {found}")
        assert 0 < up <= UP_MBPS * OVER
        assert 0 < down <= DOWN_MBPS * OVER
        assert all(theirs * 8 / 1e6 <= UP_MBPS for _, theirs in found)


def test_a_pipe_takes_no_more_than_was_offered(net: Internet, tmp_path: Path) -> None:
    with contextlib.closing(Node(net, "one", tmp_path, "--relay-mbps", str(PIPE_MBPS))) as host:
        with contextlib.closing(Node(net, "two", tmp_path, host.address)):  # who offers pipes must have been dialled
            host.until("reach", "direct")
        with load(net, tmp_path, "home1", host, "take") as taker:
            assert taker.stdout is not None and taker.stdin is not None
            peer = taker.stdout.readline().strip()
            before = int(host.status()["piped_bytes"])
            with load(net, tmp_path, "home2", host, "send", peer) as sender, Meter(host.process.pid) as meter:
                assert sender.stdin is not None
                end = time.monotonic() + 400
                while int(host.status()["piped_bytes"]) - before < PIPE_MBPS * 1e6:  # 8 s of the offer
                    assert time.monotonic() < end, host.log.read_text()
                    time.sleep(0.5)
                sender.stdin.close()
            taker.stdin.close()
        seconds, received = meter.samples[-1][3] - meter.samples[0][0], meter.samples[-1][1] - meter.samples[0][1]
        print(
            f"most sent in {WINDOW_S:g} s: {meter.most(2):.2f} of {PIPE_MBPS} Mbps; {received} bytes in {seconds:.1f} s"
        )
        assert 0 < meter.most(2) <= PIPE_MBPS * OVER
        assert received <= PIPE_MBPS * 1e6 / 8 * seconds * OVER + BUFFERS_BYTES

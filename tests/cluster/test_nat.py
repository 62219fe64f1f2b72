"""Peers behind NAT in network namespaces, MTU 1280, UDP blocked: they join, are seen as what they are, and train."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dht.addresses import is_relayed
from tests.cluster import plain
from tests.netlab.network import Internet, unavailable
from tests.netlab.train_once import MICRO, SAMPLES

WHY_NOT = unavailable()
pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is")]
ROOT = Path(__file__).resolve().parent.parent.parent


class Node:
    """`fusion-peer join` in a namespace."""

    def __init__(self, net: Internet, name: str, folder: Path, *arguments: str) -> None:
        self.name, self.home, self._net = name, folder / name, net
        self.home.mkdir(exist_ok=True)
        lines, end = os.pipe()
        self.log = self.home / "log.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                net.command(
                    name, sys.executable, "-m", "peer.cli_peer", "join", *arguments, "--home", str(self.home),
                    "--listen", "/ip4/0.0.0.0/tcp/4001", "--threads", "1", "--memory", "1GiB", "--verbose",
                    "--ready-fd", str(end),
                ),
                pass_fds=(end,), stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip
        os.close(end)
        self._ready = os.fdopen(lines)
        line = self._ready.readline()
        assert line, self.log.read_text()
        self.peer: str = json.loads(line)["peer"]

    def measured(self) -> None:
        assert self._ready.readline(), self.log.read_text()

    @property
    def address(self) -> str:
        return f"/ip4/{self._net.address(self.name)}/tcp/4001/p2p/{self.peer}"

    def status(self) -> dict[str, Any]:
        out = subprocess.run(
            [sys.executable, "-m", "peer.cli_peer", "status", "--json", "--home", str(self.home)],
            check=True, capture_output=True, text=True, cwd=ROOT, timeout=300,
        )  # fmt: skip
        return dict(json.loads(out.stdout))

    def until(self, what: str, wanted: Any, timeout_s: float = 400.0) -> None:
        """Its status says so."""
        end = time.monotonic() + timeout_s
        while (found := self.status()[what]) != wanted and not (isinstance(found, list) and len(found) == wanted):
            assert time.monotonic() < end, f"{self.name}: {what} = {found!r}\n{self.log.read_text()}"
            time.sleep(0.5)

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(240)

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.terminate()
                self.process.wait(60)
            self.process.kill()
        self.process.wait()
        self._ready.close()


@contextlib.contextmanager
def swarm(folder: Path) -> Iterator[dict[str, Node]]:
    """Two public peers that offer pipes, two behind NAT."""
    with Internet(("one", "two", "home1/nat", "home2/nat", "desk/nat"), mtu=1280, udp=False) as net:
        nodes: dict[str, Node] = {}
        try:
            nodes["one"] = Node(net, "one", folder, "--relay-mbps", "200")
            boot = [nodes["one"].address]
            nodes["two"] = Node(net, "two", folder, *boot, "--relay-mbps", "200")
            boot.append(nodes["two"].address)
            for name in ("home1", "home2"):
                nodes[name] = Node(net, name, folder, *boot)
            nodes["one"].until("reach", "direct")
            nodes["two"].until("reach", "direct")
            yield nodes
        finally:
            for node in reversed(nodes.values()):
                node.close()


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """It ends with the block."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def reference(steps: int) -> list[float]:
    import torch

    model = plain.gpt2()
    batches = plain.token_batches(steps, SAMPLES)
    return plain.train(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=MICRO)


def test_peers_behind_nat_train_through_a_pipe_and_go_on_when_its_host_dies(tmp_path: Path) -> None:
    with swarm(tmp_path) as nodes:
        homes = [nodes["home1"], nodes["home2"]]
        for home in homes:
            home.until("rests_at", 2)
            assert home.status()["reach"] in ("relay", "none")
            home.measured()
        net = homes[0]._net
        command = net.command(
            "desk", sys.executable, "-m", "tests.netlab.train_once", str(tmp_path / "run"), "4",
            ",".join(h.peer for h in homes), nodes["one"].address, nodes["two"].address,
        )  # fmt: skip
        losses: list[float] = []
        killed = ""
        heard = []
        with (tmp_path / "trainer.txt").open("w+") as errors, ending(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env={**os.environ, "FUSION_HOME": str(tmp_path / "desk")},
            )
        ) as trainer:  # fmt: skip
            assert trainer.stdin is not None and trainer.stdout is not None
            for line in trainer.stdout:
                said = json.loads(line)
                heard.append(line)
                if said["event"] == "ready":
                    assert sorted(said["hosts"]) == sorted(h.peer for h in homes), "".join(heard)
                if said["event"] == "step":
                    losses.append(said["loss"])
                    if len(losses) == 2:  # the host that carries most dies
                        busiest = max((nodes["one"], nodes["two"]), key=lambda n: int(n.status()["piped_bytes"]))
                        assert busiest.status()["pipes"] > 0 and busiest.status()["piped_bytes"] > 100_000
                        killed = busiest.name
                        busiest.end()
                if said["event"] in ("ready", "step"):
                    trainer.stdin.write("\n")
                    trainer.stdin.flush()
            assert trainer.wait(300) == 0, Path(errors.name).read_text() + "".join(heard)
        assert losses == pytest.approx(reference(4), rel=1e-5)
        other = nodes["two" if killed == "one" else "one"]
        assert other.status()["piped_bytes"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_after_an_outage_of_three_minutes_a_peer_is_back_within_60_s(tmp_path: Path) -> None:
    with Internet(("one", "home/nat")) as net:
        nodes: list[Node] = []
        try:
            nodes.append(Node(net, "one", tmp_path))
            nodes.append(Node(net, "home", tmp_path, nodes[0].address))
            for node in nodes:
                node.until("peers", 2)
            net.unplug("home")
            time.sleep(180)
            for node in nodes:
                assert node.status()["peers"] != 2, node.name
            net.plug("home")
            start = time.monotonic()
            for node in nodes:
                node.until("peers", 2)
            assert time.monotonic() - start <= 60
            print(f"back after {time.monotonic() - start:.0f} s")
        finally:
            for node in reversed(nodes):
                node.close()


class Bare:
    """`tests.netlab.punch_peer` in a namespace."""

    def __init__(self, net: Internet, name: str, folder: Path, kind: str, *boot: str) -> None:
        (folder / name).mkdir()
        self.log = folder / name / "log.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                net.command(
                    name, sys.executable, "-m", "tests.netlab.punch_peer", str(folder / name), kind, *boot
                ),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            )  # fmt: skip
        own = self._line()
        self.peer = own[0].rpartition("/")[2]
        self.address = f"/ip4/{net.address(name)}/tcp/4001/p2p/{self.peer}"

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def ask(self, what: str, peer: str = "") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, peer]) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.mark.soak
def test_two_private_peers_end_with_a_direct_connection_and_leave_their_pipe(tmp_path: Path) -> None:
    """Routers that keep ports and drop what nobody inside asked for. The hole is punched in a quiet moment."""
    publics = [f"pub{k}" for k in range(4)]  # libp2p believes an address once four others have seen it
    with Internet((*publics, "home1/cone", "home2/cone")) as net, contextlib.ExitStack() as stack:
        boot: list[str] = []
        hosts: list[Bare] = []
        for name in publics:
            hosts.append(stack.enter_context(contextlib.closing(Bare(net, name, tmp_path, "public", *boot))))
            boot.append(hosts[-1].address)
        one, two = (
            stack.enter_context(contextlib.closing(Bare(net, name, tmp_path, "private", *boot)))
            for name in ("home1", "home2")
        )
        end = time.monotonic() + 700

        def until(what: str, found: Callable[[], bool]) -> None:
            while not found():
                assert time.monotonic() < end, f"{what}\n{one.log.read_text()}{two.log.read_text()}"
                time.sleep(1)

        def piped() -> int:
            return sum(int(host.ask("piped")) for host in hosts)

        def direct() -> bool:
            one.ask("say", two.peer)  # keeps the stream in use, and opens another when it has ended
            ways = one.ask("connected", two.peer), two.ask("connected", one.peer)
            return all(any(not is_relayed(a) for a in way) for way in ways)

        until("they rest", lambda: bool(one.ask("rested")) and bool(two.ask("rested")))
        until("they talk", lambda: one.ask("say", two.peer) == "ping")
        assert piped() > 0
        begun = time.monotonic()
        until("a direct connection", direct)
        print(f"connected directly after {time.monotonic() - begun:.0f} s")

        def left() -> bool:
            before = piped()
            return [one.ask("say", two.peer) for _ in range(5)] == ["ping"] * 5 and piped() == before

        until("the stream leaves the pipe", left)

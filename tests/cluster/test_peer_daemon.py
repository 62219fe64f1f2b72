"""A real volunteer on loopback: join, status, invite, pause, a killed executor, signals, bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.volunteer_process import Peer

pytestmark = pytest.mark.timeout(900)


def cli(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    where = ["--home", str(home)] if home else []
    return subprocess.run(
        [sys.executable, "-m", "peer.cli_peer", *arguments, *where], capture_output=True, text=True, timeout=300
    )


def status(home: Path) -> dict[str, Any]:
    answer = cli("status", "--json", home=home)
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    running = Peer(tmp_path / "a")
    yield running
    running.close()


def test_a_volunteer_from_start_to_end(peer: Peer, tmp_path: Path) -> None:
    """Join, be measured, answer the local commands; a second one joins; SIGTERM leaves no process behind."""
    joined = peer.event("joined")
    assert joined["addresses"][0].startswith("/ip4/127.0.0.1/tcp/")
    assert (peer.home / "identity").stat().st_mode & 0o777 == 0o600
    second = Peer(tmp_path / "b", joined["addresses"][0])
    try:
        assert second.event("joined")["peer"] != joined["peer"]
        peer.event("devices")
        now = status(peer.home)
        assert now["peer"] == joined["peer"]
        assert now["state"] == "free"
        assert now["devices"][0]["state"] == "ready"
        assert now["devices"][0]["flops_per_s"] > 1e8
        assert now["devices"][0]["cap_bytes"] == 1 << 30
        assert now["daemon_bytes"] < 100 << 20
        assert "invite" not in {k for k, v in now.items() if v}
        invite = cli("invite", home=peer.home).stdout.strip()
        assert invite == f"fusion-peer join {joined['addresses'][0]}"
        assert json.loads(cli("pause", "--json", home=peer.home).stdout)["state"] == "paused"
        assert json.loads(cli("resume", "--json", home=peer.home).stdout)["state"] == "free"
        left = cli("leave", home=second.home)
        assert left.returncode == 0, left.stderr
        assert second.process.wait(240) == 0
    finally:
        second.close()
    children = peer.children()
    assert len(children) == 2  # p2pd and the executor
    assert peer.end() == 0
    assert not psutil.wait_procs(children, timeout=240)[1]
    assert not (peer.home / "peer.json").exists()
    gone = cli("status", home=peer.home)
    assert gone.returncode == 2
    assert "fusion-peer join" in gone.stderr
    assert len(gone.stderr.strip().splitlines()) == 1


def test_an_invitation_holds_name_and_key_and_lets_others_in(tmp_path: Path) -> None:
    """It is the running peer's, whatever the shell that asks has in its environment."""
    (tmp_path / "key").write_text(key := "5a" * 32)
    (tmp_path / "key").chmod(0o600)
    first = Peer(tmp_path / "a", "--swarm-name", "home-lab", "--swarm-key", str(tmp_path / "key"))
    others: list[Peer] = []
    try:
        address = first.event("joined")["addresses"][0]
        invite = cli("invite", home=first.home).stdout.strip()
        assert invite == f"fusion-peer join {address} --swarm-name home-lab --swarm-key {key}"
        assert key not in cli("status", "--json", home=first.home).stdout
        assert "  swarm home-lab, private\n" in cli("status", home=first.home).stdout
        others.append(Peer(tmp_path / "b", *invite.split()[2:]))
        others[0].event("joined")
        others.append(Peer(tmp_path / "c", address, "--swarm-name", "other", "--swarm-key", key, "--give-up-s", "2"))
        assert others[1].process.wait(400) == 2
        assert "name or key" in others[1].log.read_text()
    finally:
        for one in (first, *others):
            one.close()


def test_the_daemon_never_loads_torch_and_the_executor_is_replaced_when_it_dies(peer: Peer) -> None:
    peer.event("joined")
    maps = Path(f"/proc/{peer.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    peer.event("devices")
    first = status(peer.home)["devices"][0]["pid"]
    assert "libtorch" in Path(f"/proc/{first}/maps").read_text()
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 400
    while (device := status(peer.home)["devices"][0])["state"] != "ready" or device["pid"] == first:
        assert time.monotonic() < end
        psutil.wait_procs([psutil.Process(peer.process.pid)], timeout=0.5)  # ends early if the daemon dies
        assert peer.process.poll() is None
    assert "killed by signal 9" in peer.log.read_text()
    assert peer.end(signal.SIGINT) == 0


def test_it_ends_when_told_while_still_starting(peer: Peer) -> None:
    peer.event("joined")
    children = peer.children()
    assert peer.end() == 0
    assert not psutil.wait_procs(children, timeout=240)[1]


def test_an_executor_does_not_outlive_a_killed_daemon(peer: Peer) -> None:
    peer.event("joined")
    peer.event("devices")
    children = peer.children()
    peer.process.kill()
    assert not psutil.wait_procs(children, timeout=240)[1]


DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJafHNHDXap1z4LiCt1RJQQje4SB9Hy9hKqBVkdoeYyCM"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "nonsense"),
        (["/ip4/127.0.0.1/tcp/4001"], 2, "/p2p/12D3KooW"),
        (["--hours", "late"], 2, "22:00-07:00"),
        (["--runs", "xyz"], 2, "hex digits"),
        (["--device", "tpu"], 2, "cuda:all"),
        (["--memory", "lots"], 2, "6GiB"),
        (["--memory", "900TiB"], 2, "more than this host has"),
        (["--upload-mbps", "-3"], 2, "0.01"),
        (["--dead-s", "1"], 2, "--beat-s"),
        ([DEAD, "--give-up-s", "0.1"], 2, "127.0.0.1/tcp/9"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    answer = cli("join", "--loopback", *arguments, home=tmp_path / "home")
    assert answer.returncode == code, answer.stderr
    assert words in answer.stderr.strip().splitlines()[-1]
    assert "Traceback" not in answer.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        answer = cli("join", "--listen", f"/ip4/127.0.0.1/tcp/{port}", home=tmp_path / "home")
    assert answer.returncode == 2
    assert str(port) in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_help_answers_at_once_and_loads_nothing_heavy() -> None:
    code = "import sys; from peer.cli_peer import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'hivemind', 'cryptography', 'msgspec', 'uvloop') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240).stdout
    assert "exit codes:" in out
    assert out.strip().endswith("[]")

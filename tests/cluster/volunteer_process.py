"""A real `fusion-peer join` on loopback for tests: its JSON lines, its children, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def kill_family(pid: int) -> None:
    """A process and its children, some of which may just end by themselves."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Peer:
    """Started in a session of its own; `close` leaves nothing behind."""

    def __init__(self, home: Path, *arguments: str, memory: str = "1GiB", threads: int = 1) -> None:
        self.home = home
        self._lines, write_end = os.pipe()
        self._buffer = b""
        home.mkdir(exist_ok=True)
        self.log = home / "log.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "peer.cli_peer", "join", *arguments, "--loopback", "--home", str(home),
                    "--threads", str(threads), "--memory", memory, "--ready-fd", str(write_end),
                ],
                pass_fds=(write_end,), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        os.close(write_end)

    def event(self, name: str, timeout_s: float = 400.0) -> dict[str, Any]:
        """The next JSON line, which must be this event."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._lines], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._lines, 4096) if readable else b""
            assert data, f"no {name!r}: {self.log.read_text()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found = json.loads(line)
        assert found["event"] == name
        return dict(found)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def executor(self) -> psutil.Process:
        return next(p for p in self.children() if "peer.executor" in p.cmdline())

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 240.0) -> int:
        """Signal it; its exit code. 10 s are promised, on a machine that is not this busy."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        os.close(self._lines)
        if self.process.poll() is None:
            kill_family(self.process.pid)
        self.process.wait()

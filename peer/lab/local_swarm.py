"""Volunteers as processes of this machine: the embedded swarm of `--local N`, and a trainer's own device.

Each is a real `fusion-peer join` on loopback in a session of its own, so that Ctrl-C reaches the trainer first. They
end with `stop`, and by themselves when this process dies however it dies.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dht.p2pd import clear_leftovers
from fusion_p2p.errors import InputError
from peer.errors import PeerError
from peer.interrupts import KILL_AFTER_S, bound_command, undisturbed
from peer.offers import SwarmLinks

READY_TIMEOUT_S = 300.0  # its end is noticed at once; a machine that is busy starts it slowly
MAX_READY_BYTES = 4096

_running: set[subprocess.Popen[bytes]] = set()
_temporary: set[Path] = set()
_OWNER = os.getpid()


def end_all() -> None:
    """For a process that ends now: every volunteer started here is killed, temporary folders are removed."""
    if os.getpid() != _OWNER:
        return  # a forked child has none
    for process in list(_running):
        process.kill()
    for process in list(_running):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    for path in list(_temporary):
        shutil.rmtree(path, ignore_errors=True)


atexit.register(end_all)  # for what Ctrl-C left between two lines


def _temporary_folder(prefix: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=prefix))
    _temporary.add(path)
    return path


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    _temporary.discard(path)


class VolunteerFailed(PeerError):
    """A volunteer process ended, or did not get ready in time."""


class Ready(msgspec.Struct, frozen=True):
    """What `fusion-peer join --ready-fd` writes once it has joined: one line of JSON."""

    peer: str
    addresses: tuple[str, ...]


class Volunteer:
    """One `fusion-peer join` process, its state in `home`."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, log: Path) -> None:
        self._process, self.home, self.log = process, home, log
        self.ready = Ready("", ())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @classmethod
    def launch(cls, home: Path, arguments: Sequence[str], before: Sequence[str] = ()) -> tuple[Volunteer, int]:
        """Start it; the volunteer and the descriptor on which it will say that it is ready. `before` is put in front
        of the command: something that execs the rest."""
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = home / "log.txt"
        read_end, write_end = os.pipe()
        join = ["join", *arguments, "--ready-fd", str(write_end)]
        command = [*before, *bound_command(signal.SIGTERM, "peer.cli_peer", *join)]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_end,),
                    start_new_session=True,
                    env=os.environ | {"FUSION_HOME": str(home)},
                )
            _running.add(process)
        finally:
            os.close(write_end)
        return cls(process, home, log), read_end

    def wait_ready(self, descriptor: int, until: float) -> Ready:
        """Read its first line. VolunteerFailed with the end of its log if it ends or is not ready at `until`."""
        line = b""
        try:
            while b"\n" not in line and len(line) < MAX_READY_BYTES:
                readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
                piece = os.read(descriptor, MAX_READY_BYTES) if readable else b""
                if not piece:
                    raise VolunteerFailed(f"a volunteer process did not get ready: {self._last_words()}")
                line += piece
        finally:
            os.close(descriptor)
        self.ready = msgspec.json.decode(line.split(b"\n")[0], type=Ready)  # that its devices are measured may follow
        return self.ready

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, as a power cut would; what it leaves behind is its parent-death signal's business."""
        self._process.kill()
        self._process.wait()
        _running.discard(self._process)

    def join(self, until: float) -> None:
        """Wait until `until`, then kill and sweep."""
        try:
            self._process.wait(max(0.1, until - time.monotonic()))
            _running.discard(self._process)
        except subprocess.TimeoutExpired:
            self.kill()
            clear_leftovers()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text("utf-8", "replace").strip().splitlines()
            if lines:
                return lines[-1][:300]
        return f"no word within {READY_TIMEOUT_S:.0f} s" if self._process.poll() is None else "it ended without a word"


class OwnDevice:
    """The trainer's machine as a volunteer for its own runs."""

    def __init__(self, addresses: tuple[str, ...], owner: str) -> None:
        self._home = _temporary_folder("fusion-own-")
        self._volunteer, self._descriptor = Volunteer.launch(self._home, [*addresses, "--runs", owner])

    @classmethod
    async def start(cls, addresses: tuple[str, ...], owner: str) -> OwnDevice:
        """Join `addresses` for the runs of `owner` (hex key) alone. VolunteerFailed if it does not get ready."""
        own = cls(addresses, owner)
        try:
            until = time.monotonic() + READY_TIMEOUT_S
            await asyncio.to_thread(own._volunteer.wait_ready, own._descriptor, until)
        except BaseException:
            own._volunteer.terminate()  # which also ends the thread that reads its first line
            await own.stop()
            raise
        return own

    @property
    def ready(self) -> Ready:
        return self._volunteer.ready

    async def stop(self) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._volunteer.terminate()
        self._volunteer.join(time.monotonic() + KILL_AFTER_S)
        _remove(self._home)


class LocalSwarm:
    """`peers` volunteers on loopback, each with `threads_per_peer` threads and `memory` ("" the default, "2GiB").

    A context manager; `Run(swarm=LocalSwarm(...))` enters it. `home` None: a temporary folder, removed at the end.
    `beat_s`, `dead_s`: their heartbeat, and the silence after which they give another peer up.
    Raises VolunteerFailed.
    """

    def __init__(
        self,
        peers: int = 4,
        *,
        threads_per_peer: int = 1,
        memory: str = "",
        home: str | os.PathLike[str] | None = None,
        beat_s: float = 2.0,
        dead_s: float = 8.0,
    ) -> None:
        if peers < 1:
            raise InputError(f"LocalSwarm(peers={peers}): at least 1 volunteer is needed")
        self.peers = peers
        self._threads, self._memory = threads_per_peer, memory
        self.beat_s, self.dead_s = beat_s, dead_s
        self._launched = itertools.count()
        self._home = None if home is None else Path(home)
        self._root: Path | None = None
        self.volunteers: list[Volunteer] = []

    # What a run asks of it.
    loopback = True  # it is reached on 127.0.0.1 only
    every_device = True  # each volunteer gets a stage
    ready_s = READY_TIMEOUT_S  # for all volunteers to join
    gather_s = 300.0  # for all volunteers to have measured their devices

    @property
    def links(self) -> SwarmLinks | None:
        """What is known of the links between its volunteers beforehand; None: what they measure counts."""
        return None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the volunteers that are there, the longest-standing two: the others and the trainer join them."""
        return tuple(a for v in [v for v in self.alive if v.ready.peer][:2] for a in v.ready.addresses)

    @property
    def alive(self) -> list[Volunteer]:
        """Those whose process has not ended."""
        return [v for v in self.volunteers if v.is_alive]

    def __enter__(self) -> Self:
        self._root = self._home or _temporary_folder("fusion-local-")
        until = time.monotonic() + self.ready_s
        try:
            first = self._launch(())
            first[0].wait_ready(first[1], until)
            rest = [self._launch(self.addresses) for _ in range(self.peers - 1)]
            for volunteer, descriptor in rest:
                volunteer.wait_ready(descriptor, until)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def add(self) -> Volunteer:
        """Start one volunteer more and wait until it is ready; raises VolunteerFailed."""
        volunteer, descriptor = self.launch(self.alive)
        volunteer.wait_ready(descriptor, time.monotonic() + READY_TIMEOUT_S)
        return volunteer

    def launch(self, known: Sequence[Volunteer]) -> tuple[Volunteer, int]:
        """Start one more, which joins those `known`; it, and the descriptor for its `wait_ready`."""
        return self._launch([a for v in known for a in v.ready.addresses])

    def find(self, peer: str) -> Volunteer:
        """The volunteer with this peer id."""
        return next(v for v in self.volunteers if v.ready.peer == peer)

    def stop(self) -> None:
        """End every volunteer: SIGTERM to all, SIGKILL after KILL_AFTER_S. Idempotent; a second Ctrl-C waits for it."""
        with undisturbed():
            until = time.monotonic() + KILL_AFTER_S
            for volunteer in self.volunteers:
                volunteer.terminate()
            for volunteer in self.volunteers:
                volunteer.join(until)
            self.volunteers.clear()
            if self._home is None and self._root is not None:
                _remove(self._root)
                self._root = None

    def _launch(self, addresses: Sequence[str]) -> tuple[Volunteer, int]:
        root = self._root
        if root is None:
            raise InputError("the local swarm is not running; use it inside: with LocalSwarm(...) as swarm")
        number = next(self._launched)
        where, before = self._place(number)
        arguments = [*addresses, "--threads", str(self._threads), *where]
        arguments += ["--beat-s", str(self.beat_s), "--dead-s", str(self.dead_s)]
        if self._memory:
            arguments += ["--memory", self._memory]
        launched = Volunteer.launch(root / f"peer-{number}", arguments, before)
        self.volunteers.append(launched[0])
        return launched

    def _place(self, number: int) -> tuple[Sequence[str], Sequence[str]]:
        """Options that say where volunteer `number` listens, and what is put in front of its command."""
        return ("--loopback",), ()

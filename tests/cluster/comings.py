"""Volunteers that come and go beside a run, one after another, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peer.api import LocalSwarm, Run
from peer.lab.local_swarm import READY_TIMEOUT_S, Volunteer

STAY = 2  # volunteers that never leave; the swarm's addresses
PAIR = 2  # that come together, and go
GOES_S = 240.0  # for a volunteer that says goodbye; long, for the machine may be busy
GREETED_S = 300.0  # for a volunteer that came to be known to the trainer
POOL_THREADS = 6  # of a process's own pool, made as they are first needed
FILES = 12  # snapshots that a buddy has not fetched or not let go yet
WARM_UP_SETS = 3  # before two are kept everywhere
PROMPT_S = 1.0  # between looks at what is left
PAUSE_S = 0.05  # between steps while others come and go: whoever starts wants the CPU as well


@dataclass(frozen=True)
class Held:
    """What the trainer and the volunteers that stay hold, their children included. `descriptors`: open files, pipes and
    sockets; `files`: in the run's folder and those of all volunteers that are there."""

    processes: int
    descriptors: int
    threads: int
    files: int
    rss_bytes: int


@dataclass(frozen=True)
class Visits:
    """`behind`: processes, socket folders and records of those that left, and what runs beside the swarm that did not
    before. `seconds`: it took. `step_s`: median of a step. `moves`: stages that went to another peer."""

    number: int
    seconds: float
    before: Held
    after: Held
    step_s_before: float
    step_s_after: float
    moves: int
    behind: tuple[str, ...]

    def grown(self) -> dict[str, tuple[int, int]]:
        """What is held clearly more of than before: name -> (before, after). Some connections and pool threads come and
        go by themselves; what a hundred visitors leave behind is more. Memory apart, which no count of things tells."""
        count = self.before.processes
        spare = {"processes": 0, "descriptors": 3 * count, "threads": POOL_THREADS * count, "files": FILES}
        found = {name: (getattr(self.before, name), getattr(self.after, name)) for name in spare}
        return {name: pair for name, pair in found.items() if pair[1] > pair[0] + spare[name]}


def visits(
    swarm: LocalSwarm,
    run: Run,
    run_dir: Path,
    number: int,
    *,
    every_s: float = 0.0,
    killed: Callable[[int], bool] = lambda k: False,
    settle_s: float = 60.0,
    steps: int = 20,
    told: Callable[[str], None] = lambda text: None,
) -> Visits:
    """`number` volunteers join and as many leave, PAIR at a time, the longest-standing visitors of `swarm` first: by
    SIGTERM, or where `killed(k)` by SIGKILL. One join and one leave every `every_s` seconds at most; STAY volunteers
    stay. The next to come start while those before them settle in. What is held is compared once all is quiet again,
    or after `settle_s`."""
    stay, visitors = swarm.volunteers[:STAY], deque(swarm.volunteers[STAY:])
    gone: list[_Gone] = []
    step_s_before = _quiet_steps(run, steps)
    before = _held(stay, swarm, run_dir)
    begin, hosts, moves = time.monotonic(), _hosts(run), 0
    next_pair = [swarm.launch(stay) for _ in range(PAIR)]
    for k in range(0, number, PAIR):
        coming, next_pair = next_pair, []
        for newcomer, descriptor in coming:
            newcomer.wait_ready(descriptor, time.monotonic() + READY_TIMEOUT_S)
            _until_greeted(run, newcomer)
            visitors.append(newcomer)
        if k + PAIR < number:
            next_pair = [swarm.launch(stay) for _ in range(PAIR)]
        leavers = [_Gone(visitors.popleft()) for _ in range(PAIR)]
        gone += leavers
        for n, leaver in enumerate(leavers):
            leaver.leave(killed(k + n))
        while time.monotonic() < begin + (k + PAIR) * every_s or any(leaver.is_here() for leaver in leavers):
            _step(run)
        moves += sum(a != b for a, b in zip(hosts, _hosts(run), strict=True))
        hosts = _hosts(run)
        told(f"{k + PAIR} of {number} came and went in {time.monotonic() - begin:.0f} s; {moves} stages moved")
    seconds = time.monotonic() - begin
    step_s_after = _quiet_steps(run, steps)
    until = time.monotonic() + settle_s
    while True:
        after, behind = _held(stay, swarm, run_dir), tuple(_behind(gone, swarm.addresses))
        found = Visits(number, seconds, before, after, step_s_before, step_s_after, moves, behind)
        if (not behind and not found.grown()) or time.monotonic() >= until:
            return found
        time.sleep(PROMPT_S)


class _Gone:
    """A volunteer that leaves: which processes and which socket folder were its own."""

    def __init__(self, volunteer: Volunteer) -> None:
        self.volunteer, self.peer = volunteer, volunteer.ready.peer
        self.family = _family([volunteer.pid])
        listening = (argument for p in self.family for argument in _command(p) if argument.startswith("-listen=/unix"))
        self.folders = [Path(argument.removeprefix("-listen=/unix")).parent for argument in listening]
        self._until = float("inf")

    def leave(self, killed: bool) -> None:
        self._until = time.monotonic() + GOES_S
        if not killed:
            return self.volunteer.terminate()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.volunteer.kill()

    def is_here(self) -> bool:
        """AssertionError if it was asked to leave long ago."""
        if self.volunteer.is_alive and time.monotonic() > self._until:
            raise AssertionError(f"volunteer {self.peer} was asked to leave and still runs after {GOES_S:.0f} s")
        return self.volunteer.is_alive


def _behind(gone: Sequence[_Gone], addresses: Sequence[str]) -> Iterator[str]:
    peers = {leaver.peer for leaver in gone}
    for leaver in gone:
        yield from (f"process {p.pid}: {' '.join(_command(p))[:80]}" for p in leaver.family if _runs(p))
        yield from (f"folder {folder}" for folder in leaver.folders if folder.exists())
    board = _board(addresses)
    yield from (f"record of peer {p['peer'][-8:]}" for p in board["peers"] if p["peer"] in peers)
    yield from (
        f"stage {s['stage']} of run {r['run'][:8]} at peer {s['peer'][-8:]}"
        for r in board["runs"]
        for s in r["stages"]
        if s["peer"] in peers
    )


def _board(addresses: Sequence[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "dht.cli_monitor",
        "status",
        "--json",
        "--timeout",
        "200",
        "--swarm",
        ",".join(addresses),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _held(stay: Sequence[Volunteer], swarm: LocalSwarm, run_dir: Path) -> Held:
    """With this process's own p2pd; volunteers that come and go are children of this process too."""
    ours = [p for p in psutil.Process().children() if any("p2pd" in word for word in _command(p)[:1])]
    processes = [psutil.Process(), *ours, *_family([v.pid for v in stay])]
    figures = [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in processes]
    folders = [run_dir, *(v.home for v in swarm.alive)]
    files = sum(path.is_file() for folder in folders for path in folder.rglob("*"))
    descriptors, threads, rss = (sum(column) for column in zip(*figures, strict=True))
    return Held(len(processes), descriptors, threads, files, rss)


def _family(pids: Sequence[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return found


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _quiet_steps(run: Run, steps: int) -> float:
    """Complete sets until all old ones are gone; median seconds of `steps` steps."""
    run.train(1)
    found = statistics.median(step.step_time_s for step in run.steps(steps))
    for _ in range(WARM_UP_SETS):
        run.save()
        run.train(1)
    return found


def _step(run: Run) -> None:
    run.train(1)
    time.sleep(PAUSE_S)


def _until_greeted(run: Run, newcomer: Volunteer) -> None:
    """Train on until the trainer knows it: only then may it take what another leaves."""
    until = time.monotonic() + GREETED_S
    assembly = run._opened().session.trainer._live.assembly
    while newcomer.ready.peer not in assembly.linked:
        _step(run)
        if time.monotonic() > until:
            raise AssertionError(f"volunteer {newcomer.ready.peer} is not known to the trainer in {GREETED_S:.0f} s")


def _hosts(run: Run) -> list[str]:
    return [p.peer for p in sorted(run.plan().placement, key=lambda p: p.stage)]

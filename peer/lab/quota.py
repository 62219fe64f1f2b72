"""A peer's share of the CPU: a cgroup's quota where cgroups can be written, else its processes take turns with SIGSTOP.

Periods are short against a stage's work on one micro-batch, so that a peer is slow and not merely often away. A group
has the greatest weight there is: up to its quota it goes before whatever else this machine does, so a share that is
promised is also had on a busy machine. A peer stays on one CPU where all fit so: the kernel hands a quota to CPUs in
slices, and what one thread's CPU does not use of its slice the others of the group miss (with 4 ms in each 20, a
stage's pace differed by 1.8 times from minute to minute).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from peer.lab.bed import Command

PERIOD_S = 0.02
DUTY_S = 0.1  # of a duty cycle: signals are coarse
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
ENDING_S = 30.0  # what was killed needs a turn to die


class Groups(Protocol):
    """How the kernel's quota is set: version 1 and 2 differ in the file."""

    root: Path

    def write(self, group: Path, cores: float) -> None: ...


class GroupsV1:
    """cgroup v1, controller cpu."""

    root = _ROOTS[0]

    def write(self, group: Path, cores: float) -> None:
        (group / "cpu.cfs_period_us").write_text(str(round(PERIOD_S * 1e6)))
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, round(PERIOD_S * cores * 1e6))))
        (group / "cpu.shares").write_text("262144")


class GroupsV2:
    """cgroup v2 with the cpu controller handed down."""

    root = _ROOTS[1]

    def write(self, group: Path, cores: float) -> None:
        (group / "cpu.max").write_text(f"{max(1000, round(PERIOD_S * cores * 1e6))} {round(PERIOD_S * 1e6)}")
        (group / "cpu.weight").write_text("10000")


def groups() -> Groups | None:
    """What this machine lets us write; None: duty cycles have to do."""
    for kind, file in ((GroupsV1(), "cpu.cfs_quota_us"), (GroupsV2(), "cpu.max")):
        probe = kind.root / f"flab-try-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if (probe / file).exists():
                kind.write(probe, 1.0)
                return kind
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                probe.rmdir()
    return None


def pinned(cores: Mapping[str, float], cpus: Iterable[int]) -> dict[str, int]:
    """Each peer's CPU, loads as even as the largest-first rule makes them; {} where a CPU would have to be more than
    one."""
    load = dict.fromkeys(sorted(cpus), 0.0)
    found: dict[str, int] = {}
    for name in sorted(cores, key=lambda n: (-cores[n], n)):
        found[name] = cpu = min(load, key=lambda c: load[c])
        load[cpu] += cores[name]
    return found if max(load.values(), default=0.0) <= 1.0 else {}


class Quotas:
    """`cores` by peer. `open` makes the groups; `command` puts what follows it into one."""

    def __init__(self, prefix: str, cores: Mapping[str, float]) -> None:
        self._prefix, self._cores = prefix, dict(cores)
        self._cpu = pinned(cores, os.sched_getaffinity(0))
        self._kind: Groups | None = None
        self._duty: list[DutyCycle] = []

    @property
    def how(self) -> str:
        """For a report."""
        if self._kind is None:
            return f"SIGSTOP duty cycle of {DUTY_S * 1e3:.0f} ms"
        return f"cgroup CPU quota, period {PERIOD_S * 1e3:.0f} ms" + ", each on one CPU" * bool(self._cpu)

    def open(self) -> None:
        self._kind = groups()
        if self._kind is not None:
            for name, cores in self._cores.items():
                path = self._kind.root / (self._prefix + name)
                path.mkdir(exist_ok=True)
                self._kind.write(path, cores)

    def command(self, name: str) -> Command:
        """What to write before a command. Nothing for whoever has no quota."""
        if self._kind is None or name not in self._cores:
            return ()
        tasks = self._kind.root / (self._prefix + name) / "cgroup.procs"
        pin = ("taskset", "-c", str(self._cpu[name])) if name in self._cpu else ()
        return "sh", "-c", f'echo $$ > {tasks} && exec "$@"', "sh", *pin

    def hold(self, name: str, pid: int) -> None:
        """From now on `pid`, and what it starts, has this peer's share."""
        cores = self._cores.get(name)
        if self._kind is not None and cores is not None:
            (self._kind.root / (self._prefix + name) / "cgroup.procs").write_text(str(pid))
            self._pin(name, pid)
        elif cores is not None and cores < 1:
            self._duty.append(DutyCycle(pid, cores))

    def _pin(self, name: str, pid: int) -> None:
        """All threads of `pid`; those that it makes later are where it is."""
        if name in self._cpu:
            with contextlib.suppress(OSError):  # one that has just ended
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {self._cpu[name]})

    def used_s(self, name: str) -> float | None:
        """CPU seconds that this peer's processes took so far, where the kernel counts them."""
        if self._kind is None:
            return None
        pids: list[str] = []
        with contextlib.suppress(OSError):
            pids = (self._kind.root / (self._prefix + name) / "cgroup.procs").read_text().split()
        total = 0.0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                t = psutil.Process(int(pid)).cpu_times()
                total += t.user + t.system
        return total

    def close(self) -> None:
        """Idempotent. Processes still in a group are ended: they belong to this lab."""
        for duty in self._duty:
            duty.stop()
        self._duty.clear()
        if self._kind is not None:
            for name in self._cores:
                _remove_group(self._kind.root / (self._prefix + name))


def sweep_groups(is_orphan: Callable[[str], bool]) -> None:
    """Remove the groups of owners that are gone, and end what still runs in them."""
    for root in _ROOTS:
        for path in root.glob("flab-*"):
            if is_orphan(path.name):
                _remove_group(path)


def _remove_group(path: Path) -> None:
    end = time.monotonic() + ENDING_S
    while path.is_dir():
        try:
            path.rmdir()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                for pid in (path / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > end:
                return
            time.sleep(0.05)


class DutyCycle:
    """Stops a process and its descendants for the rest of each DUTY_S. p2pd runs on: a link is no slower for it."""

    def __init__(self, pid: int, share: float) -> None:
        self._pid, self._share = pid, share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._turn, name=f"duty cycle {pid}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(5.0)

    def _turn(self) -> None:
        family: list[psutil.Process] = []
        looked = float("-inf")
        while not self._ended.is_set():
            if time.monotonic() - looked > 1.0:
                family, looked = self._family(), time.monotonic()
            self._tell(family, signal.SIGCONT)
            self._ended.wait(DUTY_S * self._share)
            self._tell(family, signal.SIGSTOP)
            self._ended.wait(DUTY_S * (1 - self._share))
        self._tell(family, signal.SIGCONT)

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self._pid)
            return [p for p in (top, *top.children(recursive=True)) if p.name() != "p2pd"]
        return []

    @staticmethod
    def _tell(family: list[psutil.Process], what: signal.Signals) -> None:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(what)

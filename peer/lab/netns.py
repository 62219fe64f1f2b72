"""Builds a `Bed` with `ip` and `tc` as root, and leaves nothing behind.

Names carry the owner's process id and start time. What an owner leaves that was killed is swept by the next lab.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from fusion_p2p.errors import InputError
from peer.lab.bed import (
    CORE,
    LEAST_DELAY_S,
    MOST_BPS,
    TRAINER,
    Bed,
    Command,
    commands,
    namespaces,
    queues,
    rate_commands,
)
from peer.lab.delay import Delays, delays
from peer.lab.quota import Quotas, sweep_groups

COMMAND_S = 60.0
NETNS = Path("/run/netns")
_NAME = re.compile(r"flab-(\d+)-(\d+)-")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")
_open: set[Lab] = set()


class LabUnsupported(InputError):
    """This machine, or this user, cannot build a lab; the text says what is missing."""


def unsupported() -> str:
    """What forbids a lab here, in one line; "" if nothing does. Builds and removes a shaped pair to find out."""
    if os.geteuid() != 0:
        return "a lab makes network namespaces and needs root; run it with sudo"
    for tool in ("ip", "tc", "sysctl"):
        if shutil.which(tool) is None:
            return f"a lab needs the command {tool}; install iproute2 and procps"
    name = prefix() + "try"
    try:
        _run(("ip", "netns", "add", name))
        _run(("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "eth1", "netns", name))
        _run(("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "0"))
        _run(
            ("tc", "-n", name, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", "1mbit")
        )
        rule = ("protocol", "ip", "prio", "1", "u32", "match", "ip", "dst", "10.0.0.0/8", "flowid", "1:1")
        _run(("tc", "-n", name, "filter", "add", "dev", "eth0", "parent", "1:", *rule))
    except LabUnsupported as error:
        return str(error)
    finally:
        _remove(name)
    return ""


def prefix() -> str:
    """Of everything this process makes."""
    return f"flab-{os.getpid()}-{_started(os.getpid())}-"


def _started(pid: int) -> int:
    """Clock ticks since boot at which `pid` began, which tells a reused id from its first owner; -1 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def is_orphan(name: str) -> bool:
    """Whether `name` is a lab's whose owner is gone."""
    found = _NAME.match(name)
    return found is not None and _started(int(found[1])) != int(found[2])


def sweep() -> list[str]:
    """Remove what killed owners left; the namespaces removed."""
    left = [p.name for p in NETNS.glob("flab-*") if is_orphan(p.name)]
    for name in left:
        _remove(name)
    sweep_groups(is_orphan)
    return left


def end_all() -> None:
    """For a process that ends now: its labs go."""
    for lab in list(_open):
        lab.close()


def _run(command: Command) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabUnsupported(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        words = done.stderr.strip() or f"exit code {done.returncode}"
        raise LabUnsupported(f"this machine cannot build a lab: {' '.join(command)}: {words.splitlines()[-1]}")


def _remove(name: str) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=COMMAND_S, check=False)


class Lab:
    """A built bed; a context manager. LabUnsupported, one line, where it cannot be.

    Processes are started with `command` in front of theirs, so that they begin in their peer's namespace and under its
    share of the CPU; with `quotas` False every peer has what the machine gives it.
    """

    def __init__(self, bed: Bed, *, quotas: bool = True) -> None:
        self.bed, self.prefix = bed, prefix()
        self._bits_per_s = {(x.src, x.dst): x.bits_per_s for x in bed.links}
        self.delays = Delays()
        self.quotas = Quotas(self.prefix, {p.name: p.cores for p in bed.peers} if quotas else {})

    def __enter__(self) -> Self:
        sweep()
        why = unsupported()
        if why:
            raise LabUnsupported(why)
        _open.add(self)
        try:
            for command in commands(self.bed, self.prefix):
                _run(command)
            self.quotas.open()
            latency = {(x.src, x.dst): x.latency_s for x in self.bed.links}
            for site, rules in delays(latency, LEAST_DELAY_S).items():
                self.delays.start(site, self.enter(CORE), f"d{site}", f"e{site}", rules)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Processes in it should have ended. Idempotent."""
        self.delays.close()
        self.quotas.close()
        for name in reversed(namespaces(self.bed)):
            if (NETNS / (self.prefix + name)).exists():
                _remove(self.prefix + name)
        _open.discard(self)

    def command(self, name: str) -> Command:
        """What to write before a command so that it runs at this peer."""
        return (*self.quotas.command(name), *self.enter(name))

    def enter(self, name: str) -> Command:
        """The same without a share of the CPU: `quotas.hold` may follow."""
        return "ip", "netns", "exec", self.prefix + name

    def at(self, name: str, work: Callable[[], T]) -> T:
        """`work` on a thread inside that namespace: sockets it makes stay there. Its error is raised here."""
        done: list[T] = []
        failed: list[BaseException] = []

        def inside() -> None:
            try:
                _enter(self.prefix + name)
                done.append(work())
            except BaseException as error:  # raised again below, on the caller's thread
                failed.append(error)

        thread = threading.Thread(target=inside, name=f"at {name}")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that the shaped queues have let pass so far, from site to site: "A-B"."""
        return {
            f"{self.bed.sites[x.src]}-{self.bed.sites[x.dst]}": sum(
                self._passed(space, device, number) for space, device, number in queues(self.bed, x)
            )
            for x in self.bed.links
        }

    def _passed(self, space: str, device: str, number: str) -> int:
        command = ("tc", "-s", "-n", self.prefix + space, "class", "show", "dev", device, "classid", number)
        shown = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False).stdout
        found = re.search(rf"class htb {number} .*?Sent (\d+) bytes", shown, re.DOTALL)
        return int(found[1]) if found else 0

    def used_s(self) -> dict[str, float]:
        """CPU seconds of each peer's processes so far; empty where the kernel does not say."""
        found = {p.name: self.quotas.used_s(p.name) for p in self.bed.peers}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def set_rate(self, src: str, dst: str, bits_per_s: float) -> None:
        """From now on the link from site `src` to site `dst` (or inside one) carries this much; `bed` stays as it was.
        InputError for sites or a rate that there are not."""
        sites = self.bed.sites
        if src not in sites or dst not in sites:
            raise InputError(f"no link {src}-{dst} in this lab; its sites are {', '.join(sites)}")
        link = self.bed.link(sites.index(src), sites.index(dst))
        for command in rate_commands(self.bed, self.prefix, link, bits_per_s):
            _run(command)
        self._bits_per_s[link.src, link.dst] = bits_per_s

    def bits_per_s(self, src: str, dst: str) -> float:
        """What the link from peer `src` to peer `dst` carries now; where nothing is between them, what a lab can."""
        site = {p.name: p.site for p in self.bed.peers}
        return self._bits_per_s.get((site[src], site[dst]), MOST_BPS)

    def listen(self, name: str, address: str) -> socket.socket:
        """A listening TCP socket at a peer's address, port chosen by the kernel."""
        return self.at(name, lambda: socket.create_server((address, 0)))

    @contextlib.contextmanager
    def inside(self, name: str = TRAINER) -> Iterator[None]:
        """The calling thread, and all threads and processes begun on it, in that namespace."""
        with open("/proc/thread-self/ns/net", "rb") as before:
            _enter(self.prefix + name)
            try:
                yield
            finally:
                _set(before.fileno())


def _enter(name: str) -> None:
    with open(NETNS / name, "rb") as file:
        _set(file.fileno())


def _set(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise LabUnsupported(f"cannot enter a network namespace: {os.strerror(code)}")

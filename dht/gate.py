"""Connections capped per address range before anybody has authenticated, in front of p2pd. Linux; no privileges.

p2pd listens with SO_REUSEPORT. A second socket of ours at the same address makes a group of the two, and a program of
the group (classic BPF, which the kernel lets anybody attach to a socket of theirs) tells by the source of each first
packet who gets it: p2pd, or, for ranges that have more than their share, ours, which accepts nothing. What is turned
away costs p2pd nothing, a peer behind such a range tries again by itself, and no byte of anybody else's is touched.
Ranges are counted by looking at the kernel's table of connections; the next look lets a range in again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from dht import addresses
from dht.control import ControlClient
from dht.door import range_of
from dht.errors import DhtError
from dht.probe import dial

log = logging.getLogger("dht.gate")

MAX_PER_RANGE = 128  # connections; a quarter of what p2pd keeps
MAX_PENDING_PER_RANGE = 32  # of these, such as have not authenticated
LOCAL = 4  # times as many for a local network's range: a container's port, or a proxy, shows everybody at one address
MAX_RANGES = 500  # turned away at a time, the fullest first; the program has 4,096 instructions at most
LOOK_S = 0.5
MOST_SKIPPED = 10  # looks that need not read the kernel's table: that takes milliseconds of a core
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD_WORD, _LOAD_HALF, _AND, _EQUAL, _RETURN = 0x20, 0x28, 0x54, 0x15, 0x06
_NETWORK = 0xFFF00000  # offsets from here on count from the IP header
_SOURCE4, _SOURCE6 = _NETWORK + 12, _NETWORK + 8
_P2PD, _AWAY = 0, 1  # place in the group, in the order in which they listen
_STATES = ("01", "03", "08")  # established, half open, closed by the far end only: those that p2pd holds
Remote = tuple[str, int]


# --- pure


def remotes(table: str, port: int) -> list[Remote]:
    """Who is connected to TCP `port` of this host, by the text of /proc/net/tcp or tcp6: (ip, port) of the far ends."""
    found, wanted = [], f":{port:04X}"
    for line in table.splitlines():
        fields = line.split(None, 4)
        if len(fields) == 5 and fields[1].endswith(wanted) and fields[3] in _STATES:
            host, _, far = fields[2].partition(":")
            found.append((_ip(host), int(far, 16)))
    return found


def _ip(digits: str) -> str:
    """The kernel prints each word of an address as a number in its own byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(raw))


def overfull(connected: Iterable[Remote], known: frozenset[Remote], shut: frozenset[str]) -> frozenset[str]:
    """Ranges to turn away: those over their share, and those of `shut` that are not clearly below it yet. `known`: far
    ends that have authenticated."""
    total: Counter[str] = Counter()
    pending: Counter[str] = Counter()
    for remote in connected:
        where = range_of(remote[0])
        total[where] += 1
        pending[where] += remote not in known
    full = {}
    for where, count in total.items():
        share = max(count / MAX_PER_RANGE, pending[where] / MAX_PENDING_PER_RANGE) / _scale(where)
        if share >= (0.75 if where in shut else 1.0):
            full[where] = share
    return frozenset(sorted(full, key=lambda r: (-full[r], r))[:MAX_RANGES])


def room(connected: Iterable[Remote]) -> int:
    """New connections from which on some range may have more than its share; below 1: one may have it now."""
    count = Counter(range_of(remote[0]) for remote in connected)
    left = (MAX_PENDING_PER_RANGE * _scale(where) - n for where, n in count.items())
    return min([MAX_PENDING_PER_RANGE, *left])  # the first: of a range that nobody is connected from


def _scale(where: str) -> int:
    """How many times a range's share it has."""
    return 1 if ipaddress.ip_network(where).is_global else LOCAL


def program(ranges: Iterable[str], *, v6: bool) -> bytes:
    """Instructions (struct sock_filter): _AWAY for a packet whose source lies in one of `ranges`, else _P2PD."""
    code: list[tuple[int, int, int, int]] = []
    if not v6:
        code += [(_LOAD_WORD, 0, 0, _SOURCE4), (_AND, 0, 0, 0xFFFFFF00)]
    for text in sorted(ranges):
        net = ipaddress.ip_network(text)
        if (net.version == 6) != v6:
            continue
        raw = net.network_address.packed
        if v6:  # a /48: one word and a half
            code += [(_LOAD_WORD, 0, 0, _SOURCE6), (_EQUAL, 0, 3, int.from_bytes(raw[:4], "big"))]
            code += [(_LOAD_HALF, 0, 0, _SOURCE6 + 4), (_EQUAL, 0, 1, int.from_bytes(raw[4:6], "big"))]
        else:
            code += [(_EQUAL, 0, 1, int.from_bytes(raw, "big"))]
        code.append((_RETURN, 0, 0, _AWAY))
    code.append((_RETURN, 0, 0, _P2PD))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


# --- the kernel


def _attach(sock: socket.socket, code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    )


def _beside(address: str) -> socket.socket:
    """Our socket in the group of p2pd's at the multiaddr `address`; OSError where there is no such thing."""
    v6 = address.startswith("/ip6")
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with socket.socket(sock.family, sock.type) as other:  # where it is refused nothing has been done yet
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _attach(other, program((), v6=v6))
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((addresses.ip_of(address), addresses.tcp_port(address)))
        sock.listen(0)
        _attach(sock, program((), v6=v6))  # from listening on it is in p2pd's group, which had no program
    except BaseException:
        sock.close()
        raise
    return sock


def _drained(sock: socket.socket) -> int:
    """How many waited in the short queue of ours; they are hung up."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.accept()[0].close()
            count += 1
    return count


class Gate:
    """In front of the p2pd `pid`, which listens at `listening` (multiaddrs with their ports). `start`, then `close`
    before p2pd is started again: who listens first has the first place in the group."""

    def __init__(self, client: ControlClient, pid: int, listening: Sequence[str]) -> None:
        self._client, self._proc = client, Path("/proc") / str(pid)
        self._listening = [a for a in listening if addresses.tcp_port(a)]
        self._sockets: list[socket.socket] = []
        self.shut: frozenset[str] = frozenset()
        self._enough = MAX_PENDING_PER_RANGE  # open files of p2pd from which on the table must be read
        self._skipped = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Without effect, said once in the log, where the system has no such thing."""
        if not sys.platform.startswith("linux"):
            return
        try:
            for address in self._listening:
                self._sockets.append(_beside(address))
        except OSError as error:
            log.info("connections are not capped by address range here: %s", error)
            self._close_sockets()
            return
        if self._sockets:
            self._task = asyncio.create_task(self._watch(), name="gate")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    async def _watch(self) -> None:
        if await self._misplaced():
            log.warning("connections are not capped by address range here: this system orders the group otherwise")
            self._close_sockets()
            return
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except (OSError, DhtError) as error:  # p2pd is gone or busy: the next look tells
                log.debug("the gate's look failed: %s", error or type(error).__name__)

    async def _misplaced(self) -> bool:
        """Whether a connection that is for p2pd comes to one of ours."""
        for address in self._listening:
            ip = addresses.ip_of(address)
            await dial({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip), addresses.tcp_port(address), timeout_s=2.0)
        return any([_drained(sock) for sock in self._sockets])

    async def _look(self) -> None:
        files = self._files()
        if not self.shut and files < self._enough and self._skipped < MOST_SKIPPED:
            self._skipped += 1
            return  # since the last look too few have come for any range to have more than its share
        found = self._connected()
        self._enough, self._skipped = max(MAX_PENDING_PER_RANGE, files + room(found)), 0
        known: frozenset[Remote] = frozenset()
        if overfull(found, known, self.shut):
            peers = await self._client.list_peers()
            known = frozenset((addresses.ip_of(a), addresses.tcp_port(a)) for where in peers.values() for a in where)
        shut = overfull(found, known, self.shut)
        if shut == self.shut:
            return
        for sock in self._sockets:
            _attach(sock, program(shut, v6=sock.family == socket.AF_INET6))
            _drained(sock)
        if new := sorted(shut - self.shut):
            log.warning("too many connections from %s: new ones wait", ", ".join(new[:8]))
        self.shut = shut

    def _files(self) -> int:
        """Open files of p2pd; newer kernels tell without listing them."""
        folder = self._proc / "fd"
        return folder.stat().st_size or len(os.listdir(folder))

    def _connected(self) -> list[Remote]:
        out: list[Remote] = []
        ports = {addresses.tcp_port(a) for a in self._listening}
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError):
                table = (self._proc / "net" / name).read_text("ascii")
                for port in ports:
                    out += remotes(table, port)
        return out

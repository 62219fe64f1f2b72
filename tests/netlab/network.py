"""A small internet on one machine: network namespaces on a bridge, some of them behind NAT. Root and Linux only.

    with Internet(("pub", "home1/nat", "home2/nat"), mtu=1280) as net:
        net.command("home1", "fusion-peer", "join", ...)    # argv that runs there
        net.address("pub")                                   # what others dial; of a peer behind NAT its router's

A peer behind NAT has a namespace of its own and a router's in front of it that masquerades. "/nat" takes random ports,
as carrier-grade NAT does: nobody can dial it, and punching holes does not help. "/cone" keeps the port and drops what
nobody inside asked for, as most routers at home do: nobody can dial it until a hole is punched. The rules go to the
kernel's nf_tables by netlink (`python -m tests.netlab.network KIND INTERFACE`), since the nft tool is seldom installed.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_NFT = 10 << 8
_BATCH_BEGIN, _BATCH_END, _ERROR = 0x10, 0x11, 2
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_REQUEST, _ACK, _CREATE, _NESTED = 1, 4, 0x400, 0x8000
_INPUT, _POSTROUTING, _SOURCE_NAT, _OIFNAME, _RANDOM_FULLY, _DROP = 1, 4, 100, 7, 0x10, 0
NAT, CONE = "nat", "cone"


class Internet:
    """`peers`: names, "/nat" or "/cone" behind those that are behind NAT. Everything is removed at the end."""

    def __init__(self, peers: Sequence[str], *, mtu: int = 1500, udp: bool = True) -> None:
        self._tag = f"fn{os.getpid()}"
        self._mtu, self._udp = mtu, udp
        self._nat = {name.partition("/")[0]: name.partition("/")[2] for name in peers}
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._space("net")
            self._in("net", "ip link add name bridge0 type bridge")
            self._in("net", "ip link set bridge0 up")
            for number, (name, nat) in enumerate(self._nat.items(), start=1):
                self._attach(number, name, nat)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._made.clear()

    def command(self, name: str, *argv: str) -> list[str]:
        """`argv` as it runs at the peer `name`."""
        return ["ip", "netns", "exec", self._ns(name), *argv]

    def address(self, name: str) -> str:
        """11.N.0.1: libp2p's AutoNAT dials only what it takes for public. Each peer has an address range of its own."""
        return _address(list(self._nat).index(name) + 1)

    def unplug(self, name: str) -> None:
        """Cut the cable between this peer and the others."""
        self._in("net", f"ip link set p{list(self._nat).index(name) + 1} down")

    def plug(self, name: str) -> None:
        self._in("net", f"ip link set p{list(self._nat).index(name) + 1} up")

    # ---

    def _ns(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _space(self, name: str) -> None:
        _ip("netns", "add", self._ns(name))
        self._made.append(self._ns(name))
        self._in(name, "ip link set lo up")

    def _in(self, name: str, line: str) -> None:
        _run(self.command(name, *line.split()))

    def _attach(self, number: int, name: str, nat: str) -> None:
        outer = f"{name}-router" if nat else name
        self._space(outer)
        self._cable("net", f"p{number}", outer, "wan")
        self._in("net", f"ip link set p{number} master bridge0")
        self._in(outer, f"ip addr add {_address(number)}/8 dev wan")
        if not nat:
            self._block_udp(name)
            return
        self._space(name)
        self._cable(outer, "lan", name, "eth")
        self._in(outer, f"ip addr add 192.168.{number}.1/24 dev lan")
        self._in(name, f"ip addr add 192.168.{number}.2/24 dev eth")
        self._in(name, f"ip route add default via 192.168.{number}.1")
        self._in(outer, "sysctl -qw net.ipv4.ip_forward=1")
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        _run(self.command(outer, sys.executable, "-m", "tests.netlab.network", nat, "wan"), cwd=root)
        self._block_udp(name)

    def _cable(self, one: str, one_end: str, other: str, other_end: str) -> None:
        self._in(one, f"ip link add name {one_end} type veth peer name {other_end} netns {self._ns(other)}")
        for name, end in ((one, one_end), (other, other_end)):
            self._in(name, f"ip link set {end} mtu {self._mtu} up")

    def _block_udp(self, name: str) -> None:
        if not self._udp:
            self._in(name, "ip rule add ipproto udp prohibit")


def _address(number: int) -> str:
    return f"11.{number}.0.1"


def unavailable() -> str:
    """Why there is no such internet here; "" if there is."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and the ip command"
    try:
        with Internet(("probe/nat",)):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        return f"this kernel gives no namespace with NAT: {reason.strip()[-200:]}"


def _ip(*argv: str) -> None:
    _run(["ip", *argv])


def _run(argv: list[str], cwd: str | None = None) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, cwd=cwd, timeout=120)


# --- nf_tables by netlink: table, chain, one rule


def masquerade(interface: str, kind: str) -> None:
    """What leaves by `interface` of this namespace gets its address; NAT: and a port at random; CONE: what comes in and
    belongs to nothing that left is dropped without an answer. OSError if refused."""
    name = interface.encode().ljust(16, b"\0")
    rule = _nested(
        4,
        _expression("meta", _u32(1, 1) + _u32(2, _OIFNAME))
        + _expression("cmp", _u32(1, 1) + _u32(2, 0) + _nested(3, _attribute(1, name)))
        + _expression("masq", _u32(1, _RANDOM_FULLY) if kind == NAT else b""),
    )
    hook = _nested(4, _u32(1, _POSTROUTING) + _u32(2, _SOURCE_NAT))
    bodies = [
        (_NEW_TABLE, _text(1, "nat")),
        (_NEW_CHAIN, _text(1, "nat") + _text(3, "post") + hook + _text(7, "nat")),
        (_NEW_RULE, _text(1, "nat") + _text(2, "post") + rule),
    ]
    if kind == CONE:
        hook = _nested(4, _u32(1, _INPUT) + _u32(2, 0))
        wall = _text(1, "wall") + _text(3, "in") + hook + _u32(5, _DROP) + _text(7, "filter")
        bodies += [(_NEW_TABLE, _text(1, "wall")), (_NEW_CHAIN, wall)]
    batch = _message(_BATCH_BEGIN, b"", flags=_REQUEST, resource=10)
    for kind, body in bodies:
        batch += _message(_NFT | kind, body, flags=_REQUEST | _ACK | _CREATE)
    batch += _message(_BATCH_END, b"", flags=_REQUEST, resource=10)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as link:
        link.settimeout(5)
        link.send(batch)
        for _ in bodies:
            reply = link.recv(1 << 16)
            kind, error = struct.unpack_from("<H", reply, 4)[0], struct.unpack_from("<i", reply, 16)[0]
            if kind != _ERROR or error:
                raise OSError(-error, f"nf_tables: {os.strerror(-error)}")


def _message(kind: int, body: bytes, *, flags: int, resource: int = 0) -> bytes:
    head = struct.pack(">BBH", socket.AF_INET if body else 0, 0, resource)
    return struct.pack("<IHHII", 16 + len(head) + len(body), kind, flags, 0, 0) + head + body


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("<HH", length, kind) + value + bytes(-length % 4)


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _u32(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _expression(name: str, data: bytes) -> bytes:
    return _nested(1, _text(1, name) + _nested(2, data))


if __name__ == "__main__":
    masquerade(sys.argv[2], sys.argv[1])

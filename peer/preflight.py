"""What a volunteer should know before it counts on its set-up, each finding with the command or setting that mends it.

`host_findings` looks at this machine, `address_findings` at the addresses it was told, `network_findings` at how the
swarm sees it. Loads no torch: the device is measured by a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from dht import addresses
from dht.errors import DhtError, InputError
from dht.fencing import Fencing
from dht.identity import load
from dht.node import Board
from dht.p2p import P2PTransport
from dht.probe import Dialled, Reach, dial
from dht.records import PeerRecord
from peer import devices
from peer.pipe_service import pipe_hosts, try_reach

LEAST_DISK_BYTES = 2 << 30
LEAST_MEMORY_BYTES = 1 << 30
_SLOW_S = 1.0
_TWIN_S = 10.0
_DEVICE_S = 90.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`ok` None: worth knowing, nothing to mend."""

    name: str
    ok: bool | None
    text: str
    fix: str = ""


def lines(findings: Iterable[Finding]) -> list[str]:
    """One line a finding, the fix behind an arrow."""
    marks = {True: "ok", False: "NO", None: "--"}
    return [f"{marks[f.ok]}  {f.name:<10} {f.text}" + (f" -> {f.fix}" if f.fix else "") for f in findings]


# --- this machine


def host_findings(home: Path, *, memory_bytes: int) -> list[Finding]:
    """Memory, disk, identity, WSL2."""
    out = []
    free = devices.available_memory_bytes()
    enough = LEAST_MEMORY_BYTES <= memory_bytes <= free
    fix = f"--memory {max(0.5, 0.8 * free / 2**30):.1f}GiB, or close other programs"
    text = f"{free / 2**30:.1f} GiB free, stages may take {memory_bytes / 2**30:.1f} GiB"
    out.append(Finding(name="memory", ok=enough, text=text, fix="" if enough else fix))
    disk = shutil.disk_usage(home).free
    roomy = disk >= LEAST_DISK_BYTES
    out.append(
        Finding(
            name="disk", ok=roomy, text=f"{disk / 2**30:.1f} GiB free at {home}",
            fix="" if roomy else "FUSION_HOME=DIR on a larger disk, or fusion-peer purge",
        )
    )  # fmt: skip
    out.append(identity_finding(home / "identity"))
    wsl = wsl2_finding(Path("/proc/version"))
    return [*out, wsl] if wsl is not None else out


def identity_finding(path: Path) -> Finding:
    """Whether the identity file at `path` can be used; none yet is no failure."""
    try:
        return Finding(name="identity", ok=True, text=f"{load(path).peer_id} ({path})")
    except FileNotFoundError:
        return Finding(name="identity", ok=None, text=f"none yet; join makes {path}, mode 0600")
    except InputError as error:
        return Finding(name="identity", ok=False, text=str(error))


def wsl2_finding(version: Path) -> Finding | None:
    """WSL2 sits behind a NAT of its own, which no port mapping of the router reaches."""
    try:
        text = version.read_text("utf-8", "replace").lower()
    except OSError:
        return None
    if "microsoft" not in text:
        return None
    return Finding(
        name="wsl2", ok=None, text="this is WSL2, behind Windows' own NAT",
        fix="networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig, then: wsl --shutdown",
    )  # fmt: skip


async def device_findings(device: str, threads: int | None) -> list[Finding]:
    """Speed of each device, measured by `fusion-peer bench` in a process of its own (about 5 s)."""
    command = [sys.executable, "-m", "peer.cli_peer", "bench", "--json", "--device", device]
    command += ["--threads", str(threads)] if threads else []
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    try:
        async with asyncio.timeout(_DEVICE_S):
            out, err = await process.communicate()
        figures = msgspec.convert(json.loads(out), list[devices.DeviceFigures])
    except (TimeoutError, ValueError, msgspec.ValidationError) as error:
        if process.returncode is None:
            process.kill()
            await process.wait()
        why = (
            f"no figures in {_DEVICE_S:g} s"
            if isinstance(error, TimeoutError)
            else err.decode("utf-8", "replace").strip()[-200:]
        )
        return [Finding(name="device", ok=False, text=f"{device} cannot be measured: {why}", fix="--device cpu")]
    return [
        Finding(
            name="device", ok=True,
            text=f"{f.device} ({f.name}): {f.flops_per_s / 1e9:.0f} GFLOP/s fp32, "
            f"{f.memory_bytes_per_s / 1e9:.0f} GB/s, {f.memory_bytes / 2**30:.1f} GiB",
        )
        for f in figures
    ]  # fmt: skip


# --- the addresses given


_DIALS: dict[Dialled, tuple[str, str]] = {
    "refused": ("nobody listens there", "is the peer running? ask it for its address now: fusion-peer invite"),
    "silent": ("no answer", "a firewall drops it, or that host is off; try another address of the swarm"),
    "other": ("something answers that is no peer", "check the port in the address"),
    "unseen": ("not an address to dial from here", "use an /ip4/…/tcp/… or /ip6/…/tcp/… address"),
}


async def address_findings(swarm: Iterable[str]) -> list[Finding]:
    """Each address of the swarm, dialled once."""

    async def one(text: str) -> Finding:
        ip, port = addresses.ip_of(text), addresses.tcp_port(text)
        result: Dialled = await dial(ip, port) if ip and port else "unseen"
        if result == "open":
            return Finding(name="address", ok=True, text=f"{text} answers")
        what, fix = _DIALS[result]
        return Finding(name="address", ok=False, text=f"{text}: {what}", fix=fix)

    return list(await asyncio.gather(*map(one, swarm)))


# --- how the swarm sees this peer


async def network_findings(transport: P2PTransport, board: Board, fencing: Fencing) -> list[Finding]:
    """Its p2pd, clock, ports, address seen by others, reachability as another peer tried, fence."""
    out = [await _daemon_finding(transport), _clock_finding(board)]
    own = await transport.addresses()
    port = next((p for p in map(addresses.tcp_port, own) if p), 0)
    out.append(
        Finding(name="ports", ok=True, text=f"listens on TCP {port}, {len(own)} addresses")
        if port
        else Finding(name="ports", ok=False, text="listens on no TCP port", fix="--listen /ip4/0.0.0.0/tcp/31330")
    )
    reaches = await try_reach(transport, fencing.prober, port) if port else []
    hosts = pipe_hosts(await board.peers(timeout_s=5.0), transport.peer_id)
    out += reach_findings(reaches, port, relays=[a for a in own if addresses.is_relayed(a)], pipes=len(hosts))
    stand = fencing.stand
    if stand is None or not stand.leader:
        out.append(Finding(name="fence", ok=None, text="none yet; it shows within a minute: fusion-peer status"))
    else:
        leads = "this peer leads it" if stand.leader == transport.peer_id else f"led by ..{stand.leader[-8:]}"
        out.append(Finding(name="fence", ok=True, text=f"{stand.fence}, {leads}"))
    return out


async def _daemon_finding(transport: P2PTransport) -> Finding:
    start = time.perf_counter()
    try:
        await transport.addresses()
    except DhtError as error:
        return Finding(
            name="p2pd", ok=False, text=f"this machine's own p2pd does not answer: {error}", fix="join again"
        )
    took_s = time.perf_counter() - start
    slow = took_s > _SLOW_S
    text = f"answers in {took_s * 1e3:.0f} ms"
    return Finding(
        name="p2pd",
        ok=not slow,
        text=text,
        fix="this machine is too busy; lower --threads or close programs" if slow else "",
    )


def _clock_finding(board: Board) -> Finding:
    offset_s = board.clock.offset_s
    good = abs(offset_s) < 3
    return Finding(
        name="clock", ok=good, text=f"{offset_s:+.1f} s from the swarm's" + ("" if good else ", corrected"),
        fix="" if good else "timedatectl set-ntp true",
    )  # fmt: skip


def reach_findings(reaches: list[Reach], port: int, *, relays: list[str], pipes: int = 0) -> list[Finding]:
    """In words; `relays`: this peer's addresses through relays, `pipes`: peers that carry tensors for others."""
    if not reaches:
        return [Finding(name="reachable", ok=None, text="no other peer is there to try")]
    seen = ", ".join(sorted({r.seen for r in reaches if r.seen})) or "unknown"
    first = Finding(name="seen at", ok=None, text=f"{seen} (by {len(reaches)} other peers)")
    if any(r.result == "open" for r in reaches):
        return [first, Finding(name="reachable", ok=True, text=f"yes: another peer dialled TCP {port}")]
    through = f"; {len(relays)} relays for signalling" if relays else "; it has no relay yet"
    through += (
        f", {pipes} peers offer pipes for tensors; with a peer that cannot be dialled either it connects "
        "directly after some minutes, if both routers keep ports"
        if pipes
        else ". It trains with peers that can be dialled; with others like itself only through a public peer that "
        "offers a pipe (fusion-peer join --relay-mbps 50), and none does here"
    )
    results = ", ".join(sorted({r.result for r in reaches}))
    return [
        first,
        Finding(
            name="reachable", ok=False, text=f"no ({results}) as tried by another peer on TCP {port}{through}",
            fix=f"forward TCP {port} to this machine in the router, open it in the firewall (ufw allow {port}/tcp), "
            f"and join with --listen /ip4/0.0.0.0/tcp/{port}",
        ),
    ]  # fmt: skip


def reach_word(findings: Iterable[Finding]) -> Literal["", "direct", "relay", "none"]:
    """For the peer's record."""
    found = next((f for f in findings if f.name == "reachable"), None)
    if found is None or found.ok is None:
        return ""
    return "direct" if found.ok else "relay" if "relays for" in found.text else "none"


# --- the same key on two hosts


def twin(peers: Iterable[PeerRecord], me: str, told: set[str], since: float, identity_path: Path) -> str:
    """What to say if a record of this very peer, younger than this process (`since`, swarm time), names none of the
    addresses that it published (`told`): only another process with the same key can have signed it. "" otherwise."""
    for r in peers:
        if r.peer == me and r.published > since + _TWIN_S and r.addresses and not told.intersection(r.addresses):
            return (
                f"another running peer uses this identity, {identity_path}, at {r.addresses[0]}: one key, one host; "
                f"end one of the two and move its {identity_path.name} file away to get a new one"
            )
    return ""


async def refuse_second_host(transport: P2PTransport, board: Board | None, identity_path: Path) -> None:
    """InputError, which names the file, if a peer with this very identity is alive at another address.

    It may be one of the bootstrap addresses (`board` None: before joining, when nobody else may be there) or have its
    record on the board.
    """
    own = {addresses.parse_swarm_address(a).transport for a in await transport.addresses()}
    found = [a for a in transport.bootstrap if a.endswith(f"/p2p/{transport.peer_id}")]
    if board is not None:
        try:
            found = [a for r in await board.peers(timeout_s=5.0) if r.peer == transport.peer_id for a in r.addresses]
        except DhtError:
            return
    for text in dict.fromkeys(found):
        ip, port = addresses.ip_of(text), addresses.tcp_port(text)
        if not ip or not port or text.partition("/p2p/")[0] in own or addresses.is_relayed(text):
            continue
        if await dial(ip, port, timeout_s=2.0) == "open":
            raise InputError(
                f"the identity {identity_path} is used by another running peer, at {ip} port {port}: one key, one "
                f"host; move {identity_path} away here to get a new one"
            )

"""`fusion-peer doctor`: the preflight of `join` without joining, under a throw-away identity."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import msgspec

from dht import p2p
from dht.addresses import check_address, check_swarm_address
from dht.errors import DhtError
from dht.fencing import Fencing
from dht.home import home, last_swarm
from dht.node import Board
from peer import devices, preflight
from peer.preflight import Finding


def run(options: argparse.Namespace) -> int:
    """0 if nothing is to be mended, else 1."""
    findings = asyncio.run(examine(options))
    if options.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print("\n".join(preflight.lines(findings)))
    return 1 if any(f.ok is False for f in findings) else 0


async def examine(options: argparse.Namespace) -> list[Finding]:
    """All findings, the machine's first."""
    swarm = tuple(map(check_swarm_address, options.addresses)) or last_swarm()
    memory = options.memory or int(0.8 * devices.available_memory_bytes())
    found = await preflight.device_findings(options.device, options.threads)
    found += preflight.host_findings(home(), memory_bytes=memory)
    if not swarm:
        text = "no address of a swarm is known"
        return [
            *found,
            Finding(name="address", ok=None, text=text, fix="fusion-peer doctor ADDR, or join to start one"),
        ]
    found += await preflight.address_findings(swarm)
    if not any(f.ok for f in found if f.name == "address"):
        return found
    listen = tuple(map(check_address, options.listen or ())) or p2p.ANY_ADDRESS
    with tempfile.TemporaryDirectory(prefix="fusion-doctor-") as folder:
        try:
            found += await _from_the_swarm(Path(folder), swarm, listen)
        except DhtError as error:
            found.append(Finding(name="swarm", ok=False, text=str(error)))
    return found


async def _from_the_swarm(folder: Path, swarm: tuple[str, ...], listen: tuple[str, ...]) -> list[Finding]:
    transport = await p2p.start(folder / "identity", host_addresses=listen, bootstrap=swarm)
    try:
        board = await Board.start(transport)
        try:
            peers = await board.peers()
            fencing = await Fencing.start(board)
            try:
                found = [Finding(name="swarm", ok=True, text=f"peers on the board: {len(peers)}")]
                return found + await preflight.network_findings(transport, board, fencing)
            finally:
                await fencing.close()
        finally:
            await board.close()
    finally:
        await transport.close()

"""Counts what pings and calls of the board cost at an interface: python -m tests.netlab.wire_peer FOLDER [ADDRESS]

Without an address it is the peer that answers; with one it prints {"call": bytes, "ping": bytes} of the wire.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from dht import p2p
from dht._hivemind import node_parts
from dht.fence_records import Beat
from dht.identity import peer_id_bytes
from dht.node import Board
from dht.probe import Prober
from dht.storing import dht_id
from tests.netlab.network import Internet

TIMES = 100


async def main(folder: Path, boot: tuple[str, ...]) -> None:
    transport = await p2p.start(folder / "id", bootstrap=boot, host_addresses=("/ip4/0.0.0.0/tcp/4001",))
    board = await Board.start(transport)
    me = transport.peer_id
    beat = Beat(fence="0" * 16, leader=me, term=3, score=4, members=83, near=(me,) * 4, coordinate=(1.5, 2.5, 3.5))

    async def seen_at(peer: str) -> str:
        return ""

    prober = Prober(transport, lambda: beat, seen_at=seen_at)
    await prober.start()
    print(json.dumps(await transport.addresses()), flush=True)
    if not boot:
        await asyncio.Event().wait()
    peer = boot[0].rpartition("/")[2]
    key = dht_id("nothing/is/here")
    protocol, other = board._node.protocol, node_parts().PeerID(peer_id_bytes(peer))

    async def call() -> None:
        assert await protocol.call_find(other, [key]) is not None

    async def ping() -> None:
        await prober.ping(peer)

    print(json.dumps({"call": await _cost(call), "ping": await _cost(ping)}), flush=True)


async def _cost(work: Callable[[], Awaitable[None]]) -> float:
    for _ in range(3):
        await work()
    before = _bytes()
    for _ in range(TIMES):
        await work()
    return (_bytes() - before) / TIMES


def _bytes() -> int:
    """Received and sent by the only cable of this namespace."""
    (line,) = [text for text in Path("/proc/net/dev").read_text("ascii").splitlines() if "wan:" in text]
    figures = line.split(":")[1].split()
    return int(figures[0]) + int(figures[8])


def measure() -> dict[str, float]:
    """Two peers in two namespaces; needs root."""
    with tempfile.TemporaryDirectory() as folder, Internet(("a", "b")) as net:
        running = []
        try:
            boot: list[str] = []
            for name in ("a", "b"):
                home = Path(folder) / name
                home.mkdir()
                argv = net.command(name, sys.executable, "-m", "tests.netlab.wire_peer", str(home), *boot)
                process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
                running.append(process)
                assert process.stdout is not None
                boot = [a for a in json.loads(process.stdout.readline()) if net.address(name) in a]
            assert process.stdout is not None
            return dict(json.loads(process.stdout.readline()))
        finally:
            for process in running:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), tuple(sys.argv[2:])))

"""A peer in a process of its own, until it is killed: `python -m tests.cluster.monitor_peer ADDR`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from dht import p2p
from dht.node import Board
from tests.dht_samples import peer_record


async def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        transport = await p2p.start(Path(folder) / "id", host_addresses=p2p.LOOPBACK, bootstrap=(address,))
        board = await Board.start(transport)
        assert transport.identity is not None
        board.publish(peer_record(transport.identity))
        await board.flush()
        print(transport.peer_id, flush=True)
        await asyncio.Event().wait()


asyncio.run(main(sys.argv[1]))

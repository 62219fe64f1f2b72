"""A peer of `swarm_cluster`: joins, publishes, and answers a line on stdin with a line on stdout.

python -m tests.cluster.swarm_peer FOLDER PORT [BOOTSTRAP ...]; it joins as `fusion-peer join` does
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import uvloop

from dht import p2p
from dht.errors import DhtError
from dht.fencing import Fencing
from dht.node import Board
from peer.joining import join_patiently
from tests.dht_samples import peer_record


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(folder: Path, port: int, bootstrap: tuple[str, ...]) -> None:
    here = (f"/ip4/127.0.0.1/tcp/{port}",)
    transport = await p2p.start(folder / "identity", host_addresses=here, bootstrap=bootstrap, join=False)
    joined = await join_patiently(transport, give_up_s=60.0, say=lambda text: print(text, file=sys.stderr))
    board = await Board.start(transport, alone=not joined)
    ready = time.time()
    assert transport.identity is not None
    board.publish(peer_record(transport.identity))
    await board.flush()
    fencing = await Fencing.start(board)
    say(peer=transport.peer_id, addresses=await transport.addresses(), ready=ready)
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := (await stdin.readline()).decode().strip():
        command, _, rest = line.partition(" ")
        start = time.perf_counter()
        if command == "until":  # answers when it sees this peer
            while True:
                try:
                    if rest in [p.peer for p in await board.peers()]:
                        break
                except DhtError:
                    pass
                await asyncio.sleep(2.0)  # nineteen peers that read without a pause would be what is measured
            say(at=time.time())
        elif command == "peers":
            found, error = [], ""
            try:
                found = [p.peer for p in await board.peers()]
            except DhtError as failed:
                error = str(failed)
            say(peers=found, seconds=time.perf_counter() - start, error=error)
        elif command == "fences":
            stand = fencing.stand
            views = []
            with contextlib.suppress(DhtError):
                views = [(v.id, v.leader, v.members) for v in await board.fences()]
            say(fences=views, fence=stand.fence if stand else "0", leader=stand.leader if stand else "")
    await fencing.close()
    await board.close()
    await transport.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])))

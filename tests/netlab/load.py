"""Loads a volunteer from outside, as fast as it lets one: python -m tests.netlab.load FOLDER HOST WHAT [PEER]

HOST: the volunteer's address. WHAT: "probe" measures the rates to it, both ways, PROBES times, and prints them; "take"
is a peer that nobody can dial, rests there, says its peer id and takes what comes; "send" sends to such a PEER through
the host's pipe. The last two go on until their stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import uvloop

from dht import p2p
from dht.control import socket_path
from dht.fence_records import Beat
from dht.node import Board
from dht.p2p import P2PTransport
from dht.probe import REST_S, ProbeBusy, Prober
from dht.transport import Stream
from peer.pipe_service import PipeService
from peer.pipes import circuit
from peer.protocol import BLOBS
from peer.selfdial import SelfDial

PROBES = 3


async def probe(transport: P2PTransport, host: str) -> None:
    async def seen_at(peer: str) -> str:
        return ""

    prober = Prober(transport, Beat, seen_at=seen_at)
    found: list[tuple[float, float]] = []
    async with asyncio.timeout(400):
        while len(found) < PROBES:
            with contextlib.suppress(ProbeBusy):  # it measures with another one
                found.append(await prober.rates(host.rpartition("/")[2]))
            await asyncio.sleep(REST_S)
    print(json.dumps(found), flush=True)


async def take(stream: Stream) -> None:
    while await stream.reader.read(1 << 16):
        pass


async def send(dial: SelfDial, peer: str, host: str) -> None:
    await dial.connect(peer, (circuit(host, peer),))
    stream = await dial.open_stream(peer, BLOBS, timeout_s=120.0)
    stdin = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not stdin.done():
        stream.writer.write(bytes(1 << 16))
        drained = asyncio.ensure_future(stream.writer.drain())
        await asyncio.wait({stdin, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            drained.cancel()


async def main(folder: Path, host: str, what: str, peer: str) -> None:
    transport = await p2p.start(folder / "id", bootstrap=(host,), host_addresses=("/ip4/0.0.0.0/tcp/4001",))
    dial = SelfDial(transport, socket_path(transport.control_address).parent)
    try:
        if what == "probe":
            return await probe(transport, host)
        board = await Board.start(transport)
        service = await PipeService.start(transport, board, dial)
        service.found("none", await transport.addresses())
        if what == "take":
            await dial.serve(BLOBS, take)
            assert await service.pipes.until_rested(300)
            print(transport.peer_id, flush=True)
            await asyncio.to_thread(sys.stdin.read)
        else:
            await send(dial, peer, host)
        await service.close()
        await board.close()
    finally:
        await dial.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else ""))

"""A bare peer for tests of hole punching: python -m tests.netlab.punch_peer FOLDER public|private [ADDRESS ...]

A public one offers pipes, a private one rests at them. It says its peer id and addresses, then answers each line on
stdin, [WHAT, PEER], with one of JSON: "rested", its addresses by way of hosts; "connected", the addresses of its
connections to PEER; "piped", bytes that it carried for others; "say", what PEER answers on a tensor stream that is kept
and is opened again when it has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from dht import p2p
from dht.control import socket_path
from dht.errors import DhtError
from dht.node import Board
from dht.records import PeerRecord
from dht.transport import Stream
from peer.pipe_service import PipeService
from peer.protocol import data_protocol
from peer.selfdial import SelfDial

ECHO = data_protocol("echo")
OFFER_MBPS = 10.0


async def echo(stream: Stream) -> None:
    while data := await stream.reader.read(4):
        stream.writer.write(data)


class Peer:
    def __init__(self, board: Board, dial: SelfDial, service: PipeService) -> None:
        self.board, self.dial, self.service = board, dial, service
        self._stream: Stream | None = None

    async def answer(self, what: str, peer: str) -> Any:
        match what:
            case "rested":
                return self.service.pipes.addresses()
            case "piped":
                return 0 if self.service.host is None else self.service.host.carried.total()
            case "say":
                return await self._say(peer)
        return (await self.dial.connected()).get(peer, ())

    async def _say(self, peer: str) -> str:
        if self._stream is None:
            record = next((r for r in await self.board.peers() if r.peer == peer), None)
            if record is None:
                return "it is not on the board"
            await self.dial.connect(peer, record.addresses)
            self._stream = await self.dial.open_stream(peer, ECHO, timeout_s=20.0)
        self._stream.writer.write(b"ping")
        async with asyncio.timeout(20):
            said = (await self._stream.reader.read(4)).decode()
        if not said:
            self._stream = None
        return said


async def main(folder: Path, kind: str, boot: tuple[str, ...]) -> None:
    transport = await p2p.start(folder / "id", bootstrap=boot, host_addresses=("/ip4/0.0.0.0/tcp/4001",))
    dial = SelfDial(transport, socket_path(transport.control_address).parent)
    board = await Board.start(transport)
    own = await transport.addresses()
    private = kind == "private"

    def publish() -> None:
        board.publish(
            PeerRecord(
                peer=transport.peer_id, version="0.1.0", devices=(), state="free", addresses=service.addresses(own),
                reach="relay" if private else "direct", relay_mbps=0.0 if private else OFFER_MBPS,
            )
        )  # fmt: skip

    offer = None if private else OFFER_MBPS * 1e6 / 8
    service = await PipeService.start(transport, board, dial, offer_bytes_per_s=offer, changed=lambda: publish())
    service.found("relay" if private else "direct", own)
    publish()
    await dial.serve(ECHO, echo)
    peer = Peer(board, dial, service)
    try:
        print(json.dumps(own), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                found = await peer.answer(*json.loads(line))
            except (DhtError, TimeoutError, OSError) as error:
                found = str(error) or "no answer"
            print(json.dumps(found), flush=True)
    finally:
        await service.close()
        await board.close()
        await dial.close()


if __name__ == "__main__":
    if "GOLOG_LOG_LEVEL" in os.environ:  # p2pd's own words, to stderr
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)d %(name)s %(message)s")
        logging.getLogger("multiaddr").setLevel(logging.WARNING)
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:])))

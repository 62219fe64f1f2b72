"""A bare peer for tests of hole punching: python -m tests.netlab.punch_peer FOLDER [ADDRESS ...]

Says its addresses, then answers each line on stdin, [WHAT, PEER, ADDRESS ...], with a line of JSON. WHAT: "addresses",
its own; "connected", those of its connections to PEER; "connect", the same once it has connected to PEER at ADDRESS
..., or why not; "disconnect" from PEER; "echo", what PEER answers on a stream of its own.
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
from dht.errors import DhtError
from dht.p2p import P2PTransport
from dht.transport import Stream

ECHO = "/fusion/1/echo"


async def echo(stream: Stream) -> None:
    stream.writer.write(await stream.reader.readexactly(4))


async def answer(transport: P2PTransport, what: str, peer: str, addresses: tuple[str, ...]) -> Any:
    match what:
        case "addresses":
            return await transport.addresses()
        case "connect":
            await transport.connect(peer, addresses, timeout_s=15.0)
        case "disconnect":
            await transport.client.disconnect(peer)
        case "echo":
            stream = await transport.open_stream(peer, ECHO)
            stream.writer.write(b"ping")
            async with asyncio.timeout(15):
                return (await stream.reader.read(4)).decode()
    return (await transport.connected()).get(peer, ())


async def main(folder: Path, boot: tuple[str, ...]) -> None:
    transport = await p2p.start(folder / "id", bootstrap=boot, host_addresses=("/ip4/0.0.0.0/tcp/4001",))
    try:
        await transport.serve(ECHO, echo)
        print(json.dumps(await transport.addresses()), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            what, peer, *addresses = json.loads(line)
            try:
                found = await answer(transport, what, peer, tuple(addresses))
            except (DhtError, TimeoutError) as error:
                found = str(error) or "no answer"
            print(json.dumps(found), flush=True)
    finally:
        await transport.close()


if __name__ == "__main__":
    if "GOLOG_LOG_LEVEL" in os.environ:  # p2pd's own words, to stderr
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)d %(name)s %(message)s")
    uvloop.run(main(Path(sys.argv[1]), tuple(sys.argv[2:])))

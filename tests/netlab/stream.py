"""One end of a stream under test: `python -m tests.netlab.stream send|take ours|raw ADDRESS SECONDS`.

"ours" is an edge between two stages, as executors have it: `peer.links` over p2pd. "raw" is a TCP connection by
asyncio. The taker prints where it is as one JSON line, the sender reads that line; both print what they counted after
RAMP_S: bytes, seconds, CPU seconds of the process and of its p2pd. Both kinds run at real-time priority where that is
allowed, their p2pd too: on a busy machine it is the data plane that is measured, not its turn at the processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import uvloop

from dht import p2p
from fusion_p2p.frame import Frame, Kind
from peer.links import Links
from peer.protocol import Endpoint

RAMP_S = 4.0
FRAME_BYTES = 512 << 10  # what the byte GPT-2 sends per micro-batch, dense
PIECE = 128 << 10
RUN = "ab" * 16
SETTLE_S = 10.0  # how much longer the sender may go on; what ends it is that the taker has enough


class Count:
    """Bytes that came after the ramp, from the first to the last arrival, and the CPU that went meanwhile."""

    def __init__(self, seconds: float, cpu_s: Callable[[], float]) -> None:
        self._cpu_s, self._begin = cpu_s, time.monotonic()
        self._from, self._until = self._begin + RAMP_S, self._begin + RAMP_S + seconds
        self._first: tuple[float, float] | None = None
        self.bytes = 0

    def take(self, size: int) -> bool:
        """Whether there is enough."""
        now = time.monotonic()
        if self._first is not None:
            self.bytes += size
        elif now >= self._from:
            self._first = now, self._cpu_s()
        return now >= self._until and self.bytes > 0

    def found(self) -> dict[str, float]:
        """Up to now; nothing if the ramp is not over."""
        if self._first is None:
            return {"bytes": 0, "seconds": 1.0, "cpu_s": 0.0}
        begin, used_s = self._first
        return {"bytes": self.bytes, "seconds": time.monotonic() - begin, "cpu_s": self._cpu_s() - used_s}


def cpu_of(*pids: int | None) -> Callable[[], float]:
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids if pid is not None)]

    def total() -> float:
        return float(sum(t.user + t.system for t in (p.cpu_times() for p in processes)))

    return total


async def read_line() -> Any:
    return json.loads(await asyncio.to_thread(sys.stdin.readline))


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def take_raw(address: str, seconds: float) -> dict[str, float]:
    done = asyncio.Event()
    found: dict[str, float] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = Count(seconds, cpu_of())
        while data := await reader.read(PIECE):
            if count.take(len(data)):
                break
        found.update(count.found())
        done.set()
        writer.close()

    server = await asyncio.start_server(serve, address, 0, limit=2 * PIECE)
    say({"port": server.sockets[0].getsockname()[1], "address": address})
    await done.wait()
    server.close()
    return found


async def send_raw(there: Any, seconds: float) -> dict[str, float]:
    _, writer = await asyncio.open_connection(there["address"], there["port"])
    count, piece = Count(seconds, cpu_of()), bytes(PIECE)
    with contextlib.suppress(OSError):
        while not writer.is_closing():  # until the taker has enough
            writer.write(piece)
            await writer.drain()
            count.take(PIECE)
    return count.found()


def endpoint(stage: int, peer: str, addresses: tuple[str, ...]) -> Endpoint:
    return Endpoint(stage=stage, peer=peer, endpoint=f"bench-{stage}", incarnation=0, addresses=addresses)


async def ours(role: str, address: str, seconds: float) -> dict[str, float]:
    stage = 1 if role == "take" else 0
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fusion-stream-"))
        transport = await p2p.start(Path(folder) / "identity", host_addresses=(f"/ip4/{address}/tcp/0",))
        stack.push_async_callback(transport.close)
        me = endpoint(stage, transport.peer_id, await transport.addresses())
        say({"peer": me.peer, "addresses": me.addresses})
        there = await read_line()
        other = endpoint(1 - stage, there["peer"], tuple(there["addresses"]))
        over = asyncio.Event()  # the taker has enough: the stream has ended
        links = await stack.enter_async_context(
            Links(transport, me, RUN, 1, bound=lambda src, kind, value: FRAME_BYTES, on_event=lambda event: over.set())
        )
        links.update((me, other) if stage == 0 else (other, me), 1)
        count = Count(seconds, cpu_of(transport.p2pd_pid))
        if role == "take":
            async for frame in links.frames():
                if count.take(len(frame.payload)):
                    break
            return count.found()
        payload = bytes(FRAME_BYTES)

        async def push() -> None:
            for k in itertools.count():
                await links.send(Frame(Kind.ACT, 0, 1, 7, 0, k, payload))
                count.take(FRAME_BYTES)

        parts = asyncio.ensure_future(push()), asyncio.ensure_future(over.wait())
        await asyncio.wait(parts, timeout=RAMP_S + seconds + SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            part.cancel()
        return count.found()


async def main(role: str, kind: str, address: str, seconds: float) -> None:
    if kind == "ours":
        found = await ours(role, address, seconds)
    elif role == "take":
        found = await take_raw(address, seconds)
    else:
        found = await send_raw(await read_line(), seconds)
    say(found)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))

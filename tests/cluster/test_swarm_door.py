"""A private swarm's door, and bans, between real peers on loopback."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from dht import addresses, p2p
from dht.door import range_of, swarm_secret
from dht.errors import SwarmUnreachable
from dht.gate import LOCAL, MAX_PENDING_PER_RANGE, _attach, _beside, program, remotes
from dht.node import Board
from dht.p2pd import MAX_FILES
from dht.probe import dial
from dht.transport import Stream, StreamHandler
from tests.cluster.eventually import WITHIN_S, comes
from tests.dht_samples import peer_record

pytestmark = pytest.mark.timeout(900)
AT_ONCE_S = 0.5  # of the cap: what passes after a rest, and what one read of a socket brings


async def echo(stream: Stream) -> None:
    stream.writer.write(await stream.reader.readexactly(4))


async def asks(transport: p2p.P2PTransport, peer: str) -> bytes:
    stream = await transport.open_stream(peer, "/fusion/1/echo")
    stream.writer.write(b"ping")
    async with asyncio.timeout(WITHIN_S):
        answer = await stream.reader.read(4)
    stream.writer.close()
    return answer


def test_a_private_swarm_lets_in_who_has_the_key(tmp_path: Path) -> None:
    async def main() -> None:
        key = secrets.token_bytes(32)
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK, secret=key)
        board = await Board.start(a)
        assert a.identity is not None
        board.publish(peer_record(a.identity))
        await board.flush(timeout_s=WITHIN_S)
        await a.serve("/fusion/1/echo", echo)
        boot = await a.addresses()
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=boot, secret=key)
        other = await Board.start(b)

        async def seen() -> bool:
            return [p.peer for p in await other.peers()] == [a.peer_id]

        await comes(seen, "the other peer's record")
        assert await asks(b, a.peer_id) == b"ping"
        executor = await p2p.attach(b.control_address)  # another process of the same peer knows the key as well
        assert await asks(executor, a.peer_id) == b"ping"
        await executor.close()
        for wrong in (None, secrets.token_bytes(32), swarm_secret("lab", key)):
            c = await p2p.start(tmp_path / secrets.token_hex(4), host_addresses=(), bootstrap=boot, secret=wrong)
            with pytest.raises(SwarmUnreachable, match="nobody answers on the board"):
                await Board.start(c)
            assert await asks(c, a.peer_id) == b""
            await c.close()
        for part in (other, board, b, a):
            await part.close()

    uvloop.run(main())


def test_a_banned_peer_is_answered_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK)
        monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "banned").write_text(f"# noisy\n{b.peer_id}\n198.51.100.0/24\n")
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        await a.serve("/fusion/1/echo", echo)
        board = await Board.start(a)
        await b.connect(a.peer_id, await a.addresses())
        assert await asks(b, a.peer_id) == b""
        other = await Board.start(b)
        assert await other._node.protocol.call_ping(next(iter(await _peer_ids(b)))) is None
        for part in (other, board, b, a):
            await part.close()

    async def _peer_ids(transport: p2p.P2PTransport) -> list[object]:
        from dht._hivemind import node_parts
        from dht.identity import peer_id_bytes

        return [node_parts().PeerID(peer_id_bytes(p)) for p in await transport.connected()]

    uvloop.run(main())


def test_a_peer_that_opens_too_many_streams_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=await a.addresses())
        served = 0

        async def hold(stream: Stream) -> None:
            nonlocal served
            served += 1
            stream.writer.write(b"ok")
            await stream.reader.read(1)

        await a.serve("/fusion/1/hold", hold)
        a.door._per_peer[b.peer_id] = 509  # as many as are open
        streams, refused = [], 0
        for _ in range(6):
            stream = await b.open_stream(a.peer_id, "/fusion/1/hold")
            async with asyncio.timeout(WITHIN_S):
                refused += not await stream.reader.read(2)
            streams.append(stream)
        assert (served, refused) == (3, 3)
        for stream in streams:
            stream.writer.close()
        await b.close()
        await a.close()

    uvloop.run(main())


def test_a_download_cap_holds_as_seen_by_the_sender(tmp_path: Path) -> None:
    async def main() -> None:
        rate = 2_000_000
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK, download_bytes_per_s=(rate, rate))
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=await a.addresses())
        taken: dict[str, int] = {"owner": 0, "attached": 0}

        def taker(name: str) -> StreamHandler:
            async def take(stream: Stream) -> None:
                while data := await stream.reader.read(1 << 16):
                    taken[name] += len(data)

            return take

        executor = await p2p.attach(a.control_address)
        await a.serve("/fusion/1/owner", taker("owner"))
        await executor.serve("/fusion/1/attached", taker("attached"))
        streams = [await b.open_stream(a.peer_id, f"/fusion/1/{name}") for name in taken]

        async def pour(stream: Stream) -> None:
            while True:
                stream.writer.write(bytes(1 << 16))
                await stream.writer.drain()

        pours = [asyncio.create_task(pour(s)) for s in streams]
        start = time.monotonic()
        # However slow the machine is: more than the cap lets pass is what must not be.
        async with asyncio.timeout(WITHIN_S):
            while min(taken.values()) < 4 * rate:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        seconds = time.monotonic() - start
        for came in taken.values():
            assert came < rate * (1.1 * seconds + AT_ONCE_S)
        for task in pours:
            task.cancel()
        for part in (executor, b, a):
            await part.close()

    uvloop.run(main())


async def silent_from(ip: str, port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections from a loopback address that say nothing."""
    made = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port, local_addr=(ip, 0)) for _ in range(count)))
    return [writer for _, writer in made]


def held(port: int, prefix: str) -> int:
    """How many connections from `prefix` the host has at `port`, by the kernel's own table."""
    return sum(ip.startswith(prefix) for ip, _ in remotes(Path("/proc/net/tcp").read_text("ascii"), port))


def test_a_storm_from_one_address_range_is_turned_away_before_it_authenticates_and_stops_nobody(
    tmp_path: Path,
) -> None:
    """p2pd listens on all addresses, so that the gate stands; every address of 127.0.0.0/8 is this host's."""

    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.ANY_ADDRESS)
        await a.serve("/fusion/1/echo", echo)
        process = psutil.Process(a.p2pd_pid)
        assert process.rlimit(psutil.RLIMIT_NOFILE)[1] <= MAX_FILES
        before = process.memory_info().rss
        port = addresses.tcp_port((await a.addresses())[0])
        boot = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{a.peer_id}",)
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=boot)
        gate = a._gate
        assert gate is not None and gate.shut == frozenset()
        silent = await silent_from("127.9.1.5", port, LOCAL * MAX_PENDING_PER_RANGE + 8)
        async with asyncio.timeout(WITHIN_S):
            while gate.shut != {"127.9.1.0/24"}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        more = [asyncio.create_task(silent_from(f"127.9.1.{k}", port, 5)) for k in range(100, 140)]
        c = await p2p.start(tmp_path / "c", host_addresses=p2p.LOOPBACK, bootstrap=boot)
        for one in (b, c):
            assert await asks(one, a.peer_id) == b"ping"
        assert await dial("127.0.0.1", port, timeout_s=WITHIN_S) == "open"
        assert held(port, "127.9.1.") <= LOCAL * MAX_PENDING_PER_RANGE + 8 + 4, "of 200 that came later"
        assert process.memory_info().rss - before < 64 << 20
        for task in more:
            task.cancel()
        for result in await asyncio.gather(*more, return_exceptions=True):
            silent += result if isinstance(result, list) else []
        for writer in silent:
            writer.close()
        async with asyncio.timeout(WITHIN_S):
            while gate.shut:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (late,) = await silent_from("127.9.1.5", port, 1)  # such as were turned away are let in again
        late.close()
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            while a._gate is gate or await dial("127.0.0.1", port, timeout_s=20) != "open":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert a._gate is not None and len(a._gate._sockets) == 1  # it stands before the new p2pd as well
        for part in (c, b, a):
            await part.close()

    uvloop.run(main())


@pytest.mark.parametrize(("host", "source", "other"), [("127.0.0.1", "127.9.1.5", "127.9.2.5"), ("::1", "::1", "")])
def test_the_kernel_tells_ranges_apart(host: str, source: str, other: str) -> None:
    """Two sockets in a group: the first has everybody's connections, the second those of the ranges named."""
    v6 = ":" in host
    family = socket.AF_INET6 if v6 else socket.AF_INET
    with socket.socket(family) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind((host, 0))
        first.listen()
        port = first.getsockname()[1]
        with _beside(f"/ip{6 if v6 else 4}/{host}/tcp/{port}") as second:
            second.listen(8)
            second.setblocking(True)
            crowd = [f"10.{k}.0.0/24" for k in range(200)] + [f"2001:db8:{k:x}::/48" for k in range(200)]
            for shut, taker in (((), first), (crowd, first), ([*crowd, range_of(source)], second), ((), first)):
                _attach(second, program(shut, v6=v6))
                with socket.create_connection((host, port), WITHIN_S, (source, 0)) as made:
                    taker.settimeout(WITHIN_S)
                    assert taker.accept()[1][:2] == made.getsockname()[:2]
            if other:
                _attach(second, program([range_of(source)], v6=v6))
                with socket.create_connection((host, port), WITHIN_S, (other, 0)):
                    first.accept()

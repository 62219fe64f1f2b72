"""Real p2pd processes on loopback: streams, another process attached, death and restart, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from dht import p2p
from dht.control import ControlClient
from dht.errors import DhtError, InputError, NoSuchProtocol, PeerUnreachable, SwarmUnreachable, TransportError
from dht.identity import Identity
from dht.p2p import P2PTransport
from dht.p2pd import FOLDER_PREFIX
from dht.transport import Stream
from tests.cluster.eventually import WITHIN_S, until

pytestmark = pytest.mark.timeout(900)
ECHO = "/test/echo"


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


@contextlib.asynccontextmanager
async def swarm(folder: Path, count: int, **options: Any) -> AsyncIterator[list[P2PTransport]]:
    """`count` transports on loopback; the first is the others' bootstrap."""
    made: list[P2PTransport] = []
    try:
        for i in range(count):
            boot = await made[0].addresses() if made else ()
            made.append(await p2p.start(folder / f"id{i}", host_addresses=p2p.LOOPBACK, bootstrap=boot, **options))
        yield made
    finally:
        for transport in reversed(made):
            await transport.close()


async def echo(stream: Stream) -> None:
    while data := await stream.reader.read(1 << 17):
        stream.writer.write(data)
        await stream.writer.drain()


async def exchange(stream: Stream, size: int) -> None:
    """`size` bytes there and back, at once in both directions."""
    sent = os.urandom(1 << 16) * (size >> 16)

    async def send() -> None:
        for at in range(0, len(sent), 1 << 17):
            stream.writer.write(sent[at : at + (1 << 17)])
            await stream.writer.drain()

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        group.create_task(send())
        assert await stream.reader.readexactly(len(sent)) == sent


def leftovers() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


async def until_back(*transports: P2PTransport) -> list[asyncio.Event]:
    events = []
    for transport in transports:
        event = asyncio.Event()

        async def callback(event: asyncio.Event = event) -> None:
            event.set()

        transport.on_restart(callback)
        events.append(event)
    return events


def test_two_peers_exchange_10_mb(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as (a, b):
            remotes: asyncio.Queue[str] = asyncio.Queue()

            async def handler(stream: Stream) -> None:
                remotes.put_nowait(stream.remote)
                await echo(stream)

            await a.serve(ECHO, handler)
            stream = await b.open_stream(a.peer_id, ECHO)
            assert (stream.remote, await remotes.get()) == (a.peer_id, b.peer_id)
            await exchange(stream, 10 << 20)
            stream.writer.close()
            with pytest.raises(NoSuchProtocol, match="/test/none"):
                await b.open_stream(a.peer_id, "/test/none")
            await a.stop_serving(ECHO)
            with contextlib.suppress(NoSuchProtocol):  # or, negotiated lazily, a stream that ends
                async with asyncio.timeout(WITHIN_S):
                    assert await (await b.open_stream(a.peer_id, ECHO)).reader.read() == b""
            stranger = Identity.generate().peer_id
            with pytest.raises(PeerUnreachable, match=stranger):
                await b.open_stream(stranger, ECHO, timeout_s=2.0)

    run(main())


def test_peers_that_share_only_a_bootstrap_find_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as (_, b, c):
            await b.serve(ECHO, echo)
            await exchange(await c.open_stream(b.peer_id, ECHO), 1 << 20)

    run(main())


def test_a_failing_or_endless_handler_harms_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async def fails(stream: Stream) -> None:
            raise ZeroDivisionError(stream.remote)

        async def hangs(stream: Stream) -> None:
            await asyncio.Event().wait()

        async with swarm(tmp_path, 2) as (a, b):
            await a.serve("/test/fails", fails)
            await a.serve("/test/hangs", hangs)
            await a.serve(ECHO, echo)
            failing = await b.open_stream(a.peer_id, "/test/fails")
            await b.open_stream(a.peer_id, "/test/hangs")
            async with asyncio.timeout(WITHIN_S):
                assert await failing.reader.read() == b""  # the stream ends, nothing else does
            await exchange(await b.open_stream(a.peer_id, ECHO), 1 << 20)

    run(main())


ATTACHED = """
import asyncio, sys
from dht import p2p

async def main():
    transport = await p2p.attach(sys.argv[1])
    async def echo(stream):
        while data := await stream.reader.read(1 << 17):
            stream.writer.write(data)
            await stream.writer.drain()
    back = asyncio.Event()
    async def came_back():
        print("back", flush=True)
    transport.on_restart(came_back)
    await transport.serve("/test/attached", echo)
    stream = await transport.open_stream(sys.argv[2], "/test/echo")
    stream.writer.write(b"from the executor")
    print(transport.peer_id, (await stream.reader.readexactly(17)).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()

asyncio.run(main())
"""


def test_an_attached_process_opens_and_serves_streams_also_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as (a, b):
            await b.serve(ECHO, echo)
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                ATTACHED,
                a.control_address,
                b.peer_id,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert child.stdin is not None
            assert child.stdout is not None
            async with asyncio.timeout(WITHIN_S):
                assert (await child.stdout.readline()).decode().split(" ", 1) == [a.peer_id, "from the executor\n"]
            await exchange(await b.open_stream(a.peer_id, "/test/attached"), 1 << 20)
            assert a.p2pd_pid is not None
            os.kill(a.p2pd_pid, signal.SIGKILL)
            async with asyncio.timeout(WITHIN_S):
                assert await child.stdout.readline() == b"back\n"
            await exchange(await b.open_stream(a.peer_id, "/test/attached"), 1 << 20)
            child.stdin.close()
            assert await child.wait() == 0
            with contextlib.suppress(NoSuchProtocol):
                async with asyncio.timeout(WITHIN_S):
                    assert await (await b.open_stream(a.peer_id, "/test/attached")).reader.read() == b""

    run(main())


def test_p2pd_killed_comes_back_with_port_and_handlers(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as (a, b, c):
            await a.serve(ECHO, echo)
            await b.serve(ECHO, echo)
            before = await b.addresses()
            cut = await c.open_stream(b.peer_id, ECHO)
            (back,) = await until_back(b)
            first = b.p2pd_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(WITHIN_S):
                assert await cut.reader.read() == b""
                waiting = await b.open_stream(a.peer_id, ECHO)  # asked while it is down: waits for it
                await back.wait()
            assert b.p2pd_pid != first
            assert await b.addresses() == before
            await exchange(waiting, 1 << 20)
            await exchange(await c.open_stream(b.peer_id, ECHO), 1 << 20)

    run(main())


def test_a_frozen_p2pd_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        watch = ControlClient.watch
        monkeypatch.setattr(ControlClient, "watch", lambda client: watch(client, interval_s=0.2, timeout_s=4.0))
        async with swarm(tmp_path, 2) as (a, b):
            await b.serve(ECHO, echo)
            (back,) = await until_back(b)
            frozen = b.p2pd_pid
            assert frozen is not None
            os.kill(frozen, signal.SIGSTOP)
            async with asyncio.timeout(WITHIN_S):
                await back.wait()
            assert b.p2pd_pid != frozen
            assert not psutil.pid_exists(frozen)
            await exchange(await a.open_stream(b.peer_id, ECHO), 1 << 20)

    run(main())


def test_one_protocol_has_one_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 1) as (a,):
            await a.serve(ECHO, echo)
            await a.serve(ECHO, echo)  # again: the new handler takes the next stream
            await a.client.serve(ECHO, a._listener, timeout_s=WITHIN_S)  # as after a lost answer
            other = await p2p.attach(a.control_address)
            try:
                with pytest.raises(TransportError, match="already set"):
                    await other.serve(ECHO, echo)
            finally:
                await other.close()

    run(main())


def test_a_silent_p2pd_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "control"
        server = await asyncio.start_unix_server(lambda reader, writer: asyncio.sleep(60), path=str(path))
        client = ControlClient(path)
        said = await client.watch(interval_s=0.1, timeout_s=0.2)  # or, stalled, not even the socket
        assert "not answered for 0.2 s" in said or said == "its control socket does not answer (no answer)"
        with pytest.raises(TransportError, match="no answer"):
            await client.identify(timeout_s=0.2)
        server.close()
        path.unlink(missing_ok=True)
        with pytest.raises(TransportError, match="is not there"):
            await client.identify(timeout_s=0.2)

    run(main())


def test_a_lying_p2pd_allocates_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff\xff\xff\x7f")
            await writer.drain()

        server = await asyncio.start_unix_server(lies, path=str(tmp_path / "control"))
        with pytest.raises(TransportError, match="at most"):
            await ControlClient(tmp_path / "control").identify(timeout_s=60.0)
        server.close()

    run(main())


def test_dead_bootstraps(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 1) as (a,):
            (live,) = await a.addresses()
            dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}" for port in (9, 10)]
            one = await p2p.start(tmp_path / "one", host_addresses=p2p.LOOPBACK, bootstrap=(dead[0], live, dead[1]))
            assert a.peer_id in await one.connected()
            await one.close()
            with pytest.raises(SwarmUnreachable) as caught:
                await p2p.start(tmp_path / "none", host_addresses=p2p.LOOPBACK, bootstrap=tuple(dead))
            assert all(address in str(caught.value) for address in dead)
            assert caught.value.exit_code == 3
            impostor = live.replace(a.peer_id, Identity.generate().peer_id)
            with pytest.raises(SwarmUnreachable, match="another peer answers there"):
                await p2p.start(tmp_path / "none", host_addresses=p2p.LOOPBACK, bootstrap=(impostor,))

    run(main())


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    async def refused(match: str, **options: Any) -> None:
        with pytest.raises(InputError, match=match) as caught:
            await p2p.start(tmp_path / options.pop("name", "other"), **options)
        assert "\n" not in str(caught.value)

    async def main() -> None:
        async with swarm(tmp_path, 1) as (a,):
            (address,) = await a.addresses()
            taken = address.partition("/p2p/")[0]
            await refused("in use by another running peer", name="id0")
            await refused("already in use", host_addresses=(taken,))
            await refused("not a multiaddr", host_addresses=("127.0.0.1:80",))
            await refused("names no peer", bootstrap=(taken,))
            with pytest.raises(InputError, match="control address"):
                await p2p.attach("/ip4/127.0.0.1/tcp/80")
            with pytest.raises(TransportError, match="is not there"):
                await p2p.attach(f"/unix{tmp_path}/control")
        with pytest.raises(TransportError, match="closed"):
            await a.open_stream(a.peer_id, ECHO)

    run(main())


OWNER = """
import asyncio, sys
from pathlib import Path
from dht import p2p

async def main():
    transport = await p2p.start(Path(sys.argv[1]), host_addresses=p2p.LOOPBACK)
    print(transport.p2pd_pid, transport.client.path.parent, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_peer_leaves_no_daemon_and_its_folder_is_cleared(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "id")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, folder = child.stdout.readline().split()
    daemon = psutil.Process(int(pid))
    assert os.getsid(daemon.pid) == daemon.pid
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    child.kill()
    child.wait()
    child.stdout.close()
    try:
        daemon.wait(timeout=WITHIN_S)
    except psutil.TimeoutExpired:  # dead, but nobody here reaps it
        assert daemon.status() == psutil.STATUS_ZOMBIE
    assert Path(folder).exists()

    async def main() -> None:
        async with swarm(tmp_path, 1) as (alive,):
            assert folder not in map(str, leftovers())
            mine = alive.client.path.parent
            async with swarm(tmp_path / "second", 1):
                assert mine in leftovers()  # another's start leaves a living one alone
            await alive.client.identify()

    (tmp_path / "second").mkdir()
    run(main())


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    me = psutil.Process()
    folders = set(leftovers())

    async def main() -> None:
        async with swarm(tmp_path, 2) as (a, b):
            await a.serve(ECHO, echo)
            await exchange(await b.open_stream(a.peer_id, ECHO), 1 << 20)
        with contextlib.suppress(DhtError):
            dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
            await p2p.start(tmp_path / "x", host_addresses=p2p.LOOPBACK, bootstrap=(dead,))

    others = set(me.children(recursive=True))  # of other tests in this process

    def held() -> tuple[int, int]:
        gc.collect()  # what is held by nothing but a cycle is no leak
        return me.num_fds(), threading.active_count()

    run(main())  # the first run loads modules and opens the loop's descriptors
    descriptors, threads = held()
    run(main())
    until(lambda: all(now <= then for now, then in zip(held(), (descriptors, threads), strict=True)), "no more is held")
    assert set(me.children(recursive=True)) <= others
    # Other tests' swarms may come and go meanwhile; theirs are locked.
    assert not [path for path in set(leftovers()) - folders if not (path / "lock").exists()]


def test_it_works_on_a_loop_in_another_thread(tmp_path: Path) -> None:
    """As `fusion_p2p.Run` does; on asyncio's own loop, too."""
    failures: list[BaseException] = []

    def body(runner: Any) -> None:
        async def main() -> None:
            async with swarm(tmp_path / runner.__module__, 2) as (a, b):
                await a.serve(ECHO, echo)
                await exchange(await b.open_stream(a.peer_id, ECHO), 1 << 20)

        try:
            (tmp_path / runner.__module__).mkdir()
            runner(main())
        except BaseException as error:
            failures.append(error)

    for runner in (uvloop.run, asyncio.run):
        thread = threading.Thread(target=body, args=(runner,))
        thread.start()
        thread.join()
    assert failures == []


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_close_that_is_cancelled_leaves_no_process_and_no_folder(tmp_path: Path, turns: int) -> None:
    """As when Ctrl-C comes again while a first one is obeyed."""

    async def main() -> None:
        transport = await p2p.start(tmp_path / "id", host_addresses=p2p.LOOPBACK)
        process = psutil.Process(transport.p2pd_pid)
        folder = transport.client.path.parent
        closing = asyncio.create_task(transport.close())
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert not folder.exists()
        assert not (await asyncio.to_thread(psutil.wait_procs, [process], WITHIN_S))[1]

    run(main())

"""The bulletin board between real peers on loopback, and `fusion-monitor` reading it from another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from dht import p2p, records
from dht._hivemind import node_parts
from dht.clock import swarm_clock
from dht.errors import RecordError, SwarmUnreachable, TransportError
from dht.identity import Identity
from dht.node import Board
from dht.records import Event, LinkBytes, PeerRecord, Signer, StageHost
from dht.runs import RunView
from tests.cluster.eventually import WITHIN_S, comes
from tests.dht_samples import peer_record, run_record, session_signer

pytestmark = pytest.mark.timeout(900)


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


@contextlib.asynccontextmanager
async def boards(folder: Path, count: int) -> AsyncIterator[list[Board]]:
    """`count` peers; all but the first join at once, through the first."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(i: int, bootstrap: tuple[str, ...]) -> Board:
            transport = await p2p.start(folder / f"id{i}", host_addresses=p2p.LOOPBACK, bootstrap=bootstrap)
            stack.push_async_callback(transport.close)
            board = await Board.start(transport)
            stack.push_async_callback(board.close)
            return board

        first = await one(0, ())
        boot = await first.transport.addresses()
        yield [first, *await asyncio.gather(*(one(i, boot) for i in range(1, count)))]


def me(board: Board) -> Identity:
    assert board.transport.identity is not None
    return board.transport.identity


async def flushed(board: Board) -> None:
    """A busy machine may take longer than a user would wait."""
    await board.flush(timeout_s=WITHIN_S)


async def sees(board: Board, wanted: Callable[[tuple[PeerRecord, ...]], bool]) -> tuple[PeerRecord, ...]:
    """The peers on the board once they are as wanted. A call that timed out hides records for a moment."""

    async def look() -> tuple[PeerRecord, ...] | None:
        seen = await board.peers()
        return seen if wanted(seen) else None

    found = await comes(look, "the peers that are expected on the board")
    assert found is not None
    return found


def test_four_peers_see_each_others_records(tmp_path: Path) -> None:
    async def main() -> None:
        async with boards(tmp_path, 4) as all_four:
            for board in all_four:
                board.publish(peer_record(me(board), state="free"))
            await asyncio.gather(*(flushed(board) for board in all_four))
            expected = sorted(board.transport.peer_id for board in all_four)
            begun = time.time()
            for board in all_four:
                seen = await sees(board, lambda seen: [r.peer for r in seen] == expected)
                assert all(begun - 60 < record.published < time.time() + 60 for record in seen)
            first = all_four[0]
            name = first.transport.peer_id
            first.publish(peer_record(me(first), state="busy"))  # the newer one replaces the older one everywhere
            await flushed(first)
            await sees(all_four[3], lambda seen: [r.state for r in seen if r.peer == name] == ["busy"])
            first.publish(peer_record(me(first), state="left"))
            await flushed(first)
            await sees(all_four[2], lambda seen: [r.peer for r in seen] == [p for p in expected if p != name])

    run(main())


def a_run(owner: Identity, trainer: Board, hosts: list[Board], plan: int = 1, **fields: Any) -> RunView:
    return RunView(
        run=run_record(owner, trainer.transport.peer_id, plan=plan, **fields),
        stages=tuple(StageHost(i, 0, board.transport.peer_id, "cpu") for i, board in enumerate(hosts)),
        links=tuple(LinkBytes(i - 1, i, 1000 * i, "dense") for i in range(len(hosts))),
        events=(Event(time.time(), "started"),),
    )


async def reads(board: Board, wanted: Callable[[RunView], bool]) -> RunView:
    async def look() -> RunView | None:
        view = await board.run("demo")
        return view if view is not None and wanted(view) else None

    found = await comes(look, "the run on the board")
    assert found is not None
    return found


def test_a_runs_progress_is_read_by_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with boards(tmp_path, 3) as (a, b, c):
            owner = Identity.generate()
            view = a_run(owner, a, [b, c] * 10, loss=2.5, step=3, total=20)
            signer = session_signer(owner, view.run.run, time.time() + 3600)
            a.publish_run(view, signer)
            await flushed(a)
            for board in (b, c):
                found = await reads(board, lambda v: len(v.stages) == 20 and len(v.links) == 20 and bool(v.events))
                assert (found.stages, found.links) == (view.stages, view.links)
                assert (found.run.loss, found.run.step, found.events[0].text) == (2.5, 3, "started")
                assert await board.run(view.run.run[:6]) == found
                assert await board.run("nothing") is None
            smaller = a_run(owner, a, [b], plan=2, state="paused", reason="peer gone")
            a.publish_run(smaller, signer)
            await flushed(a)
            found = await reads(c, lambda v: v.run.plan == 2 and len(v.stages) == 1)
            assert (found.stages, found.run.state, found.run.reason) == (smaller.stages, "paused", "peer gone")
            assert [r.run for r in await b.runs()] == [view.run.run]

    run(main())


def undated(seen: tuple[PeerRecord, ...]) -> tuple[PeerRecord, ...]:
    """Records are published again every 15 s."""
    return tuple(msgspec.structs.replace(record, published=0.0) for record in seen)


async def store_raw(board: Board, key: str, subkey: Any, value: bytes, expiration: float) -> list[bool]:
    """As a hostile peer would: past its own checks, straight into another node's store."""
    protocol = board._node.protocol
    parts = node_parts()
    answers = []
    for peer in list(protocol.routing_table.uid_to_peer_id.values()):
        packed = protocol.serializer.dumps(value)
        answers.append(
            await protocol.call_store(peer, [parts.DHTID.generate(key)], [packed], [expiration], subkeys=[subkey])
        )
    return [bool(answer and answer[0]) for answer in answers]


def test_forged_records_are_refused_and_the_store_is_intact(tmp_path: Path) -> None:
    async def main() -> None:
        async with boards(tmp_path, 3) as (a, b, mallory):
            for board in (a, b):
                board.publish(peer_record(me(board)))
                await flushed(board)
            for board in (a, b):
                before = undated(await sees(board, lambda seen: len(seen) == 2))
            now = swarm_clock.now()
            victim = peer_record(me(a), state="paused")
            key, subkey = records.place(victim)
            honest = records.seal(victim, Signer(me(a)), expiration=now + 30)
            own = peer_record(me(mallory))
            own_key, own_subkey = records.place(own)
            far = records.seal(own, Signer(me(mallory)), expiration=now + 3600)
            attempts = {
                "unsigned": (key, subkey, honest[:-64] + bytes(64), now + 30),
                "replayed with a later expiry": (key, subkey, honest, now + 31),
                "in another's place": (key, own_subkey, honest, now + 30),
                "far future": (own_key, own_subkey, far, now + 3600),
                "for ever": (own_key, own_subkey, far, float("inf")),
                "no time at all": (own_key, own_subkey, far, float("nan")),
                "oversized": (own_key, own_subkey, bytes(1 << 20), now + 30),
                "plain value": (key, None, honest, now + 30),
                "junk": (key, 17, b"junk", now + 30),
            }
            for name, attempt in attempts.items():
                assert not any(await store_raw(mallory, *attempt)), name
            with pytest.raises(RecordError):
                mallory.publish(victim)
            for board in (a, b):
                await sees(board, lambda seen: undated(seen) == before)

            async def fair() -> bool:
                return await store_raw(mallory, own_key, own_subkey, *sealed(own, me(mallory))) == [True, True]

            await comes(fair, "a fair record is taken by both")

    def sealed(record: Any, identity: Identity) -> tuple[bytes, float]:
        expiration = swarm_clock.now() + 30
        return records.seal(record, Signer(identity), expiration=expiration), expiration

    run(main())


def test_a_lying_replica_hides_nothing(tmp_path: Path) -> None:
    """A node that answers with junk that lives for ever and with nodes that are not what they say."""

    async def main() -> None:
        async with boards(tmp_path, 4) as (a, b, liar, reader):
            a.publish(peer_record(me(a)))
            await flushed(a)
            parts = node_parts()

            async def lie(request: Any, context: Any) -> Any:
                response = parts.dht_pb2.FindResponse(results=[], peer=liar._node.protocol.node_info)
                for _ in request.keys:
                    junk = parts.DictionaryDHTValue()
                    junk.store(b"x", b"junk", float("inf"))
                    response.results.append(
                        parts.dht_pb2.FindResult(
                            type=parts.dht_pb2.FOUND_DICTIONARY,
                            value=liar._node.protocol.serializer.dumps(junk),
                            expiration_time=float("inf"),
                            nearest_node_ids=[parts.DHTID(7).to_bytes()],
                            nearest_peer_ids=[liar._node.peer_id.to_bytes()],
                        )
                    )
                return response

            handlers = liar._p2p._client.control.unary_handlers
            (name,) = [n for n in handlers if n.endswith("rpc_find")]

            async def raw(data: bytes, remote: Any) -> bytes:
                return bytes((await lie(parts.dht_pb2.FindRequest.FromString(data), None)).SerializeToString())

            handlers[name] = raw
            for board in (reader, b):
                await sees(board, lambda seen: [r.peer for r in seen] == [a.transport.peer_id])
                assert parts.DHTID(7) not in board._node.protocol.routing_table

    run(main())


@pytest.mark.parametrize("which", [0, 1])
def test_the_board_comes_back_after_p2pd_dies(tmp_path: Path, which: int) -> None:
    """The founder's, who has no bootstrap address to go back to, and another's."""

    async def main() -> None:
        async with boards(tmp_path, 3) as peers:
            b, a, c = peers[which], peers[1 - which], peers[2]
            back = asyncio.Event()

            async def callback() -> None:
                back.set()

            b.publish(peer_record(me(b), state="free"))
            await flushed(b)
            b.transport.on_restart(callback)  # runs after the board's own
            assert b.transport.p2pd_pid is not None
            os.kill(b.transport.p2pd_pid, signal.SIGKILL)
            async with asyncio.timeout(WITHIN_S):
                await back.wait()
            b.publish(peer_record(me(b), state="busy"))
            await flushed(b)
            await sees(c, lambda seen: [r.state for r in seen] == ["busy"])
            a.publish(peer_record(me(a)))
            await flushed(a)
            await sees(b, lambda seen: len(seen) == 2)

    run(main())


def test_the_founder_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with boards(tmp_path, 4) as (first, *rest):
            await first.close()
            await first.transport.close()
            for board in rest:
                board.publish(peer_record(me(board)))
            await asyncio.gather(*(flushed(board) for board in rest))
            for board in rest:
                await sees(board, lambda seen: len(seen) == 3)

    run(main())


def test_a_peer_without_a_board_is_not_a_swarm(tmp_path: Path) -> None:
    async def main() -> None:
        silent = await p2p.start(tmp_path / "silent", host_addresses=p2p.LOOPBACK)
        other = await p2p.start(tmp_path / "other", host_addresses=p2p.LOOPBACK, bootstrap=await silent.addresses())
        try:
            with pytest.raises(SwarmUnreachable, match="nobody answers on the board"):
                await Board.start(other)
        finally:
            await other.close()
            await silent.close()
        with pytest.raises((TransportError, SwarmUnreachable)):
            await Board.start(other)

    run(main())


WRONG_CLOCK = """
import time
real, shift = time.time, float(__import__("sys").argv[3])
time.time = lambda: real() + shift
import asyncio, sys
from pathlib import Path
from dht import p2p
from dht.node import Board
from tests.cluster.eventually import WITHIN_S, comes
from tests.dht_samples import peer_record

async def main():
    transport = await p2p.start(Path(sys.argv[1]), host_addresses=p2p.LOOPBACK, bootstrap=(sys.argv[2],))
    board = await Board.start(transport)
    board.publish(peer_record(transport.identity))
    await board.flush(timeout_s=200)
    while len(seen := await board.peers(timeout_s=60)) < 2:
        await asyncio.sleep(0.5)
    print(transport.peer_id, *[p.peer for p in seen], flush=True)
    sys.stdin.read()
    await board.close()
    await transport.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("shift", [-90.0, 90.0])
def test_a_peer_whose_clock_is_90_s_wrong_sees_and_is_seen(tmp_path: Path, shift: float) -> None:
    async def main() -> None:
        async with boards(tmp_path, 2) as (a, b):
            a.publish(peer_record(me(a)))
            await flushed(a)
            (boot,) = await a.transport.addresses()
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRONG_CLOCK, str(tmp_path / "wrong"), boot, str(shift),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None
            async with asyncio.timeout(WITHIN_S):
                wrong, *seen = (await child.stdout.readline()).decode().split()
            assert sorted(seen) == sorted((a.transport.peer_id, wrong))
            await sees(b, lambda seen: wrong in [r.peer for r in seen])
            child.stdin.close()
            assert await child.wait() == 0
            assert b"the swarm's, corrected" in await child.stderr.read()

    run(main())


PATIENT = "--timeout", "200"
MEASURED = """
import pathlib, sys
from dht.cli_monitor import main
code = main(sys.argv[1:])
loaded = sorted({"torch", "scipy", "pydantic"} & set(sys.modules))
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would count the parent's memory at the fork
print(status.split("VmHWM:")[1].split()[0], ",".join(loaded), file=sys.stderr)
sys.exit(code)
"""


async def monitor(*arguments: str, home: Path) -> tuple[int, str, str, float]:
    """(exit code, stdout, stderr, seconds from start to end) of a real `fusion-monitor`."""
    start = time.perf_counter()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEASURED, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "FUSION_HOME": str(home), "FUSION_SWARM": ""},
    )  # fmt: skip
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode(), time.perf_counter() - start


def test_the_monitor_reads_the_board_small_and_fast(tmp_path: Path, record_property: Any) -> None:
    async def main() -> None:
        async with boards(tmp_path, 2) as (a, b):
            owner = Identity.generate()
            view = a_run(owner, a, [b], step=5, loss=3.25)
            a.publish_run(view, Signer(owner))
            for board in (a, b):
                board.publish(peer_record(me(board)))
                await flushed(board)
            (boot,) = await a.transport.addresses()

            async def complete() -> tuple[str, float] | None:
                code, out, err, seconds = await monitor("status", "--swarm", boot, "--json", *PATIENT, home=tmp_path)
                assert code == 0, err
                found = json.loads(out)
                there = len(found["peers"]) == 2 and len(found["runs"]) == 1 and found["runs"][0]["stages"]
                nonlocal last
                last = found
                return (err, seconds) if there else None

            last: dict[str, Any] = {}
            told = await comes(complete, "both peers and the run")
            assert told is not None
            err, seconds = told
            assert sorted(p["peer"] for p in last["peers"]) == sorted(x.transport.peer_id for x in (a, b))
            assert [(r["name"], r["step"], r["loss"]) for r in last["runs"]] == [("demo", 5, 3.25)]
            assert last["runs"][0]["stages"][0]["peer"] == b.transport.peer_id
            kilobytes, _, loaded = err.strip().partition(" ")
            record_property("monitor_rss_mb", int(kilobytes) / 1e3)
            record_property("monitor_seconds", seconds)
            assert loaded == ""
            assert int(kilobytes) < 100e3
            code, out, _, _ = await monitor(
                "status", "--swarm", boot, "--run", view.run.run[:8], *PATIENT, home=tmp_path
            )
            assert code == 0
            assert "RUN demo" in out
            code, out, err, _ = await monitor("status", "--swarm", boot, "--run", "none", *PATIENT, home=tmp_path)
            assert code == 4 and "fusion-monitor: run 'none' is not on the board" in err
        code, out, err, _ = await monitor("status", "--swarm", boot, home=tmp_path)
        assert (code, out) == (3, "")
        assert boot in err

    run(main())


def test_help_answers_at_once() -> None:
    heavy = "hivemind", "asyncio", "cryptography", "msgspec"
    code = "import resource, sys\nfrom dht.cli_monitor import main\n"
    code += "try: main(['status', '--help'])\nexcept SystemExit: pass\n"
    code += f"print([m for m in {heavy} if m in sys.modules], resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True).stdout
    assert "default: $FUSION_SWARM" in out
    loaded, cpu_s = out.strip().splitlines()[-1].rsplit(" ", 1)
    assert loaded == "[]"
    assert float(cpu_s) < 2.0  # CPU time: wall time is other processes' too

"""Fences, probes and the preflight between real peers on loopback; two sites are emulated at the prober."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from dht import p2p, records
from dht.errors import InputError
from dht.fencing import Fencing
from dht.identity import Identity
from dht.node import Board
from dht.records import NO_FENCE
from peer import preflight
from peer.swarm_network import read_links
from tests.cluster.site_peer import MBIT, PACE, Emulated
from tests.cluster.swarm_cluster import Cluster
from tests.cluster.test_peer_daemon import status
from tests.cluster.volunteer_process import Peer
from tests.dht_samples import peer_record

pytestmark = pytest.mark.timeout(150)


@contextlib.asynccontextmanager
async def two_sites(folder: Path, count: int) -> AsyncIterator[list[tuple[Board, Fencing]]]:
    site: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        made, boot = [], ()
        for i in range(count):
            transport = await p2p.start(folder / f"id{i}", host_addresses=p2p.LOOPBACK, bootstrap=boot)
            stack.push_async_callback(transport.close)
            boot = boot or await transport.addresses()
            site[transport.peer_id] = i % 2
            board = await Board.start(transport)
            stack.push_async_callback(board.close)
            assert transport.identity is not None
            board.publish(peer_record(transport.identity))
            made.append(board)
        swarm = []
        for board in made:
            me = board.transport.peer_id
            fencing = await Fencing.start(board, emulate=lambda p, me=me: Emulated(p, site, me), pace=PACE)  # type: ignore[misc]
            stack.push_async_callback(fencing.close)
            swarm.append((board, fencing))
        yield swarm


CONFIG = """
[model]
family = "gpt2"
[model.gpt2]
layers = 4
width = 128
context = 64
[data]
path = "book.txt"
tokenizer = "bytes"
"""


def test_six_peers_in_two_sites_elect_two_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    Path("book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 60)

    async def main() -> None:
        async with two_sites(tmp_path, 6) as swarm:
            stands: list[list[str]] = []
            async with asyncio.timeout(100):
                while not stands:
                    found = [[f.stand.fence if f.stand else NO_FENCE for _, f in swarm[k::2]] for k in (0, 1)]
                    if all(len(set(s)) == 1 and s[0] != NO_FENCE for s in found) and found[0] != found[1]:
                        stands = found
                    await asyncio.sleep(0.2)
                board = swarm[0][0]
                while not await all_is_published(board):  # noqa: ASYNC110 (other processes' doing: no event tells)
                    await asyncio.sleep(0.5)
            views = {v.id: v for v in await board.fences()}
            assert set(views) == {stands[0][0], stands[1][0]}
            for k in (0, 1):
                leader = views[stands[k][0]].leader
                assert leader in {b.transport.peer_id for b, _ in swarm[k::2]}
            peers = await board.peers()
            assert {p.peer: p.leader for p in peers} == {p.peer: views[p.fence].leader for p in peers}
            await the_plans_input_is_theirs(board, stands)
            fence = {p.peer: p.fence for p in await board.peers()}
            await the_plan_crosses_once(await swarm[0][0].transport.addresses(), fence)

    async def all_is_published(board: Board) -> bool:
        members = sorted(v.members for v in await board.fences())
        peers = await board.peers()
        return members == [3, 3] and len({p.fence for p in peers}) == 2 and len(await board.links()) == 6

    async def the_plans_input_is_theirs(board: Board, stands: list[list[str]]) -> None:
        peers = await board.peers()
        fences = {frozenset(group) for group in (await read_links(board, peers)).fences}
        assert fences == {frozenset(p.peer for p in peers if p.fence == s[0]) for s in stands}

    async def the_plan_crosses_once(addresses: tuple[str, ...], fence: dict[str, str]) -> None:
        command = sys.executable, "-m", "peer.cli_run", "plan", "run.toml", "--swarm", addresses[0]
        process = await asyncio.create_subprocess_exec(
            *command, "--every-device", "--json", stdout=asyncio.subprocess.PIPE
        )
        found = json.loads((await process.communicate())[0])
        assert sorted(map(len, found["fences"])) == [3, 3]
        hosts = [p["peer"] for p in found["plan"]["placement"]]
        assert set(hosts) == set(fence)
        assert sum(fence[a] != fence[b] for a, b in pairwise(hosts)) == 1

    uvloop.run(main())


def test_probes_tell_rates_and_reachability(tmp_path: Path) -> None:
    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=await a.addresses())
        boards = [await Board.start(t) for t in (a, b)]
        fencings = [await Fencing.start(board) for board in boards]
        prober = fencings[1].prober
        assert 0 < (await prober.ping(a.peer_id)).rtt_s < 2
        up, down = await prober.rates(a.peer_id)
        assert min(up, down) > 1 * MBIT
        findings = await preflight.network_findings(b, boards[1], fencings[1])
        by_name = {f.name: f for f in findings}
        assert by_name["reachable"].ok
        assert by_name["clock"].ok
        assert "127.0.0.1" in by_name["seen at"].text
        hidden = await prober.reach(a.peer_id, 1)
        assert hidden.result == "refused"
        for part in (*fencings, *boards, b, a):
            await part.close()

    uvloop.run(main())


def test_one_key_on_two_hosts_is_refused_by_the_files_name(tmp_path: Path) -> None:
    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        board = await Board.start(a)
        twin = tmp_path / "twin"
        twin.write_bytes((tmp_path / "a").read_bytes())
        twin.chmod(0o600)
        assert Identity.from_bytes(twin.read_bytes()).peer_id == a.peer_id
        copy = await p2p.start(twin, host_addresses=p2p.LOOPBACK, bootstrap=await a.addresses())
        with pytest.raises(InputError, match="twin is used by another running peer"):
            await preflight.refuse_second_host(copy, None, twin)
        await preflight.refuse_second_host(a, board, tmp_path / "a")  # the first one is no twin of itself
        for part in (copy, board, a):
            await part.close()

    uvloop.run(main())


def test_a_twin_that_comes_later_is_noticed_by_the_files_name(tmp_path: Path) -> None:
    """The same key on another host, which did not look before it joined: the running daemon says so in its status."""

    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        board = await Board.start(a)
        (address,) = await a.addresses()
        with contextlib.closing(Peer(tmp_path / "volunteer", address)) as daemon:
            await asyncio.to_thread(daemon.event, "joined")
            twin = Identity.from_bytes((daemon.home / "identity").read_bytes())
            address = f"/ip4/198.51.100.9/tcp/4001/p2p/{twin.peer_id}"
            async with asyncio.timeout(100):
                while (found := await asyncio.to_thread(status, daemon.home))["warning"] == "":
                    now = board.clock.now()
                    copy = peer_record(twin, addresses=(address,), published=now)
                    sealed = records.seal(copy, records.Signer(twin), expiration=now + records.TTL_S)
                    stored = {records.place(copy): sealed}
                    await board._replicas.store(board._node, stored, now + records.TTL_S, keep_here=True)
                    await asyncio.sleep(1)
            assert str(daemon.home / "identity") in found["warning"] and "198.51.100.9" in found["warning"]
            assert "one key, one host" in daemon.log.read_text()
            assert await asyncio.to_thread(daemon.end) == 0
        await board.close()
        await a.close()

    uvloop.run(main())


def test_killed_peers_hide_nobodys_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.start(tmp_path, 8, measured=2) as swarm:
            assert max(swarm.seen_s) < 30  # 5 s on a machine of its own, see tests/bench/swarm.py
            await swarm.kill(swarm.names[2:4])
            times, missing = await swarm.read_all(rounds=1)
            assert missing == 0
            assert max(times) < 15

    asyncio.run(main())

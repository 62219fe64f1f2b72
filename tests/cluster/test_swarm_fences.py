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
from tests.cluster.eventually import WITHIN_S, comes
from tests.cluster.site_peer import PACE, Emulated
from tests.cluster.swarm_cluster import Cluster
from tests.cluster.test_peer_daemon import status
from tests.cluster.volunteer_process import Peer
from tests.dht_samples import peer_record

LONG_S = 600.0
pytestmark = pytest.mark.timeout(1500)


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
hf = "untied"
[data]
path = "book.txt"
tokenizer = "bytes"
"""


def save_untied(folder: str) -> None:
    """A GPT-2 without tied embeddings. Those would cross between the sites once a step as well, unless the first and
    the last stage are in one site: a plan that crosses twice is as fast then (0.995 s a step, and 0.994 s)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
        n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(settings).save_pretrained(folder)


def test_six_peers_in_two_sites_elect_two_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    save_untied("untied")
    Path("book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 60)

    async def main() -> None:
        async with two_sites(tmp_path, 6) as swarm:
            board, sites = swarm[0][0], [frozenset(b.transport.peer_id for b, _ in swarm[k::2]) for k in (0, 1)]
            where = await board.transport.addresses()

            async def elected() -> bool:
                return is_elected(swarm) and await is_published(board, sites)

            await comes(elected, "two elected fences", LONG_S)
            await comes(lambda: the_plan_crosses_once(where, sites), "a plan that knows both fences", LONG_S)

    def is_elected(swarm: list[tuple[Board, Fencing]]) -> bool:
        """By their own word, the peers of a site are in one fence, those of the other in another."""
        found = [{f.stand.fence if f.stand else NO_FENCE for _, f in swarm[k::2]} for k in (0, 1)]
        return all(len(s) == 1 and NO_FENCE not in s for s in found) and found[0] != found[1]

    async def is_published(board: Board, sites: list[frozenset[str]]) -> bool:
        """The board says so too: two fences of three members, led by one of them, whom all of them name; a plan's input
        has the same. A lease may run out on a busy machine, and somebody else lead: then all of this comes again."""
        views, peers = {v.id: v for v in await board.fences()}, await board.peers()
        if sorted(v.members for v in views.values()) != [3, 3] or {p.fence for p in peers} != set(views):
            return False
        members = {i: frozenset(p.peer for p in peers if p.fence == i) for i in views}
        named = all(p.leader == views[p.fence].leader for p in peers)
        leads = all(v.leader in members[v.id] for v in views.values())
        planned = {frozenset(group) for group in (await read_links(board, peers)).fences}
        return named and leads and set(members.values()) == planned == set(sites) and len(await board.links()) == 6

    async def the_plan_crosses_once(addresses: tuple[str, ...], sites: list[frozenset[str]]) -> bool:
        """False if a fence was not there when it was planned for."""
        command = sys.executable, "-m", "peer.cli_run", "plan", "run.toml", "--swarm", addresses[0]
        process = await asyncio.create_subprocess_exec(
            *command, "--every-device", "--json", stdout=asyncio.subprocess.PIPE
        )
        out = (await process.communicate())[0]
        if process.returncode:  # the board did not answer it in time
            return False
        found = json.loads(out)
        if sorted(map(len, found["fences"])) != [3, 3]:
            return False
        hosts = [p["peer"] for p in found["plan"]["placement"]]
        assert set(hosts) == sites[0] | sites[1]
        assert sum((a in sites[0]) != (b in sites[0]) for a, b in pairwise(hosts)) == 1
        return True

    uvloop.run(main())


def test_probes_tell_rates_and_reachability(tmp_path: Path) -> None:
    async def main() -> None:
        a = await p2p.start(tmp_path / "a", host_addresses=p2p.LOOPBACK)
        b = await p2p.start(tmp_path / "b", host_addresses=p2p.LOOPBACK, bootstrap=await a.addresses())
        boards = [await Board.start(t) for t in (a, b)]
        fencings = [await Fencing.start(board) for board in boards]
        prober = fencings[1].prober
        assert (await prober.ping(a.peer_id, timeout_s=WITHIN_S)).rtt_s > 0

        async def reachable() -> dict[str, preflight.Finding]:
            by_name = {f.name: f for f in await preflight.network_findings(b, boards[1], fencings[1])}
            return by_name if "reachable" in by_name and by_name["reachable"].ok else {}

        # What takes too long is given up, and tried again.
        up, down = await comes(lambda: prober.rates(a.peer_id), "the rates of a probe", every_s=1.0)
        by_name = await comes(reachable, "that it can be dialled")
        assert min(up, down) > 0  # how fast, `tests.bench` says
        assert by_name["clock"].ok
        assert "127.0.0.1" in by_name["seen at"].text

        async def tried() -> str:
            found = (await prober.reach(a.peer_id, 1)).result
            return "" if found == "unseen" else found  # it did not learn in time where the other is

        assert await comes(tried, "an answer about a closed port") == "refused"
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

        async def refused() -> str:
            try:  # it dials the other for 2 s at most
                await preflight.refuse_second_host(copy, None, twin)
            except InputError as error:
                return str(error)
            return ""

        assert "twin is used by another running peer" in await comes(refused, "that it is refused")
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
            async with asyncio.timeout(LONG_S):
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
            assert len(swarm.seen_s) == 2  # how soon: tests/bench/swarm.py
            await swarm.kill(swarm.names[2:4])
            _, missing = await swarm.read_all(rounds=1)
            assert missing == 0

    asyncio.run(main())

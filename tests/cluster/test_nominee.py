"""A real swarm of six volunteers in two emulated sites: fences elect themselves, the plan's input is theirs, and a dead
stage goes to whom its fence's leader has named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusion_p2p
from dht import p2p
from dht.errors import DhtError
from dht.fence_records import FenceView
from dht.identity import load_or_create
from dht.node import Board
from dht.records import PeerRecord
from peer import swarm_network
from peer.api import Run
from peer.swarm_network import read_links
from tests.cluster import plain

pytestmark = pytest.mark.timeout(1800)
PEERS, STEPS = 6, 8


class Swarm:
    """`site`: by peer id. Volunteers are processes of `site_peer`."""

    def __init__(self, folder: Path) -> None:
        self._homes = [folder / f"peer{k}" for k in range(PEERS)]
        for home in self._homes:
            home.mkdir()
        self.names = [load_or_create(home / "identity").peer_id for home in self._homes]
        self.site = {name: k % 2 for k, name in enumerate(self.names)}
        self._sites = folder / "sites.json"
        self._sites.write_text(json.dumps(self.site))
        self._identity = folder / "looker"
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.addresses: tuple[str, ...] = ()

    def start(self) -> None:
        for name, home in zip(self.names, self._homes, strict=True):
            command = [sys.executable, "-m", "tests.cluster.site_peer", str(self._sites), str(home), *self.addresses]
            with (home / "log.txt").open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
                )
            self.running[name] = process
            if not self.addresses:
                assert process.stdout is not None
                line = next((x for x in process.stdout if "/p2p/" in x), "")
                self.addresses = tuple(word for word in line.split() if word.startswith("/ip4/"))
                assert self.addresses, (home / "log.txt").read_text()

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(240)
            assert process.stdout is not None
            process.stdout.close()

    def look(self, enough: str = "fences") -> tuple[list[PeerRecord], dict[str, FenceView], set[frozenset[str]]]:
        """(peers, fences by id, the fences that a plan would be made with), once there is what was asked for."""

        async def main() -> tuple[list[PeerRecord], dict[str, FenceView], set[frozenset[str]]]:
            transport = await p2p.start(self._identity, host_addresses=(), bootstrap=self.addresses, client_only=True)
            board = await Board.start(transport, client_only=True)
            try:
                async with asyncio.timeout(600):
                    while True:
                        try:
                            peers = list(await board.peers())
                            views = {v.id: v for v in await board.fences()}
                            if self._enough(enough, peers, views):
                                return peers, views, set(map(frozenset, (await read_links(board, peers)).fences))
                        except DhtError:
                            pass
                        await asyncio.sleep(0.5)
            finally:
                await board.close()
                await transport.close()

        return asyncio.run(main())

    def _enough(self, what: str, peers: list[PeerRecord], views: dict[str, FenceView]) -> bool:
        measured = [p for p in peers if p.devices and all(d.flops_per_s > 0 for d in p.devices)]
        elected = sorted(v.members for v in views.values()) == [3, 3] and {p.fence for p in peers} == set(views)
        if what == "fences":
            return len(measured) == PEERS and elected and all(len(v.spares) == 3 for v in views.values())
        return sorted(len(v.spares) for v in views.values()) == [1, 3]


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    torch.set_num_threads(1)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(swarm_network, "_machine", lambda record: "")  # one machine, but two sites
    found = Swarm(tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_a_dead_stage_goes_to_the_leaders_nominee(swarm: Swarm, tmp_path: Path) -> None:
    _, views, seen = swarm.look()
    sites = [frozenset(n for n in swarm.names if swarm.site[n] == k) for k in (0, 1)]
    assert seen == set(sites)  # the plan's input is what was elected
    assert {swarm.site[v.leader] for v in views.values()} == {0, 1}
    batches = plain.token_batches(STEPS, 4)
    with Run(
        plain.gpt2(), data=batches, swarm=list(swarm.addresses), run_dir=tmp_path / "run", stages=2, compute=False,
        micro_batches=2, micro_batch_size=2, optimizer=fusion_p2p.SGD(lr=0.1), compression="none", save_every=2,
        recover_s=300.0,
    ) as run:  # fmt: skip
        losses, killed, nominee = [], "", ""
        for step in run.steps(STEPS):
            losses.append(step.loss)
            if step.step != 2:
                continue
            hosts = [p.peer for p in run.plan().placement]
            assert len({swarm.site[h] for h in hosts}) == 1, "a stage apart from the other"
            _, views, _ = swarm.look("spares")
            (home,) = [v for v in views.values() if len(v.spares) == 1]
            nominee = home.spares[0]
            assert {nominee, *hosts} == sites[swarm.site[nominee]]
            killed = next(h for h in hosts if h != home.leader)
            swarm.kill(killed)
        plan = run.plan()
    assert killed not in {p.peer for p in plan.placement}
    assert nominee in {p.peer for p in plan.placement}, [r for r in plan.reasons if "moved" in r]
    assert any(f"moved to {nominee[-8:]}" in r for r in plan.reasons)
    reference = plain.gpt2()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert losses == pytest.approx(plain.train(reference, batches, optimizer, micro_batch_size=2), rel=1e-5)

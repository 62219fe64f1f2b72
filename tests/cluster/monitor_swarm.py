"""Real boards on loopback that show a swarm: peers of many identities, fences, a run whose loss falls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from dht import p2p, records
from dht.fence_records import FenceHead, FenceLink, FenceRecord, LinkFigure, LinksRecord, LinkSummary
from dht.identity import Identity
from dht.node import Board
from dht.receipts import Credit, Receipt
from dht.records import Device, Event, LinkBytes, PeerRecord, RunRecord, Signer, StageFigures, StageHost, Work
from dht.runs import RunView
from dht.storing import dht_id
from tests.dht_samples import run_record

FENCES = ("a1" * 8, "b2" * 8, "c3" * 8)


def identity(number: int) -> Identity:
    """The same key each time: pictures of two test runs can be compared."""
    return Identity.from_seed(hashlib.blake2b(f"monitor {number}".encode(), digest_size=32).digest())


@dataclass
class Swarm:
    """`board` publishes everything, each record under its subject's own key. Peer 0 is the trainer."""

    board: Board
    address: str
    owner: Identity = field(default_factory=lambda: identity(10_000))
    peers: list[Identity] = field(default_factory=list)
    published: dict[int, PeerRecord] = field(default_factory=dict)
    step: int = 0
    plan: int = 1
    hosts: list[int] = field(default_factory=list)  # peer number by stage
    run: RunRecord | None = None
    events: list[Event] = field(default_factory=list)
    led_at: float = 0.0

    def now(self) -> float:
        return self.board.clock.now()

    def add_peers(self, count: int, *, fences: int = 3) -> None:
        for number in range(len(self.peers), len(self.peers) + count):
            self.peers.append(identity(number))
            cuda = number % 4 == 1
            device = Device(
                kind="cuda" if cuda else "cpu", name="GeForce RTX 3060" if cuda else "Ryzen 5 5600X",
                flops_per_s=9e12 if cuda else 6e10 * (1 + number % 3), memory_bytes_per_s=3e11 if cuda else 3e10,
                memory_bytes=(12 if cuda else 16) << 30, free_bytes=(9 if cuda else 6) << 30,
            )  # fmt: skip
            fence = FENCES[number % fences] if fences else records.NO_FENCE
            self.publish_peer(
                number, devices=(device,), fence=fence, hours="22:00-07:00" if number % 5 == 0 else "",
                reach=("direct", "relay", "")[number % 3], state="paused" if number % 9 == 8 else "free",
                place="northern Spain" if number == 0 else "",
                addresses=(f"/ip4/198.51.100.{number % 250}/tcp/4000",),
            )  # fmt: skip

    def publish_peer(self, number: int, **fields: object) -> None:
        me = self.peers[number]
        known = self.published.get(number) or PeerRecord(peer=me.peer_id, version="0.1.0", devices=())
        record = PeerRecord(**{name: getattr(known, name) for name in known.__struct_fields__} | fields)  # type: ignore[arg-type]
        self.published[number] = record
        self.board.publish(record, Signer(me))

    def add_fences(self) -> None:
        """The lowest-numbered member of each fence leads it. A lease is to be renewed."""
        self.led_at = self.now()
        ids = sorted({r.fence for r in self.published.values()} - {records.NO_FENCE})
        for k, fence in enumerate(ids):
            members = [n for n, r in self.published.items() if r.fence == fence]
            leader = self.peers[members[0]]
            head = {"fence": fence, "leader": leader.peer_id, "term": 1, "score": 5, "members": len(members)}
            outside = tuple(
                FenceLink(other, LinkSummary((20_000, 8_000, 100_000)[(k + j) % 3], 35_000, 6))
                for j, other in enumerate(ids)
                if other != fence
            )
            record = FenceRecord(
                **head, inside=LinkSummary(940_000, 900, len(members), 1.4), outside=outside, published=self.now()
            )  # type: ignore[arg-type]
            self.board.publish(record, Signer(leader))
            self.board.publish(FenceHead(**head, published=self.now()), Signer(leader))  # type: ignore[arg-type]
            figures = tuple(
                LinkFigure(self.peers[n].public_key, 800 + 100 * n, 900_000, 850_000, 40) for n in members[1:6]
            )
            links = LinksRecord(peer=leader.peer_id, fence=fence, links=figures, published=self.now())
            self.board.publish(links, Signer(leader))

    def start_run(self, hosts: list[int], *, name: str = "gpt2-bible", total: int = 500) -> None:
        self.hosts = hosts
        self.run = run_record(
            self.owner,
            self.peers[0].peer_id,
            name=name,
            total=total,
            since=self.now(),
            created=round(self.now() - 600, 1),
        )
        run = records.run_id(self.owner.public_key, name, "ab" * 32, 7, self.run.created)
        self.run = RunRecord(**{n: getattr(self.run, n) for n in self.run.__struct_fields__} | {"run": run})
        self.publish_peer(0, work=(Work(run, -1),), state="busy")
        for stage, number in enumerate(hosts):
            self.publish_peer(number, work=(Work(run, stage),), state="busy")
        self.advance(1)

    def loss(self) -> float:
        return 2.2 + 3.4 * math.exp(-self.step / 60) + 0.05 * math.sin(self.step)

    def advance(self, steps: int, **fields: object) -> None:
        """Publish the run `steps` further on. Stage 1 is slow, its link is compressed."""
        assert self.run is not None
        self.step += steps
        run = self.run
        if self.led_at and self.now() - self.led_at > 10:
            self.add_fences()
        head = RunRecord(
            **{n: getattr(run, n) for n in run.__struct_fields__}
            | {
                "step": self.step,
                "loss": round(self.loss(), 4),
                "step_time_s": 2.1,
                "tokens_per_s": 1950.0,
                "plan": self.plan,
            }
            | fields
        )  # type: ignore[arg-type]
        last = len(self.hosts) - 1
        links = [LinkBytes(-1, 0, 8192 * self.step, "dense", 8192, 8192)]
        for k in range(last):
            codec, dense = (("rotated:4", 8 << 20), ("dense", 8 << 20), ("topk-masked:0.01", 8 << 20))[k % 3]
            size = {"rotated:4": dense // 8, "dense": dense, "topk-masked:0.01": dense // 50}[codec]
            why = "0.31 s; dense would take 3.2 s, 0.4 s allowed (0.25 of the bottleneck)" if codec != "dense" else ""
            links += [LinkBytes(a, b, size * self.step, codec, size, dense, why) for a, b in ((k, k + 1), (k + 1, k))]
        figures = tuple(
            StageFigures(k, 0, 1.8 if k == 1 else 0.7 + 0.1 * k, 0.1 if k else 0.05, 0.2 if k == 1 else 1.1, "")
            for k in range(last + 1)
        )
        view = RunView(
            run=head, stages=tuple(StageHost(k, 0, self.peers[n].peer_id, "cpu") for k, n in enumerate(self.hosts)),
            links=tuple(links), events=tuple(self.events), figures=figures,
        )  # fmt: skip
        self.board.publish_run(view, Signer(self.owner))
        for stage, number in enumerate(self.hosts):
            near = [s for s in (stage - 1, stage + 1) if 0 <= s <= last]
            credits = tuple(
                Credit(self.peers[self.hosts[s]].peer_id, s, 16 * self.step, self.step << 20, 3e12 * self.step)
                for s in near
            )
            receipt = Receipt(peer=self.peers[number].peer_id, run=run.run, credits=credits)
            self.board.publish(receipt, Signer(self.peers[number]))

    def forge(self, record: PeerRecord | RunRecord, subject: Identity, forger: Identity) -> None:
        """`record` of `subject`, signed by `forger`, laid into the first node's store past its own checks: what a
        hostile replica hands out."""
        key, subkey = records.place(record)
        expiration = self.now() + 40.0
        genuine = records.seal(record, Signer(subject), expiration=expiration)
        forged = genuine[:-64] + forger.sign(b"of another key" + genuine[:-64])
        protocol = self.board._node.protocol
        at = dht_id(key)
        assert protocol.storage.store(at, protocol.serializer.dumps(forged), expiration, subkey=subkey)

    def say(self, text: str) -> None:
        self.events.append(Event(round(self.now(), 1), text))


@contextlib.asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[Swarm]:
    """Two boards on loopback; what the first publishes is stored at both."""
    async with contextlib.AsyncExitStack() as stack:
        found: list[Board] = []
        boot: tuple[str, ...] = ()
        for i in range(2):
            transport = await p2p.start(folder / f"id{i}", host_addresses=p2p.LOOPBACK, bootstrap=boot)
            stack.push_async_callback(transport.close)
            board = await Board.start(transport)
            stack.push_async_callback(board.close)
            found.append(board)
            boot = boot or await transport.addresses()
        yield Swarm(found[0], boot[0])


async def start_monitor(address: str, folder: Path, *arguments: str) -> tuple[asyncio.subprocess.Process, str]:
    """(process, url) of a real `fusion-monitor web`."""
    import os
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dht.cli_monitor", "web", "--swarm", address, "--port", "0", *arguments,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "FUSION_HOME": str(folder)},
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(240):
        line = (await process.stdout.readline()).decode()
    assert "http" in line, f"fusion-monitor web said {line!r}"
    return process, line.split()[-1]

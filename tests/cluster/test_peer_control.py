"""A trainer's control stream against a real volunteer: offers, refusals with figures, leases, deaths, memory, blobs."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht import p2p
from dht.p2p import P2PTransport
from fusion_p2p.capture import Captured, capture
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader
from fusion_p2p.plan import Numerics
from fusion_p2p.release import cut_batch, release
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import initial_state, to_bytes
from fusion_p2p.split import split
from peer import signing
from peer.blobs import BlobStore, fetch_blob, serve_blobs
from peer.channel_io import ChannelSettings
from peer.errors import BlobError, RefusedError
from peer.links import Links
from peer.local_control import ask
from peer.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    BlobRef,
    Connect,
    Endpoint,
    Hello,
    Mark,
    SessionCert,
    StageFault,
    StageOffer,
    StageStatus,
)
from peer.ratelimit import Limiter
from peer.trainer_host import Host, RunPaused
from tests.cluster.outside import Resident
from tests.cluster.volunteer_process import Peer

pytestmark = pytest.mark.timeout(900)
OWNER = signing.new_session_key()
TWO_THREADS = Numerics(cuts=(), micro_batches=2, micro_batch_size=4, threads=2)
BESIDE_BYTES = 256 << 20  # what --help says that a peer takes beside --memory
Volunteer = tuple[Peer, dict[str, Any]]


class Small(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU(),
            torch.nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


@functools.cache
def captured(width: int) -> Captured:
    torch.manual_seed(0)
    return capture(Small(width), (torch.randn(4, 8),), loss=lambda output, batch: output)


@dataclass
class Trainer:
    """As much of a trainer as these tests need."""

    transport: P2PTransport
    store: BlobStore
    got: Captured
    epoch: int
    owner: Ed25519PrivateKey
    name: str

    def __post_init__(self) -> None:
        self.session_key = signing.new_session_key()
        self.spec, self.signed_spec = signing.make_run_spec(
            self.owner, name=self.name, opdag_hash=self.got.opdag.hash, seed=1, created=1.0,
            optimizer=OptimizerSpec(kind="sgd", lr=0.1),
        )  # fmt: skip
        self.faults: list[StageFault] = []
        self.statuses: list[StageStatus] = []
        self.fault_came = asyncio.Event()

    def hello(self, **changes: Any) -> Hello:
        fields: dict[str, Any] = {
            "run": self.spec.run, "session_key": signing.public_bytes(self.session_key),
            "trainer_peer": self.transport.peer_id, "epoch": self.epoch, "expires": time.time() + 600,
        }  # fmt: skip
        return Hello(
            version=PROTOCOL_VERSION,
            spec=self.signed_spec,
            cert=signing.sign(SessionCert(**fields | changes), self.owner),
        )

    def on_fault(self, peer: str, fault: StageFault) -> None:
        self.faults.append(fault)
        self.fault_came.set()

    async def host(self, peer: dict[str, Any], hello: Hello | None = None) -> Host:
        await self.transport.connect(peer["peer"], tuple(peer["addresses"]))
        host = Host(
            self.transport, peer["peer"], on_status=self.statuses.append, on_fault=self.on_fault,
            channels=ChannelSettings(), is_successor=lambda cert: signing.is_successor(cert, self.spec, self.epoch),
        )  # fmt: skip
        await host.open(hello or self.hello())
        return host

    def offer(
        self,
        peer: str,
        *,
        key: Any = None,
        batch: int = 4,
        opdag: bytes | None = None,
        numerics: Numerics | None = None,
        **changes: Any,
    ) -> StageOffer:
        numerics = numerics or Numerics(cuts=(), micro_batches=2, micro_batch_size=batch)
        (program,) = split(self.got.opdag, ())
        blob, size = self.store.put(to_bytes(initial_state(self.got.state, program)))
        fields: dict[str, Any] = {
            "run": self.spec.run, "epoch": self.epoch, "plan": 1, "stage": 0, "replica": 0, "incarnation": 0,
            "opdag_hash": self.got.opdag.hash, "target_peer": peer, "device": "cpu", "expires": time.time() + 600,
        }  # fmt: skip
        return StageOffer(
            assignment=signing.sign(Assignment(**fields | changes), key or self.session_key),
            numerics=numerics, window=2, opdag=self.got.opdag.to_bytes() if opdag is None else opdag,
            state=BlobRef(blob, size, (self.transport.peer_id,)), first_tick=0,
        )  # fmt: skip


@asynccontextmanager
async def trainer(
    folder: Path, peer: dict[str, Any], *, width: int = 16, epoch: int = 1, owner: Ed25519PrivateKey = OWNER
) -> AsyncIterator[Trainer]:
    """Of a run named after the test's folder, so that trainers of one test lead the same run."""
    name = secrets.token_hex(4)
    transport = await p2p.start(
        folder / f"trainer-{name}", host_addresses=p2p.LOOPBACK, bootstrap=tuple(peer["addresses"][:1])
    )
    try:
        store = BlobStore(folder / f"blobs-{name}")
        await serve_blobs(transport, store, lambda *_: True, limiter=Limiter(None), settings=ChannelSettings())
        yield Trainer(transport, store, captured(width), epoch, owner, folder.name)
    finally:
        await transport.close()


@asynccontextmanager
async def serving(host: Host) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(host.serve())
    try:
        yield task
    finally:
        host.close("the test is over")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(700):
            await coroutine

    asyncio.run(bounded())


@pytest.fixture(scope="module")
def volunteer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volunteer]:
    """One volunteer for all tests here, each of which has a run of its own; the last one ends it."""
    owner = signing.public_bytes(OWNER).hex()
    process = Peer(tmp_path_factory.mktemp("peer"), "--runs", owner, memory="600MiB")
    try:
        joined = process.event("joined")
        process.event("devices")
        yield process, joined
    finally:
        process.close()


def test_a_stage_trains_is_marked_and_its_snapshot_is_served_to_the_named_only(
    volunteer: Volunteer, tmp_path: Path
) -> None:
    process, peer = volunteer

    async def main() -> None:
        async with trainer(tmp_path, peer) as t, serving(await t.host(peer)) as _:
            owner = signing.public_bytes(OWNER).hex()
            asked = f"run {t.spec.name} of owner {owner} asks for this machine"
            assert asked in process.log.read_text(), "who asks and for what is shown before anything is offered"
            host = await t.host(peer)  # the same session may come twice: a trainer reconnects
            async with serving(host):
                accepted = await host.offer(t.offer(peer["peer"]), 0)
                assert accepted.memory_bytes > 0
                assert accepted.trial_backward_s > 0
                me = Endpoint(stage=TRAINER, peer=t.transport.peer_id, endpoint="trainer", incarnation=0)
                there = Endpoint(stage=0, peer=peer["peer"], endpoint=accepted.endpoint, incarnation=0)
                async with Links(t.transport, me, t.spec.run, 1, bound=lambda src, kind, value: 4096) as links:
                    links.update([me, there], 1)
                    await host.send(Connect(run=t.spec.run, plan=1, stage=0, endpoints=(me, there)))
                    losses = await train(t, links, ticks=3)
                    assert losses[2] < losses[0]
                    marked = await (await host.mark(Mark(run=t.spec.run, stage=0, tick=3)))
                path = await fetch_blob(t.transport, t.store, t.spec.run, marked.state, max_bytes=1 << 20)
                assert path.stat().st_size == marked.state.size
        async with trainer(tmp_path, peer) as stranger:
            await stranger.transport.connect(peer["peer"], tuple(peer["addresses"]))
            with pytest.raises(BlobError, match="no such blob for you"):
                await fetch_blob(stranger.transport, stranger.store, t.spec.run, marked.state, max_bytes=1 << 20)

    run(main())


async def train(t: Trainer, links: Links, ticks: int) -> list[float]:
    """Release `ticks` ticks of one batch; the summed losses of each."""
    programs = split(t.got.opdag, ())
    batch = t.got.feed((torch.ones(8, 8),))
    sizes, parts = cut_batch(t.got.opdag, batch, 4, training=True)
    for tick in range(ticks):
        for frame in release(t.got.opdag, programs, tick, StepHeader(True, tick, sizes), parts):
            await links.send(frame)
    losses = [0.0] * ticks
    done = 0
    async for frame in links.frames():
        if frame.kind is Kind.LOSS:
            losses[frame.tick] += _loss(frame)
        done += frame.kind is Kind.DONE
        if done == ticks:
            break
    return losses


def _loss(frame: Frame) -> float:
    return float(struct.unpack("<f", frame.payload)[0])


def test_who_may_lead_and_what_is_believed(volunteer: Volunteer, tmp_path: Path) -> None:
    """Forged, expired and foreign papers; a second trainer of the run; a take-over by a higher epoch."""
    _, peer = volunteer

    async def main() -> None:
        async with trainer(tmp_path, peer, width=24) as first, trainer(tmp_path, peer, width=24, epoch=2) as second:
            async with trainer(tmp_path, peer, owner=signing.new_session_key()) as stranger:
                with pytest.raises(RefusedError, match="named owners") as caught:
                    await stranger.host(peer)
                assert caught.value.code == "policy"
            for changes, words in (
                ({"trainer_peer": peer["peer"]}, "names peer"),
                ({"expires": time.time() - 5}, "expired"),
                ({"run": "00" * 16}, "for run"),
            ):
                with pytest.raises(RefusedError, match=words) as caught:
                    await first.host(peer, first.hello(**changes))
                assert caught.value.code == "signature"
            host = await first.host(peer)
            async with serving(host) as link:
                for offer, code in (
                    (first.offer(peer["peer"], key=signing.new_session_key()), "signature"),
                    (first.offer(first.transport.peer_id), "signature"),
                    (first.offer(peer["peer"], device="cuda:0"), "policy"),
                    (first.offer(peer["peer"], opdag=b"{}"), "admission"),
                    (first.offer(peer["peer"], opdag=b""), "admission"),
                    (first.offer(peer["peer"], numerics=TWO_THREADS), "policy"),  # from here on it knows the OP-DAG
                ):
                    with pytest.raises(RefusedError) as caught:
                        await host.offer(offer, 0)
                    assert caught.value.code == code, str(caught.value)
                first.session_key, kept = signing.new_session_key(), first.session_key
                with pytest.raises(RefusedError, match=first.transport.peer_id) as caught:
                    await first.host(peer)
                assert caught.value.code == "lease"
                first.session_key = kept
                async with serving(await second.host(peer)):
                    await asyncio.wait({link})
                    with pytest.raises(RunPaused, match="led by trainer"):
                        link.result()

    run(main())


def test_too_little_memory_is_a_refusal_with_figures(volunteer: Volunteer, tmp_path: Path) -> None:
    """Too large a state, then too large a step; the executor survives both and takes the next stage. As seen from
    outside the peer never holds more than --memory and what --help says beside. (An executor's private memory is
    limited; of its libraries, which the kernel counts too, 20 to 40 MiB become resident while a stage is built.)"""
    process, peer = volunteer
    executor, seen = process.executor().pid, Resident(process.executor())

    async def main() -> None:
        async with trainer(tmp_path, peer, width=5000) as big, serving(await big.host(peer)):
            host = await big.host(peer)
            async with serving(host):
                with pytest.raises(RefusedError, match=r"stage 0 needs 0\.\d\d GiB, cap 0\.59 GiB") as caught:
                    await host.offer(big.offer(peer["peer"]), 0)
                seen.look()
                assert caught.value.code == "memory"
                assert caught.value.needed > caught.value.cap == 600 << 20
        async with trainer(tmp_path, peer, width=256) as t:
            host = await t.host(peer)
            async with serving(host):
                with pytest.raises(RefusedError) as caught:
                    await host.offer(t.offer(peer["peer"], batch=100_000), 0)  # in pieces of 100 MiB
                seen.look()
                assert caught.value.code == "memory", str(caught.value)
                assert caught.value.needed > caught.value.cap
                await host.offer(t.offer(peer["peer"]), 0)

    run(main())
    seen.look()
    assert process.executor().pid == executor
    cap = 600 << 20
    print(f"resident: {seen.first_bytes >> 20} MiB before, {seen.most_bytes >> 20} at most, --memory {cap >> 20}")
    assert seen.most_bytes > seen.first_bytes + (cap - seen.first_bytes) // 3, "nothing tried to pass it"
    beside = [p for p in (psutil.Process(process.process.pid), *process.children()) if p.pid != executor]
    assert max(0, seen.most_bytes - cap) + sum(p.memory_info().rss for p in beside) <= BESIDE_BYTES


def test_outside_its_hours_a_volunteer_is_paused_and_takes_nothing(tmp_path: Path) -> None:
    now = time.time()
    begin, end = (time.strftime("%H:%M", time.localtime(now + hours * 3600)) for hours in (6, 12))
    process = Peer(tmp_path / "night", "--hours", f"{begin}-{end}")
    try:
        peer = process.event("joined")

        async def main() -> None:
            async with trainer(tmp_path, peer) as t:
                with pytest.raises(RefusedError, match=f"computes at {begin}-{end} only") as caught:
                    host = await t.host(peer)
                    async with serving(host):
                        await host.offer(t.offer(peer["peer"]), 0)
                assert caught.value.code == "policy"

        run(main())
        assert ask(process.home, "status").state == "paused"
        assert process.end() == 0
    finally:
        process.close()


def test_a_dead_executor_is_reported_and_the_next_offer_is_taken(volunteer: Volunteer, tmp_path: Path) -> None:
    process, peer = volunteer

    async def main() -> None:
        async with trainer(tmp_path, peer) as t:
            host = await t.host(peer)
            async with serving(host):
                await host.offer(t.offer(peer["peer"]), 0)
                os.kill(process.executor().pid, signal.SIGKILL)
                await t.fault_came.wait()
                (fault,) = t.faults
                assert fault.code == "died"
                assert "signal 9" in fault.reason
                offered = False
                while not offered:
                    try:
                        await host.offer(t.offer(peer["peer"], incarnation=1, plan=2), 0)
                        offered = True
                    except RefusedError as error:
                        assert error.code == "busy"
                        await asyncio.sleep(0.2)

    run(main())


def test_leaving_tells_the_trainer(volunteer: Volunteer, tmp_path: Path) -> None:
    process, peer = volunteer

    async def main() -> None:
        async with trainer(tmp_path, peer) as t:
            host = await t.host(peer)
            async with serving(host) as link:
                await host.offer(t.offer(peer["peer"]), 0)
                process.process.send_signal(signal.SIGTERM)
                await asyncio.wait({link})
                assert [f.code for f in t.faults] == ["leaving"], link

    run(main())
    assert process.process.wait(240) == 0

"""What a volunteer holds and for whom, with executors and trainers played: blobs, leases, offers that lie."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fusion_p2p.frame import Kind
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.suspicion import FrameId, Suspicion
from peer import signing
from peer.blobs import BlobStore
from peer.errors import RefusedError
from peer.executor_process import Death, ExecutorProcess
from peer.executor_protocol import HostStage
from peer.policy import Policy
from peer.protocol import (
    Accepted,
    Assignment,
    BlobRef,
    Connect,
    Drop,
    Mark,
    Pass,
    Refused,
    SessionCert,
    Signed,
    Snapshotted,
    StageOffer,
    Suspect,
    Trim,
)
from peer.volunteer import SNAPSHOTS_KEPT, Volunteer

OPDAG = b'{"not":"opened here"}'
NUMERICS = Numerics(cuts=(), micro_batches=1, micro_batch_size=1)


class PlayedExecutor:
    """Takes what it is sent."""

    start = msgspec.defstruct("Start", ["memory_bytes"])(1 << 30)

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    async def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)


class PlayedTrainer:
    """A session of its own run (or of `run_of`'s, at a later epoch), and the offers that it signs."""

    def __init__(self, run_of: PlayedTrainer | None = None, epoch: int = 1) -> None:
        self.owner = signing.new_session_key() if run_of is None else run_of.owner
        self.key = signing.new_session_key()
        digest = signing.hashlib.blake2b(OPDAG, digest_size=32).hexdigest()
        self.spec, _ = signing.make_run_spec(
            self.owner, name="r", opdag_hash=digest, seed=1, created=1.0, optimizer=OptimizerSpec(kind="sgd", lr=0.1)
        )
        self.cert = SessionCert(
            run=self.spec.run, session_key=signing.public_bytes(self.key), trainer_peer="t", epoch=epoch, expires=9e9
        )
        self.signed_cert = signing.sign(self.cert, self.owner)
        self.heard: list[msgspec.Struct] = []

    def post(self, message: msgspec.Struct) -> None:
        self.heard.append(message)

    def end(self, code: str, reason: str, cert: Signed) -> None:
        self.heard.append(Refused(code=code, reason=reason, cert=cert))

    def offer(self, state: str, *, device: str = "cpu", incarnation: int = 0, holders: int = 1) -> StageOffer:
        assignment = Assignment(
            run=self.spec.run, epoch=self.cert.epoch, plan=1, stage=0, replica=0, incarnation=incarnation,
            opdag_hash=self.spec.opdag_hash, target_peer="v", device=device, expires=9e9,
        )  # fmt: skip
        return StageOffer(
            assignment=signing.sign(assignment, self.key), numerics=NUMERICS, window=1, opdag=OPDAG,
            state=BlobRef(state, 3, ("t",) * holders), first_tick=0,
        )  # fmt: skip

    def accepted(self) -> Accepted:
        return Accepted(run=self.spec.run, stage=0, incarnation=0, endpoint="e", memory_bytes=1)

    def snapshotted(self, tick: int, blob: str) -> Snapshotted:
        return Snapshotted(run=self.spec.run, stage=0, incarnation=0, tick=tick, state=BlobRef(blob, 3, ("v",)))


class Scene:
    def __init__(self, home: Path) -> None:
        self.executors = {"cpu": PlayedExecutor(), "cuda:0": PlayedExecutor()}
        self.store = BlobStore(home / "blobs")
        played = cast(dict[str, ExecutorProcess], self.executors)
        self.volunteer = Volunteer("v", home, Policy(), self.store, played, lambda: None)

    def host(self, trainer: PlayedTrainer, state: str) -> None:
        self.volunteer.admit(trainer)
        asyncio.run(self.volunteer.offer(trainer, trainer.offer(state)))
        self.volunteer.on_message(trainer.accepted())

    def command(self, trainer: PlayedTrainer, message: Any) -> None:
        asyncio.run(self.volunteer.command(trainer, message))

    def blob(self, text: bytes) -> str:
        return self.store.put(text)[0]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_state_of_a_stage_goes_once_it_is_made_and_snapshots_with_the_stage(scene: Scene) -> None:
    trainer, state, first, second = PlayedTrainer(), *(scene.blob(b) for b in (b"one", b"two", b"six"))
    scene.host(trainer, state)
    assert scene.store.hashes() == {first, second}
    scene.volunteer.on_message(trainer.snapshotted(5, first))
    scene.volunteer.on_message(trainer.snapshotted(9, second))
    scene.command(trainer, Trim(run=trainer.spec.run, stage=0, tick=9))
    assert scene.store.hashes() == {second}
    assert scene.volunteer.may_fetch("t", trainer.spec.run, second)
    scene.command(trainer, Drop(run=trainer.spec.run, stage=0))
    assert not scene.store.hashes()
    assert not scene.volunteer.may_fetch("t", trainer.spec.run, second)


@pytest.mark.parametrize("end", ["death", "again"])
def test_nothing_is_left_of_a_stage_that_dies_or_is_replaced(scene: Scene, end: str) -> None:
    trainer, snapshot = PlayedTrainer(), scene.blob(b"two")
    scene.host(trainer, "0" * 64)
    scene.volunteer.on_message(trainer.snapshotted(5, snapshot))
    if end == "death":
        scene.volunteer.on_death("cpu", Death(code="died", reason="gone"))
    else:
        asyncio.run(scene.volunteer.offer(trainer, trainer.offer("1" * 64, incarnation=1)))
    assert not scene.store.hashes()


def test_who_leaves_tells_those_at_once_of_whom_it_hosts_nothing_and_takes_nothing_more(scene: Scene) -> None:
    served, waiting, late = PlayedTrainer(), PlayedTrainer(), PlayedTrainer()
    scene.host(served, "0" * 64)
    scene.volunteer.admit(waiting)
    asyncio.run(scene.volunteer.leave("it leaves", 0.0))
    assert [(m.code, m.reason) for m in waiting.heard if isinstance(m, Refused)] == [("policy", "it leaves")]
    assert not [m for m in served.heard if isinstance(m, Refused)], "its stage was to be handed over"
    with pytest.raises(RefusedError, match="it leaves"):
        scene.volunteer.admit(late)
    with pytest.raises(RefusedError, match="it leaves"):
        asyncio.run(scene.volunteer.offer(waiting, waiting.offer("1" * 64)))


def test_one_run_does_not_delete_what_another_keeps(scene: Scene) -> None:
    """A stranger names another run's snapshot as its own state, and is refused, dropped or accepted."""
    honest, stranger, snapshot = PlayedTrainer(), PlayedTrainer(), scene.blob(b"two")
    scene.host(honest, "0" * 64)
    scene.volunteer.on_message(honest.snapshotted(5, snapshot))
    scene.host(stranger, snapshot)
    assert scene.store.has(snapshot)
    scene.command(stranger, Drop(run=stranger.spec.run, stage=0))
    assert scene.store.has(snapshot)
    assert not scene.volunteer.may_fetch("t", stranger.spec.run, snapshot)


def test_a_stage_keeps_few_snapshots_whatever_is_marked(scene: Scene) -> None:
    trainer = PlayedTrainer()
    scene.host(trainer, "0" * 64)
    blobs = [scene.blob(bytes([n])) for n in range(9)]
    for tick, blob in enumerate(blobs):
        scene.volunteer.on_message(trainer.snapshotted(tick, blob))
    assert scene.store.hashes() == set(blobs[-SNAPSHOTS_KEPT:])


@pytest.mark.parametrize(("state", "holders"), [("../../etc/passwd", 1), ("zz" * 32, 1), ("", 1), ("0" * 64, 99)])
def test_an_offer_whose_state_is_no_blob_is_refused_before_anything_is_asked(
    scene: Scene, state: str, holders: int
) -> None:
    trainer = PlayedTrainer()
    scene.volunteer.admit(trainer)
    with pytest.raises(RefusedError) as caught:
        asyncio.run(scene.volunteer.offer(trainer, trainer.offer(state, holders=holders)))
    assert caught.value.code == "admission"
    assert not scene.volunteer.stages and not scene.executors["cpu"].sent


def test_a_trainer_that_was_put_out_commands_nothing(scene: Scene) -> None:
    old = PlayedTrainer()
    scene.host(old, "0" * 64)
    new = PlayedTrainer(run_of=old, epoch=2)
    scene.volunteer.admit(new)
    put_out = old.heard[-1]
    assert isinstance(put_out, Refused) and put_out.cert is not None
    assert signing.is_successor(put_out.cert, old.spec, epoch=1)
    sent = len(scene.executors["cpu"].sent)
    scene.command(old, Drop(run=old.spec.run, stage=0))
    scene.command(old, Mark(run=old.spec.run, stage=0, tick=3))
    with pytest.raises(RefusedError, match="another trainer"):
        asyncio.run(scene.volunteer.offer(old, old.offer("0" * 64)))
    assert len(scene.executors["cpu"].sent) == sent and scene.volunteer.stages
    asyncio.run(scene.volunteer.offer(new, new.offer("0" * 64)))
    assert isinstance(scene.executors["cpu"].sent[-1], HostStage)


@pytest.mark.parametrize("epoch", [1, 2])
def test_what_a_stage_holds_back_is_told_to_each_session_once(scene: Scene, epoch: int) -> None:
    """The stream that it was said to may have ended unread: a trainer that comes back hears it when it connects."""
    first, again = (trainer := PlayedTrainer()), PlayedTrainer(run_of=trainer, epoch=epoch)
    if epoch == 1:
        again.cert, again.key = first.cert, first.key
    scene.host(first, "0" * 64)
    frame = FrameId(int(Kind.ACT), 0, 0, 1, 0)
    held = Suspect(run=first.spec.run, stage=0, incarnation=0, what=Suspicion(frame, b"d" * 16, 1e9, 1.0))
    scene.volunteer.on_message(held)
    scene.volunteer.part(first)
    scene.volunteer.admit(again)
    connect = Connect(run=first.spec.run, plan=1, stage=0, endpoints=())
    for _ in range(2):
        scene.command(again, connect)
    assert [s.heard.count(held) for s in (first, again)] == [1, 1]
    scene.command(again, Pass(run=first.spec.run, stage=0, frame=frame))
    scene.volunteer.admit(PlayedTrainer(run_of=first, epoch=3))
    scene.command(scene.volunteer.sessions[first.spec.run], connect)  # type: ignore[arg-type]
    assert held not in scene.volunteer.sessions[first.spec.run].heard  # type: ignore[attr-defined]


def test_a_stage_that_moves_to_another_device_leaves_the_first(scene: Scene) -> None:
    trainer = PlayedTrainer()
    scene.host(trainer, "0" * 64)
    asyncio.run(scene.volunteer.offer(trainer, trainer.offer("1" * 64, device="cuda:0", incarnation=1)))
    assert isinstance(scene.executors["cpu"].sent[-1], Drop)
    assert isinstance(scene.executors["cuda:0"].sent[-1], HostStage)

"""What a run asks of volunteers, as its record says it."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht.identity import Identity
from dht.records import Signer
from dht.runs import RunView
from fusion_p2p.plan import Numerics, Plan, StagePlacement
from fusion_p2p.settings import OptimizerSpec
from peer.events import PlanAdopted, RunEvent
from peer.protocol import RunSpec
from peer.trainer_publish import Publisher
from peer.trainer_state import RunFolder

OWNER = Ed25519PrivateKey.from_private_bytes(bytes(32))


class Heard:
    """Stands for the trainer's view of the swarm."""

    def __init__(self) -> None:
        self.views: list[RunView] = []

    def now(self) -> float:
        return 1_800_000_000.0

    def publish(self, view: RunView, signer: Signer) -> None:
        assert signer.delegation is not None
        self.views.append(view)


def wanted(publisher: Publisher, heard: Heard, *said: object) -> tuple[int, int]:
    for happening in said:
        publisher(happening)  # type: ignore[arg-type]
    publisher.publish()
    run = heard.views[-1].run
    return run.wanted_peers, run.wanted_bytes


def test_the_volunteers_that_a_run_waits_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "state").mkdir()
    spec = RunSpec(
        run="ab" * 16, name="r", owner=OWNER.public_key().public_bytes_raw(), opdag_hash="cd" * 32, seed=1,
        optimizer=OptimizerSpec(kind="sgd", lr=0.1), created=1.0,
    )  # fmt: skip
    heard, trainer = Heard(), Identity.from_seed(bytes(32)).peer_id
    publisher = Publisher(heard, folder, spec, OWNER, trainer, 1)  # type: ignore[arg-type]
    two = RunEvent(kind="wanted", text="2 volunteers", time_s=1.0, wanted_peers=2, wanted_bytes=5 << 30)
    other = RunEvent(kind="waiting", text="stage 0: a gradient", time_s=2.0)
    assert wanted(publisher, heard, two, other) == (2, 5 << 30)  # what else is waited for changes nothing
    plan = Plan(
        number=1, epoch=1, numerics=Numerics(cuts=(), micro_batches=1, micro_batch_size=1),
        placement=(StagePlacement(stage=0, peer=trainer),),
    )  # fmt: skip
    assert wanted(publisher, heard, PlanAdopted(plan)) == (0, 0)
    one = RunEvent(kind="wanted", text="no volunteer has 1 GiB free", time_s=3.0, wanted_peers=1, wanted_bytes=1 << 30)
    assert wanted(publisher, heard, one) == (1, 1 << 30)
    assert wanted(publisher, heard, PlanAdopted(plan)) == (0, 0)

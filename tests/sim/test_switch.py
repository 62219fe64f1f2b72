"""Cuts, codecs and hosts that change at a complete set, and numeric logs that are replayed. No sockets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusion_p2p.capture import Captured, capture
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec, NumericLogEntry, Plan
from peer.events import RunEvent
from peer.plan_change import Advice
from peer.protocol import Refused
from peer.trainer import Trainer
from peer.trainer_host import RunPaused
from tests.sim.test_trainer import NUMERICS, OPTIMIZER, Lab, _Net, batch
from tests.simulated_time import simulate

MINUTE = pytest.mark.timeout(400)
REFUSED = Refused(code="policy", reason="not today", stage=0)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(_Net(width=128), batch(0))  # smaller frames are sent as they are


def replayed(
    captured: Captured, log: list[NumericLogEntry], steps: int, data: Callable[[int], Any] = batch
) -> tuple[list[float], str]:
    first = log[0].numerics
    local = LocalPipeline(
        captured, optimizer=OPTIMIZER, micro_batches=3, micro_batch_size=2, cuts=first.cuts, codecs=first.codecs
    )
    losses = []
    for step in range(steps):
        for e in log[1:]:
            if e.first_step == step:
                local.change(e.numerics.cuts, e.numerics.codecs)
        losses.append(local.train_step(data(step)))
    return losses, local.weights_blake2b()


def entry(step: int, *cuts: int, codecs: tuple[LinkCodec, ...] = ()) -> NumericLogEntry:
    return NumericLogEntry(step, msgspec.structs.replace(NUMERICS, cuts=cuts, codecs=codecs), "a test wants it")


SCRIPT = (
    entry(0, 1, 3),
    entry(4, 2, codecs=(LinkCodec(0, 1, "int8"),)),
    entry(5, 2, codecs=(LinkCodec(0, 1, "topk-masked:0.25"),)),
    entry(9, 1, 2, 4),
)


async def follow(lab: Lab, trainer: Trainer, first: int, last: int) -> list[float]:
    """Train as `peer.api.Run` does: what is due is saved, and so changed, before the next batch is taken."""
    losses = []
    for step in range(first, last):
        if trainer.sets.is_due:
            await trainer.save(b"at %d" % step)
        losses += await lab.train(trainer, step, step + 1)
        await trainer._balance.idle.wait()  # these steps take no time, planning does
    return losses


@MINUTE
def test_a_numeric_log_is_replayed_to_the_bit(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(None, script=SCRIPT) as trainer:
            losses = await follow(lab, trainer, 0, 12)
            want = replayed(captured, list(SCRIPT), 12)
            assert losses == want[0] and await lab.hash(trainer, 12) == want[1]
            assert trainer.plan.numerics == SCRIPT[-1].numerics
            for v in lab.volunteers:  # nobody keeps a stage of cuts that are over
                assert set(v.hosted) == {p.stage for p in trainer.plan.placement if p.peer == v.peer}
        log = [e for _, e in lab.folder.numeric_log()]
        assert [(e.first_step, e.numerics) for e in log] == [(e.first_step, e.numerics) for e in SCRIPT]
        assert replayed(captured, list(SCRIPT[:1]), 12)[1] != want[1]

    simulate(main())


@MINUTE
def test_a_loss_during_and_after_a_change_changes_no_bit(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(5)
        async with lab.trainer(None, script=SCRIPT) as trainer:
            losses = await follow(lab, trainer, 0, 4)
            await lab.host(trainer, 0).kill()  # the change at step 4 is due now
            losses += await follow(lab, trainer, 4, 7)
            await lab.host(trainer, 1).kill()
            losses += await follow(lab, trainer, 7, 12)
            want = replayed(captured, list(SCRIPT), 12)
            assert losses == want[0] and await lab.hash(trainer, 12) == want[1]

    simulate(main())


@MINUTE
def test_a_resumed_run_still_does_what_its_log_says(captured: Captured, tmp_path: Path) -> None:
    """It goes on from a set that is older than a change: the change comes again at its step."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(None, script=SCRIPT) as trainer:
            await follow(lab, trainer, 0, 3)
            await trainer.save(b"at 3")
            await follow(lab, trainer, 3, 6)
        newest = lab.folder.sets()[-1]
        (lab.folder.root / "state" / f"{newest:09d}.json").unlink()  # as if it had been damaged
        assert lab.folder.manifest().numerics == SCRIPT[1].numerics  # the set of step 4, already of the new cuts
        async with lab.trainer(None) as again:
            losses = await follow(lab, again, 4, 8)
            want = replayed(captured, list(SCRIPT[:3]), 8)
            assert losses == want[0][4:] and await lab.hash(again, 8) == want[1]

    simulate(main())


def advice(plan: Plan, reason: str = "a test wants it") -> Advice:
    return Advice(plan=plan, now_s=10.0, then_s=5.0, reason=reason)


@MINUTE
def test_advice_to_change_cuts_is_logged_with_its_reason(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2) as trainer:
            live = trainer._live
            losses = await follow(lab, trainer, 0, 3)
            wanted = msgspec.structs.replace(trainer.plan, numerics=entry(0, 1, 2).numerics)
            live.advice = advice(wanted)
            losses += await follow(lab, trainer, 3, 6)
            assert trainer.plan.numerics.cuts == (1, 2) and live.advice is None
            log = [e for _, e in lab.folder.numeric_log()]
            assert [e.first_step for e in log] == [0, 3] and log[1].reason == "a test wants it"
            want = replayed(captured, log, 6)
            assert losses == want[0] and await lab.hash(trainer, 6) == want[1]
            assert any("a test wants it" in r for r in trainer.plan.reasons)

    simulate(main())


@MINUTE
def test_who_refuses_new_cuts_leaves_the_old_plan_in_force(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)
        async with lab.trainer(2) as trainer:
            before = trainer.plan.numerics
            losses = await follow(lab, trainer, 0, 3)
            for v in lab.volunteers:
                v.refuse = {2: msgspec.structs.replace(REFUSED, stage=2)}
            trainer._live.advice = advice(msgspec.structs.replace(trainer.plan, numerics=entry(0, 1, 2).numerics))
            losses += await follow(lab, trainer, 3, 6)
            assert trainer.plan.numerics == before and len(lab.folder.numeric_log()) == 1
            want = replayed(captured, [e for _, e in lab.folder.numeric_log()], 6)
            assert losses == want[0] and await lab.hash(trainer, 6) == want[1]

    simulate(main())


@MINUTE
@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("marks", [0, 4])
def test_hosts_change_and_the_numerics_stay(captured: Captured, tmp_path: Path, refuse: bool, marks: int) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(3)
        async with lab.trainer(2, marks=marks) as trainer:
            here = trainer.plan
            losses = await follow(lab, trainer, 0, 3)
            spare = next(v for v in lab.volunteers if v.peer in here.spares)
            if refuse:
                spare.refuse = {1: msgspec.structs.replace(REFUSED, stage=1)}
            target = tuple(msgspec.structs.replace(p, peer=spare.peer) if p.stage == 1 else p for p in here.placement)
            trainer._live.advice = advice(msgspec.structs.replace(here, placement=target))
            losses += await follow(lab, trainer, 3, 6)
            assert (trainer.plan.host(1).peer == spare.peer) is not refuse
            assert trainer.plan.host(0).peer == here.host(0).peer
            for v in lab.volunteers:
                assert set(v.hosted) == {p.stage for p in trainer.plan.placement if p.peer == v.peer}
            assert len(lab.folder.numeric_log()) == 1
            want = replayed(captured, [e for _, e in lab.folder.numeric_log()], 6)
            assert losses == want[0] and await lab.hash(trainer, 6) == want[1]

    simulate(main())


@MINUTE
@pytest.mark.parametrize("adaptive", [False, True])
def test_who_becomes_slow_is_given_less_within_twenty_steps(captured: Captured, tmp_path: Path, adaptive: bool) -> None:
    """From the stages' reports to another plan, with its reason; the weights are those of the replayed log."""

    async def main() -> None:
        lab = Lab(captured, tmp_path)
        for k in range(4):
            (await lab.add(f"volunteer{k}")).unit_s = 0.1
        async with lab.trainer(3, adaptive=adaptive, marks=100) as trainer:
            losses = await follow(lab, trainer, 0, 20)
            assert len(lab.folder.numeric_log()) == 1
            slow, before = lab.host(trainer, 1), trainer.plan
            slow.unit_s = 0.4
            losses += await follow(lab, trainer, 20, 40)
            assert slow.peer not in {p.peer for p in trainer.plan.placement}
            log = [e for _, e in lab.folder.numeric_log()]
            assert adaptive or trainer.plan.numerics == before.numerics
            assert any("%" in e.text for e in lab.heard if isinstance(e, RunEvent) and e.kind == "plan")
            want = replayed(captured, log, 40)
            assert losses == want[0] and await lab.hash(trainer, 40) == want[1]
            losses += await follow(lab, trainer, 40, 80)
            assert trainer.plan.number <= before.number + 3  # and there it stays

    simulate(main())


@MINUTE
def test_a_log_that_nobody_can_follow_pauses_the_run(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = Lab(captured, tmp_path)
        await lab.fill(2)
        with pytest.raises(RunPaused, match=r"paused at step 4.*not today.*fusion-run resume"):
            async with lab.trainer(None, script=SCRIPT) as trainer:
                await follow(lab, trainer, 0, 3)
                for v in lab.volunteers:
                    v.refuse = {k: msgspec.structs.replace(REFUSED, stage=k) for k in range(3)}
                await follow(lab, trainer, 3, 6)
        assert lab.folder.manifest().step == 4 and lab.folder.manifest().numerics == SCRIPT[0].numerics
        assert len(lab.folder.numeric_log()) == 1
        for v in lab.volunteers:
            await v.transport.close()
        lab.volunteers = []
        for k in range(2):
            await lab.add(f"other{k}")
        async with lab.trainer(None, script=SCRIPT) as again:
            losses = await follow(lab, again, 4, 7)
            want = replayed(captured, list(SCRIPT), 7)
            assert losses == want[0][4:] and await lab.hash(again, 7) == want[1]

    simulate(main())

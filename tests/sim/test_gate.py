"""The stability gate of a live run: a loss jump under a compressed link is said; where codecs may change, answered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_p2p.adatopk import GateRules
from fusion_p2p.capture import Captured, capture
from fusion_p2p.plan import LinkCodec
from peer import trainer_gate
from peer.events import RunEvent, StepResult
from peer.trainer import Trainer
from tests.sim.test_switch import entry, replayed
from tests.sim.test_trainer import Lab, _Net, batch
from tests.simulated_time import simulate

MINUTE = pytest.mark.timeout(400)
COARSE = entry(0, 2, codecs=(LinkCodec(0, 1, "transform:2/1"),))
CALM, JUMP = 8, 6  # steps


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(_Net(width=128), batch(0))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_gate, "RULES", GateRules(window=3, memory=6, loss_jump=10.0))


def shaken(step: int) -> dict[str, torch.Tensor]:
    """The labels leap at step CALM, the loss some four hundredfold."""
    made = batch(step)
    return made if step < CALM else {**made, "y": made["y"] + 30.0}


async def follow(lab: Lab, trainer: Trainer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        if trainer.sets.is_due:
            await trainer.save(b"at %d" % step)
        future = await trainer.release(lab.captured.feed(shaken(step)), training=True)
        losses.append((await trainer.wait(future)).loss)
    return losses


def said(lab: Lab) -> list[str]:
    return [h.text for h in lab.heard if isinstance(h, RunEvent) and h.kind == "gate"]


async def lab_of(captured: Captured, root: Path) -> Lab:
    lab = Lab(captured, root)
    await lab.fill(2)
    return lab


@MINUTE
def test_pinned_only_reports_with_its_reason(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = await lab_of(captured, tmp_path)
        async with lab.trainer(None, script=(COARSE,)) as trainer:
            await follow(lab, trainer, CALM + JUMP)
            assert trainer.plan.numerics == COARSE.numerics and len(lab.folder.numeric_log()) == 1
        (text,) = said(lab)
        assert "loss jumped from" in text and "numerics are pinned: nothing changes" in text
        assert "link 0-1 transform:2/1 to transform:3/2" in text
        steps = [h for h in lab.heard if isinstance(h, StepResult)]
        assert all(set(s.cuts) == {"0-1"} and s.cuts["0-1"][0] > 0 for s in steps)
        assert any(s.cuts["0-1"][1] != 0.0 for s in steps)

    simulate(main())


@MINUTE
def test_adaptive_steps_back_by_one_at_a_set_and_the_log_says_why(captured: Captured, tmp_path: Path) -> None:
    async def main() -> None:
        lab = await lab_of(captured, tmp_path)
        async with lab.trainer(None, script=(COARSE,), adaptive=True) as trainer:
            losses = await follow(lab, trainer, CALM + JUMP)
            log = [e for _, e in lab.folder.numeric_log()]
            assert [e.numerics.codecs for e in log] == [COARSE.numerics.codecs, (LinkCodec(0, 1, "transform:3/2"),)]
            assert log[1].first_step > CALM and "loss jumped" in log[1].reason
            assert any("loss jumped" in r for r in trainer.plan.reasons)  # live views show the plan's reasons
            names = [r.codec for r in trainer._live.request.ladder.rungs]  # type: ignore[union-attr]
            assert "transform:2/1" not in names and "transform:3/2" in names  # later plans do not choose it again
            # the weights are a function of the spec, the data and this log
            want = replayed(captured, log, CALM + JUMP, shaken)
            assert losses == want[0] and await lab.hash(trainer, CALM + JUMP) == want[1]
        assert "from the next complete set" in said(lab)[0]

    simulate(main())

"""A run on peers that a slow link parts measures codecs and operators on its own model, and plans with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer import devices, trainer_ladder
from peer.api import Run
from peer.lab.bed import load_bed
from peer.lab.lab_swarm import LabSwarm
from peer.lab.netns import Lab, unsupported
from tests.cluster import plain
from tests.netlab.test_lab import BED

SKIP = unsupported()
SIZE = 16
pytestmark = [pytest.mark.root, pytest.mark.timeout(1800), pytest.mark.skipif(bool(SKIP), reason=SKIP)]


def test_codecs_and_operators_are_measured_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are so large that the link holds the pipeline up also where the stages compute very slowly."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("peer.api.PROBE_S", 300.0)  # a busy machine measures slowly
    (tmp_path / "bed.json").write_text(BED)
    with (
        Lab(load_bed(tmp_path / "bed.json", rate_scale=0.1)) as lab,
        lab.inside(),
        LabSwarm(lab) as swarm,
        Run(
            plain.gpt2(),
            data=plain.token_batches(4, 2 * SIZE),
            swarm=list(swarm.addresses),
            compute=False,
            stages=2,
            micro_batches=2,
            micro_batch_size=SIZE,
            save_every=0,
            run_dir=tmp_path / "run",
        ) as run,
    ):
        run.train(1)
        measured = trainer_ladder.kept(tmp_path / "run")
        chosen = {c.codec for c in run.plan().numerics.codecs}
        assert run.numeric_log()[0].numerics == run.plan().numerics
    assert measured is not None
    assert chosen and chosen <= {r.codec for r in measured.rungs}
    assert list((tmp_path / "home" / devices.OPERATORS).glob("ops-cpu-*.json"))

"""Ctrl-C ends a trainer cleanly in every phase. The bound of 10 s is a row of `tests.bench.main_job`; here it may be
slow, but must end by itself, with its own words and code, and leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.interrupted import PHASES, interrupt

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("phase", "frozen"), [(p, False) for p in PHASES if p != "training"] + [("training", True)])
def test_ctrl_c_in_each_phase(place: Path, phase: str, frozen: bool) -> None:
    """Fixture `place` sees to it that no process and no temporary file is left."""
    end = interrupt(place, phase, frozen=frozen)
    assert end.code == 130, end.said
    hint = "fusion-run resume runs/cats" if phase in ("training", "saving") else "nothing was trained yet"
    [line] = [line for line in end.said.splitlines() if "ended by Ctrl-C" in line]
    assert hint in line
    assert not end.left
    assert (place / "runs" / "cats" / "spec.json").exists() == (phase in ("training", "saving"))

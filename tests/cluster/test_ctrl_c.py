"""Ctrl-C ends a trainer cleanly in every phase. The bound of 10 s is a row of `tests.bench.main_job`; here it may be
slow, but must end by itself, with its own words and code, and leave nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from peer.interrupts import END_S
from peer.lab.local_swarm import OwnDevice
from tests.cluster.interrupted import PHASES, interrupt

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("phase", "frozen"), [(p, False) for p in PHASES if p != "training"] + [("training", True)])
def test_ctrl_c_in_each_phase(place: Path, phase: str, frozen: bool) -> None:
    """Fixture `place` sees to it that no process and no temporary file is left.

    On a machine that is too busy for it the end comes END_S after the signal without more words; and what is heard as
    the beginning of a phase may be over when the signal arrives.
    """
    end = interrupt(place, phase, frozen=frozen)
    assert end.code == 130, end.said
    assert not end.left
    [line] = [line for line in end.said.splitlines() if "ended by Ctrl-C" in line]
    if line.endswith("at once"):
        assert end.seconds >= END_S
        return
    kept = (place / "runs" / "cats" / "spec.json").exists()
    assert ("fusion-run resume runs/cats" if kept else "nothing was trained yet") in line
    if phase in ("training", "saving"):
        assert kept
    elif kept:  # the first set is there once all stages are placed
        assert phase == "placing" or PHASES["placing"] in end.said, end.said


def test_a_trainers_own_device_that_is_given_up_while_it_starts_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for a swarm that never answers; its folder goes too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("peer.lab.local_swarm.bound_command", lambda *_: ["sleep", "1000"])  # says nothing

    async def main() -> None:
        before = set(psutil.Process().children())
        task = asyncio.create_task(OwnDevice.start(("nowhere",), "00"))
        await asyncio.sleep(0)  # it launches before it first waits
        [child] = set(psutil.Process().children()) - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not child.is_running()

    asyncio.run(asyncio.wait_for(main(), 240))
    assert not list(tmp_path.iterdir())

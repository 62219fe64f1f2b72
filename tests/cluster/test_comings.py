"""Volunteers join and leave, hosts among them: nothing of theirs is left behind; many at once are fed by few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peer.api import LocalSwarm
from tests.bench.elastic_faults import open_run
from tests.bench.elastic_joins import joiners
from tests.cluster.comings import visits


@pytest.mark.timeout(1800)
def test_six_come_and_six_go_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    with LocalSwarm(peers=4) as swarm, open_run(swarm, 100, stages=3, recover_s=300.0, run_dir=folder) as run:
        found = visits(swarm, run, folder, 6, steps=3, told=print)
    print(found)
    assert not found.behind and not found.grown()
    assert found.after.rss_bytes < 1.1 * found.before.rss_bytes
    assert found.moves, "who left hosted nothing"


@pytest.mark.timeout(1800)
def test_six_joiners_of_three_holders_one_of_which_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are equal, no holder is over its upload cap, a run beside them goes on; the benchmark's rows, smaller."""
    torch.set_num_threads(1)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    hashes, rate, _, steps = joiners(6 << 20, 2e6)  # how much is sent twice depends on what else the machine does
    assert hashes.holds and rate.holds and steps.holds, (hashes, rate, steps)

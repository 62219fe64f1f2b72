"""A volunteer that lies in one frame, in real processes: found out, replaced, and the weights are the honest ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.cluster.test_chaos import check, with_faults

LYING = Path(__file__).parent / "lying"


@pytest.mark.timeout(1800)
def test_a_volunteer_that_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    lie = tmp_path / "lie"
    lie.write_text("14")
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FUSION_TEST_LIE", str(lie))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LYING), os.environ.get("PYTHONPATH", "")]))
    report, _, _ = with_faults((), 30)
    assert not lie.exists()
    quarantined = [e for e in report["events"] if e["kind"] == "quarantined"]
    assert len(quarantined) == 1
    assert quarantined[0]["peer"] not in {p["peer"] for p in report["plan"]["placement"]}
    check(report, 30, tmp_path)

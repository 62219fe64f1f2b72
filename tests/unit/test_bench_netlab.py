"""What the headline's rows are made of, on figures that are given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import netlab
from tests.netlab import study as s


def run(step_s: float, cpu_s: float) -> Any:
    """Of two counted steps that took `cpu_s` in all."""
    plan = SimpleNamespace(prediction=None)
    return SimpleNamespace(step_s=step_s, predicted_s=step_s, cpu_s={"A0": cpu_s}, steps=(0, 1), plan=plan)


def found(**runs: Any) -> s.Found:
    made = s.Found(bed="N1", rate_scale=0.1, cores={"A0": 0.5, "B0": 0.5})
    made.runs = {s.OURS: runs.pop("ours"), **{f"{s.PUBLISHED_UNIFORM}, draw {k}": r for k, r in runs.items()}}
    return made


def test_published_rule_counts_by_the_median_of_its_draws() -> None:
    f = found(ours=run(2.0, 4.0), a=run(3.0, 2.0), b=run(9.0, 3.0), c=run(4.0, 3.0))
    assert f.step_s(s.PUBLISHED_UNIFORM) == 4.0
    assert f.tried(s.PUBLISHED_UNIFORM) and not f.tried(s.PLAN_ALONE)
    (row,) = [r for r in netlab.judge(f) if "median of 3 draws" in r.case]
    assert (row.figure, row.holds) == ("2x", True)
    assert math.isnan(f.step_s(s.PUBLISHED))


def test_no_plan_beats_the_least_work_on_the_best_number_of_peers() -> None:
    f = found(ours=run(2.0, 4.0), a=run(3.0, 2.0))
    # One second of work a step: one peer takes 2 s, two take 1 s and one micro-batch of eight to fill.
    assert f.least_step_s() == pytest.approx(9 / 8)
    assert math.isnan(s.Found(bed="N1", rate_scale=0.1, cores={"A0": 1.0}).least_step_s())

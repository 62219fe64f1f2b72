"""The README's table is what the results say, whether a bound holds or not."""

from __future__ import annotations

import pytest

from tests.bench import table as t

RESULTS = {
    "machine": {"date": "2026-01-02T03:04:05+00:00", "cores": 2, "cpu": "a CPU", "python": "3.11", "torch": "2.13",
                "hivemind": "1.1", "load_at_start": 0.25, "flops_per_cut_byte": 12345.0},
    "rows": [
        {"case": "fast", "figure": "10x", "bound": ">= 9.4x", "holds": True},
        {"case": "slow", "figure": "0.5x", "bound": ">= 0.75x", "holds": False},
        {"case": "told", "figure": "3", "bound": "", "holds": None},
    ],
}  # fmt: skip


def test_the_readme_is_up_to_date() -> None:
    assert t.main(["--check"]) == 0


def test_every_row_is_shown_and_a_missed_bound_says_so() -> None:
    made = t.table(RESULTS)
    assert "| fast | 10x | >= 9.4x | yes |" in made
    assert "| slow | 0.5x | >= 0.75x | **no** |" in made and "| told | 3 |  |  |" in made
    assert "2026-01-02" in made and "2 cores of a CPU" in made


def test_of_each_testbed_the_last_result_counts() -> None:
    def measured(day: int, **figures: str) -> dict[str, object]:
        rows = [{"case": f"{bed}: x" if bed != "plane" else "goodput", "figure": f} for bed, f in figures.items()]
        return {"machine": {"date": f"2026-01-0{day}"}, "beds": dict.fromkeys(figures), "rows": rows}

    found = t.newest([measured(3, N1="third"), measured(1, plane="a", N3="b", N1="c"), measured(2, N2="d", N3="e")])
    assert found["machine"]["date"] == "2026-01-03"
    assert [r["figure"] for r in found["rows"]] == ["a", "third", "d", "e"]


def test_only_what_lies_between_the_markers_changes() -> None:
    before = f"above\n{t.BEGIN}\nstale\n{t.END}\nbelow\n"
    after = t.filled(before, t.table(RESULTS))
    assert after.startswith("above\n") and after.endswith("\nbelow\n") and "stale" not in after
    assert t.filled(after, t.table(RESULTS)) == after
    with pytest.raises(ValueError, match="no place for the table"):
        t.filled("no markers", "x")

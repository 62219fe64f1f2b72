"""What every benchmark prints: rows (case, figure, bound, holds), as a table or as JSON, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """`figure` and `bound` are text with their units ("1.03", "<= 1.05"); `holds` None: reported, not judged."""

    case: str
    figure: str
    bound: str
    holds: bool | None


def at_most(case: str, figure: float, bound: float, unit: str = "") -> Row:
    return Row(case, f"{figure:.4g}{unit}", f"<= {bound:.4g}{unit}", figure <= bound)


def at_least(case: str, figure: float, bound: float, unit: str = "") -> Row:
    return Row(case, f"{figure:.4g}{unit}", f">= {bound:.4g}{unit}", figure >= bound)


def report(rows: Iterable[Row], json_output: bool = False) -> int:
    """Print the rows; 0 if every judged row holds, else 1."""
    rows = list(rows)
    if json_output:
        print(json.dumps([asdict(r) for r in rows], indent=1))
    else:
        words = {True: "yes", False: "NO", None: "-"}
        table = [("case", "figure", "bound", "holds")] + [(r.case, r.figure, r.bound, words[r.holds]) for r in rows]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        for row in table:
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return 0 if all(r.holds is not False for r in rows) else 1

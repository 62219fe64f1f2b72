"""What every benchmark takes and prints: --help, --json, --quick; rows (case, figure, bound, holds); the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """`figure` and `bound` are text with their units ("1.03", "<= 1.05"); `holds` None: reported, not judged."""

    case: str
    figure: str
    bound: str
    holds: bool | None


def arguments(about: str, quick: str) -> argparse.ArgumentParser:
    """The command line of a benchmark. `about`: what it measures and how long it takes; `quick`: what --quick leaves
    out."""
    spec = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=about,
        epilog="Exit code 0 if every judged row holds, else 1. Progress goes to stderr.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON (default: a table)")
    parser.add_argument("--quick", action="store_true", help=f"under 60 s: {quick}")
    return parser


def progress(text: str) -> None:
    """One line on stderr, with the time since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {text}", file=sys.stderr, flush=True)


_BEGUN = time.monotonic()


def at_most(case: str, figure: float, bound: float, unit: str = "") -> Row:
    return Row(case, f"{figure:.4g}{unit}", f"<= {bound:.4g}{unit}", figure <= bound)


def at_least(case: str, figure: float, bound: float, unit: str = "") -> Row:
    return Row(case, f"{figure:.4g}{unit}", f">= {bound:.4g}{unit}", figure >= bound)


def report(rows: Iterable[Row], json_output: bool = False) -> int:
    """Print the rows, each also on stderr as it comes; 0 if every judged row holds, else 1."""
    found = []
    for row in rows:
        progress(f"{row.case}: {row.figure} ({row.bound})")
        found.append(row)
    if json_output:
        print(json.dumps([asdict(r) for r in found], indent=1))
    else:
        words = {True: "yes", False: "NO", None: "-"}
        table = [("case", "figure", "bound", "holds")] + [(r.case, r.figure, r.bound, words[r.holds]) for r in found]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        for row in table:
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return 0 if all(r.holds is not False for r in found) else 1

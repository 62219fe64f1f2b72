"""The README's headline table, made from headline*.json (of each testbed the last) and convergence.json in
tests/bench/results: `python -m tests.bench.table [--check]`.

Writes it between two markers; with --check changes nothing and ends with 1 if the README says anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README, RESULTS = ROOT / "README.md", ROOT / "tests" / "bench" / "results" / "headline.json"
BEGIN, END = "<!-- headline: made by python -m tests.bench.table -->", "<!-- headline: end -->"
WORDS = {True: "yes", False: "**no**", None: ""}


def table(results: dict[str, Any], more: Sequence[dict[str, Any]] = ()) -> str:
    """Markdown: what was measured where and when, and every row, also those that missed their bound; then `more`."""
    m = results["machine"]
    lines = [
        BEGIN,
        f"Measured {m['date'][:10]} on {m['cores']} cores of {m['cpu']}, Python {m['python']}, torch {m['torch']}, "
        f"hivemind {m['hivemind']}; load {m['load_at_start']:.1f} before it began; "
        f"{m['flops_per_cut_byte']:,.0f} FLOP per byte that crosses a cut dense.",
        "",
        "| case | figure | bound | holds |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['case']} | {r['figure']} | {r['bound']} | {WORDS[r['holds']]} |" for r in (*results["rows"], *more)
    ]
    return "\n".join([*lines, "", END])


def newest(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several: each testbed's rows, and the data plane's, from the file that measured them last; the
    machine is that of the last file."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for results in sorted(files, key=lambda r: str(r["machine"]["date"])):
        measured: dict[str, list[dict[str, Any]]] = {}
        for row in results["rows"]:
            bed, colon, _ = row["case"].partition(": ")
            measured.setdefault(bed if colon and bed in results.get("beds", {}) else "", []).append(row)
        rows |= measured
        machine = results["machine"]
    return {"machine": machine, "rows": [row for bed in sorted(rows) for row in rows[bed]]}


def filled(readme: str, made: str) -> str:
    """`readme` with what lies between the markers replaced. ValueError where there are none."""
    start, end = readme.find(BEGIN), readme.find(END)
    if start < 0 or end < start:
        raise ValueError(f"the README has no place for the table; put {BEGIN} and {END} on lines of their own")
    return readme[:start] + made + readme[end + len(END) :]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the README is not what it would be")
    options = parser.parse_args(args)
    if not RESULTS.exists():
        print(f"no results yet: {RESULTS.relative_to(ROOT)} is written by make headline")
        return 0
    measured = [json.loads(path.read_text("utf-8")) for path in RESULTS.parent.glob("headline*.json")]
    losses = RESULTS.with_name("convergence.json")
    more = json.loads(losses.read_text("utf-8"))["rows"] if losses.exists() else ()
    before = README.read_text("utf-8")
    after = filled(before, table(newest(measured), more))
    if options.check:
        print("README.md is up to date" if after == before else "README.md differs; run python -m tests.bench.table")
        return int(after != before)
    README.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

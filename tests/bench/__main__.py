"""`make bench`: every topic's table in turn, each in a process of its own; exit 1 if a bound does not hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.rows import arguments

TOPICS = ("main_job", "opdag", "opfence", "adatopk", "swarm", "elastic", "monitor", "netlab")


def main(args: list[str]) -> int:
    arguments(__doc__ or "", "each topic's quick form").parse_args(args)
    worst = 0
    for topic in TOPICS:
        if not (Path(__file__).parent / f"{topic}.py").exists():
            continue
        print(f"== {topic}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", f"tests.bench.{topic}", *args]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`make bench`: every topic's table in turn, each in a process of its own; exit 1 if a bound does not hold.

The network of `netlab` is measured as `make headline` does; its long form (`python -m tests.bench.netlab`, hours)
and `python -m tests.bench.convergence` are run by themselves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.rows import arguments

TOPICS = ("main_job", "opdag", "opfence", "adatopk", "swarm", "elastic", "monitor", "netlab")
FORM = {"netlab": ("--headline",)}  # unless --quick


def main(args: list[str]) -> int:
    quick = arguments(__doc__ or "", "each topic's quick form").parse_args(args).quick
    worst = 0
    for topic in TOPICS:
        if not (Path(__file__).parent / f"{topic}.py").exists():
            continue
        print(f"== {topic}", flush=True)
        form = () if quick else FORM.get(topic, ())
        worst = max(worst, subprocess.run([sys.executable, "-m", f"tests.bench.{topic}", *form, *args]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

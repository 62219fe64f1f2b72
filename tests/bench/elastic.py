"""Elastic and exact, in figures. About 45 minutes; a row that is named alone takes 1 to 12.

Faults befall real processes of this machine, which should be doing nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.bench.elastic_cost import memory, overhead
from tests.bench.elastic_faults import CODEC, chaos, losses_of_hosts, neighbours, restart_of_the_trainer
from tests.bench.elastic_joins import comings_and_goings, joiners
from tests.bench.elastic_narrow import narrowing
from tests.bench.elastic_plans import slowed
from tests.bench.rows import Row, arguments, report


@dataclass(frozen=True)
class Case:
    """Rows that are measured together. `quick`: also under --quick."""

    name: str
    quick: bool
    rows: Callable[[], Sequence[Row]]


CASES = (
    Case("hosts", True, lambda: losses_of_hosts([(signal.SIGKILL, 5.0), (signal.SIGSTOP, 12.0)])),
    Case("restart", True, lambda: restart_of_the_trainer(10.0)),
    Case("chaos-dense", False, lambda: [chaos(2, 5, 60, "none")]),
    Case("chaos-codec", False, lambda: [chaos(6, 5, 60, CODEC)]),
    Case("neighbours", False, lambda: [neighbours()]),
    Case("slowed", False, lambda: slowed(1.15)),
    Case("overhead", False, lambda: [overhead(10)]),
    Case("memory", False, lambda: memory(2000)),
    Case("joiners", False, lambda: joiners(32 << 20, 4e6)),
    Case("comings", False, lambda: comings_and_goings(100, 600.0)),
    Case("chaos-long", False, lambda: [chaos(1, 25, 300, CODEC)]),
    Case("chaos-adaptive", False, lambda: narrowing(4, 25, 300)),
)


def main(args: list[str]) -> int:
    names = [case.name for case in CASES]
    parser = arguments(__doc__ or "", f"only {', '.join(case.name for case in CASES if case.quick)}")
    parser.add_argument("--only", metavar="NAME", choices=names, action="append", help=f"one of {', '.join(names)}")
    options = parser.parse_args(args)
    wanted = options.only or [case.name for case in CASES if case.quick or not options.quick]
    torch.set_num_threads(1)

    def rows() -> Iterator[Row]:
        for case in CASES:
            if case.name in wanted:
                yield from case.rows()

    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as home:
        os.environ["FUSION_HOME"] = home
        return report(rows(), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

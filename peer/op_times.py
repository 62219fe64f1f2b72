"""How a model's time divides over its atoms: its operators timed once on this CPU, kept by device and torch build.

A plan takes the proportions from here, a device's speed from its record and its real steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from fusion_p2p.errors import FusionError
from fusion_p2p.estimator import Rates, atom_times, load_table, measure, save_table
from fusion_p2p.ir import OpDag
from fusion_p2p.planner import AtomTimes

log = logging.getLogger(__name__)

FOLDER = "operators"  # in FUSION_HOME
_ANY = Rates(flops_per_s=1e10, memory_bytes_per_s=1e10)  # of no use once every operator is timed


def shape_of(
    dag: OpDag, batch: int, folder: Path, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> AtomTimes | None:
    """Seconds of each atom here, for one micro-batch of `batch` samples; None if timing did not end in `budget_s`."""
    table, end = load_table(folder, "cpu"), clock() + budget_s
    known = len(table.times)
    try:
        measure(dag, batch, table, clock=clock, repeats=3, budget_s=budget_s)
        if len(table.times) > known:
            save_table(table, folder)
    except (FusionError, OSError) as error:
        log.info("operators are not timed: %s", error)
        return None
    return atom_times(dag, batch, table, _ANY) if clock() < end else None

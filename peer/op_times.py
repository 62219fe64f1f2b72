"""How a model's time divides over its atoms: its operators timed once on a device, kept by device and torch build.

A plan takes each device's proportions from here, the trainer's CPU's where a device has not told its own; a device's
speed is from its record and its real steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusion_p2p.errors import FusionError
from fusion_p2p.estimator import Rates, atom_times, is_whole, load_table, measure, save_table
from fusion_p2p.ir import OpDag
from fusion_p2p.planner import AtomTimes
from peer.devices import device_name

log = logging.getLogger(__name__)

_ANY = Rates(flops_per_s=1e10, memory_bytes_per_s=1e10)  # of no use once every operator is timed


def shape_of(
    dag: OpDag,
    batch: int,
    folder: Path,
    budget_s: float,
    *,
    device: str = "cpu",
    most_bytes: float = math.inf,
    recompute: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> AtomTimes | None:
    """Seconds of each atom on this device, for one micro-batch of `batch` samples.

    Of the thread's own CPU time where one thread computes: a CPU quota lets short calls through whole and stops long
    ones, which would tell other proportions than a stage's.

    None while some operator is not timed: `budget_s` ended, or it takes more than `most_bytes`. What was timed is kept,
    and never timed again.
    """
    table = load_table(folder, device, device_name(torch.device(device)))
    before = dict(table.times)
    timer = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else clock
    try:
        measure(dag, batch, table, clock=clock, timer=timer, repeats=3, budget_s=budget_s, most_bytes=most_bytes)
    except FusionError as error:
        log.info("operators are not timed: %s", error)
    try:
        if table.times.keys() != before.keys():
            save_table(table, folder)
    except OSError as error:
        log.info("operators' times are not kept: %s", error)
    return atom_times(dag, batch, table, _ANY, recompute=recompute) if is_whole(dag, batch, table) else None

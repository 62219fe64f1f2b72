"""Plans that change while the run goes on, on real processes: one of four peers computes a quarter of the time."""

from __future__ import annotations

import statistics

from peer.api import LocalSwarm, Run
from peer.lab.chaos import Chaos, Fault
from tests.bench.elastic_faults import ADAMW
from tests.bench.rows import Row, at_most, progress
from tests.cluster import plain

LAYERS, WIDTH = 8, 256
SETTLE, WITHIN, COUNTED = 40, 20, 15  # steps: before the slow-down, after it until the step time counts, and of it


def open_run(swarm: LocalSwarm, steps: int) -> Run:
    """A GPT-2 whose stages compute most of the time, on as many peers as pay."""
    return Run(
        plain.gpt2(layers=LAYERS, width=WIDTH),
        data=plain.token_batches(steps, 16),
        optimizer=ADAMW,
        micro_batches=8,
        micro_batch_size=2,
        swarm=swarm,
        compression="none",
        numerics="adaptive",
        on=[lambda h: progress(h.text) if getattr(h, "kind", "") == "plan" else None],
    )


def slowed(bound: float) -> list[Row]:
    """Step time of a run that one peer's slow-down hit, after WITHIN steps, over that of a run that began with it and
    has settled: the best plan that is known for the new speeds."""
    steps = SETTLE + WITHIN + COUNTED
    fault = Fault(step=SETTLE - 1, kind="slow", pick=1, steps=100_000)
    with LocalSwarm(peers=4) as swarm, Chaos(swarm, (fault,), told=progress) as hand:
        times = []
        with open_run(swarm, steps) as run:
            for step in run.steps(steps):
                hand.after(step.step, run.plan())
                times.append(step.step_time_s)
            changes = len(run.numeric_log()) - 1
        with open_run(swarm, steps) as run:
            fresh = [step.step_time_s for step in run.steps(SETTLE + COUNTED)]
    before, after = statistics.median(times[SETTLE - COUNTED : SETTLE]), statistics.median(times[-COUNTED:])
    hit = max(times[SETTLE : SETTLE + WITHIN])
    best = statistics.median(fresh[-COUNTED:])
    text = f"{before:.3g} s before, {hit:.3g} s at worst, {after:.3g} s after; {changes} changes of cuts"
    return [
        at_most(
            f"one of four peers slowed 4x: step time after {WITHIN} steps over the best plan's", after / best, bound
        ),
        Row("  of which", text, "", None),
    ]

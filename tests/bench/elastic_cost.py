"""What exactness costs where nothing happens: step time and memory."""

from __future__ import annotations

import statistics
from typing import Any

import psutil

from peer.api import LocalSwarm, Run
from tests.bench.elastic_faults import open_run
from tests.bench.main_job import DISTURBED, Turn, turn
from tests.bench.main_job import batches as demo_batches
from tests.bench.main_job import model as demo_model
from tests.bench.rows import Row, at_most


def overhead(pairs: int, steps: int) -> Row:
    """A complete set every 50 steps and kept frames, against none of it: two swarms of the demo in turns, the first of
    each pair changing; the median of the pairs' ratios."""
    micro_batches = 8
    settings: dict[str, Any] = {"micro_batches": micro_batches, "micro_batch_size": 4, "stages": 2}
    data = demo_batches(micro_batches * 4)
    ratios, others = list[float](), 0.0
    with (
        Run(demo_model(), data=data, swarm=LocalSwarm(peers=2), save_every=50, **settings) as kept,
        Run(demo_model(), data=data, swarm=LocalSwarm(peers=2), save_every=0, **settings) as bare,
    ):
        kept.train(2)
        bare.train(2)
        for number in range(pairs):
            for _ in range(3):
                pair: dict[bool, Turn] = {}
                for with_sets in (number % 2 == 0, number % 2 == 1):
                    pair[with_sets] = turn((kept if with_sets else bare).train, steps)
                disturbed = max(t.others for t in pair.values())
                if disturbed <= DISTURBED:
                    break
            ratios.append(pair[True].step_s / pair[False].step_s)
            others = max(others, disturbed)
    ratio = statistics.median(ratios)
    case = f"step time with a set every 50 steps and kept frames, over without (median of {pairs} pairs)"
    if others > DISTURBED:
        return Row(f"{case} (disturbed: others took {others:.0%})", f"{ratio:.3g}", "<= 1.03", None)
    return at_most(case, ratio, 1.03)


def memory(steps: int) -> list[Row]:
    """Resident memory of executors and trainer, after a tenth of the steps and after all of them."""

    def resident() -> dict[str, float]:
        found = {"the trainer": psutil.Process().memory_info().rss / 2**20}
        executors = [
            c.memory_info().rss / 2**20
            for v in swarm.volunteers
            for c in psutil.Process(v.pid).children(recursive=True)
            if "peer.executor" in c.cmdline()
        ]
        return found | {"the largest executor": max(executors)}

    with LocalSwarm(peers=4) as swarm, open_run(swarm, steps + 1) as run:
        run.train(steps // 10)
        before = resident()
        run.train(steps - steps // 10)
        after = resident()
    return [
        at_most(f"memory after {steps} steps over that after a tenth, {name}", after[name] / before[name], 1.05)
        for name in before
    ]

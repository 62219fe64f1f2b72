"""Links that narrow under a run, and faults besides: what AdaTopK changes is in the numeric log, and the
weights are those of a run in which nothing happens, given that log. Needs root: the links are a lab's."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import torch

from fusion_p2p.plan import NumericLogEntry
from peer.api import Run
from peer.data_stream import as_source
from peer.events import RunEvent
from peer.lab.bed import load_bed
from peer.lab.chaos import Chaos, schedule
from peer.lab.lab_swarm import LabSwarm
from peer.lab.netns import Lab, unsupported
from peer.lab.undisturbed import undisturbed_weights
from tests.bench.elastic_cost import DEMO_OPTIMIZER, demo_model
from tests.bench.rows import Row, at_least, progress

PEERS, STAGES = 5, 4
SAMPLES, LENGTH = 4, 64  # of a micro-batch, of which a step has four
WIDE_MBPS, NARROW_MBPS = 200.0, 3.0
STEPS_OF_A_RATE = 25  # a look at the links comes every 20 s, and two in a row must want a change


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Half as many samples as the demo's."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 1024, (4 * SAMPLES, LENGTH), generator=generator) for _ in range(steps)]
    return [{"input_ids": x, "labels": x} for x in ids]


def bed_file(folder: Path) -> Path:
    """PEERS sites of one peer each, every pair of them at WIDE_MBPS."""
    names = [chr(ord("A") + k) for k in range(PEERS)]
    bed = {
        "intra_node": [1000, 0.1],
        "intra_site": [1000, 0.1],
        "sites": [{"name": name, "gpu": "core", "count": 1} for name in names],
        "inter": {f"{a}-{b}": [WIDE_MBPS, 0.1] for a, b in itertools.combinations(names, 2)},
    }
    path = folder / "bed.json"
    path.write_text(json.dumps({"gpus": {"core": [0.05, 2, 4]}, "testbeds": {"five": bed}}))
    return path


def narrowing(seed: int, faults: int, steps: int) -> list[Row]:
    """Again and again all links halve, while `faults` faults strike. (Much at once, and a plan on one peer would pay
    more than any codec.)"""
    case = f"{steps} steps of the demo, links from {WIDE_MBPS:g} to {NARROW_MBPS:g} Mbps"
    if why := unsupported():
        return [Row(case, f"not run: {why}", "equal, each sample once", None)]
    with tempfile.TemporaryDirectory() as root:
        found, log, seen, struck = _disturbed(Path(root), seed, faults, steps)
        expected = undisturbed_weights(
            demo_model(), as_source(batches(steps), Path(root)), numerics=log[0].numerics, log=log,
            optimizer=DEMO_OPTIMIZER, steps=steps,
        )  # fmt: skip
    for entry in log:
        codecs = ", ".join(f"{c.src}-{c.dst} {c.codec}" for c in entry.numerics.codecs) or "dense"
        progress(f"from step {entry.first_step}: cuts {entry.numerics.cuts}, {codecs}; {entry.reason}")
    once = seen == list(range(steps))
    figure = f"{'equal' if found == expected else 'differ'}, {'each' if once else 'NOT each'} sample once"
    changes = sum(a.numerics.codecs != b.numerics.codecs for a, b in itertools.pairwise(log))
    return [
        Row(f"{case}, {struck} faults: weights_blake2b", figure, "equal, each sample once", found == expected and once),
        at_least("  entries of the numeric log that change a codec", changes, 1),
    ]


def _disturbed(root: Path, seed: int, faults: int, steps: int) -> tuple[str, list[NumericLogEntry], list[int], int]:
    """(hash of the weights, the numeric log, the steps as they came, how often a peer was struck)."""
    told = lambda h: progress(f"{h.kind}: {h.text}") if isinstance(h, RunEvent) and h.kind != "saved" else None  # noqa: E731
    with (
        Lab(load_bed(bed_file(root)), quotas=False) as lab,
        lab.inside(),
        LabSwarm(lab, dead_s=8.0) as swarm,
        Chaos(swarm, schedule(seed, faults, steps), told=progress) as hand,
        Run(
            demo_model(),
            data=batches(steps),
            optimizer=DEMO_OPTIMIZER,
            micro_batches=4,
            micro_batch_size=SAMPLES,
            stages=STAGES,
            swarm=swarm,
            save_every=10,
            compression="adatopk",
            numerics="adaptive",
            recover_s=300.0,
            on=[told],
        ) as run,
    ):
        seen, mbps = [], WIDE_MBPS
        for step in run.steps(steps):
            seen.append(step.step)
            hand.after(step.step, run.plan())
            if step.step % STEPS_OF_A_RATE == STEPS_OF_A_RATE - 1 and mbps > NARROW_MBPS:
                mbps = max(NARROW_MBPS, mbps / 2)
                progress(f"after step {step.step}: every link has {mbps:g} Mbps")
                for a, b in itertools.permutations(lab.bed.sites, 2):
                    lab.set_rate(a, b, mbps * 1e6)
        return run.report()["weights_blake2b"], run.numeric_log(), seen, len(hand.struck)

"""What exactness costs where nothing happens: step time and memory."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import fusion_p2p
from peer.api import SAVE_EVERY, LocalSwarm, Run
from tests.bench.elastic_faults import open_run
from tests.bench.main_job import DISTURBED, Turn, turn
from tests.bench.rows import Row, at_most, progress

DEMO_OPTIMIZER = fusion_p2p.AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0)
MEMORY_CAP = 1 << 30  # of each volunteer: `fusion-peer join --memory 1GiB`


def demo_model() -> torch.nn.Module:
    """That of examples/gpt2.toml, which `make demo` trains on four volunteers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1024, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False, bos_token_id=0, eos_token_id=0))
    return made.train()


def _demo(swarm: LocalSwarm, save_every: int, run_dir: Path, numeric_log: Path | None = None) -> Run:
    model = demo_model()
    ids = [torch.randint(0, 1024, (32, 64)) for _ in range(8)]
    return Run(
        model,
        data=[{"input_ids": x, "labels": x} for x in ids],
        optimizer=DEMO_OPTIMIZER,
        micro_batches=4,
        micro_batch_size=8,
        swarm=swarm,
        save_every=save_every,
        run_dir=run_dir,
        numeric_log=numeric_log,
    )


def overhead(blocks: int) -> Row:
    """Complete sets and kept frames as a run has them by itself, against none of it: two runs of the demo with the same
    cuts on the same volunteers, in turns of half a set's steps, with-without-without-with, so that what the machine
    does meanwhile hits both alike; the median of the blocks' ratios."""
    steps = SAVE_EVERY // 2
    ratios, turns = list[float](), list[Turn]()
    with (
        tempfile.TemporaryDirectory() as root,
        LocalSwarm(peers=4) as swarm,
        _demo(swarm, SAVE_EVERY, Path(root, "kept")) as kept,
        _demo(swarm, 0, Path(root, "bare"), Path(root, "kept", "numeric_log.jsonl")) as bare,
    ):
        kept.train(2)
        bare.train(2)
        for number in range(blocks):
            with_sets, without = in_turns(kept, bare, number, steps)
            turns += [*with_sets, *without]
            ratios.append(over(with_sets, without))
            step_s = statistics.fmean(t.step_s for t in with_sets)
            progress(f"overhead: block {number + 1} of {blocks}: {ratios[-1]:.3f}, {step_s:.3f} s a step")
        sets = sum(event["kind"] == "saved" for event in kept.report()["events"])
    others = statistics.median(t.others for t in turns)
    case = f"step time with {sets} complete sets and kept frames, over without (demo, median of {blocks} blocks)"
    return unless_disturbed(case, statistics.median(ratios), 1.03, others)


def in_turns(one: Run, other: Run, number: int, steps: int) -> tuple[list[Turn], list[Turn]]:
    """Block `number` of two runs: a-b-b-a of `steps` each, so that whatever else the machine does hits both alike."""
    first, second = (one, other) if number % 2 else (other, one)
    block = [(run is one, turn(run.train, steps)) for run in (first, second, second, first)]
    return [t for is_one, t in block if is_one], [t for is_one, t in block if not is_one]


def over(ones: Sequence[Turn], others: Sequence[Turn]) -> float:
    return sum(t.step_s for t in ones) / sum(t.step_s for t in others)


def unless_disturbed(case: str, figure: float, bound: float, others: float) -> Row:
    """At most `bound`, judged where other processes took little of the machine (`others`: their share)."""
    if others > DISTURBED:
        return Row(f"{case} (disturbed: others took {others:.0%})", f"{figure:.3g}", f"<= {bound:g}", None)
    return at_most(case, figure, bound)


def memory(steps: int) -> list[Row]:
    """Resident memory of executors and trainer, after a tenth of the steps and after all of them; executors are within
    the cap that their volunteers were given."""

    def resident() -> dict[str, float]:
        found = {"the trainer": psutil.Process().memory_info().rss / 2**20}
        executors = [
            c.memory_info().rss / 2**20
            for v in swarm.volunteers
            for c in psutil.Process(v.pid).children(recursive=True)
            if "peer.executor" in c.cmdline()
        ]
        return found | {"the largest executor": max(executors)}

    with LocalSwarm(peers=4, memory=f"{MEMORY_CAP >> 20}MiB") as swarm, open_run(swarm, 100) as run:
        run.train(steps // 10)
        before = resident()
        run.train(steps - steps // 10)
        after = resident()
    return [
        *(
            at_most(f"memory after {steps} steps over that after a tenth, {name}", after[name] / before[name], 1.05)
            for name in before
        ),
        at_most("  the largest executor", after["the largest executor"], MEMORY_CAP >> 20, " MiB"),
    ]

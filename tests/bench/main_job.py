"""What a swarm costs against a plain PyTorch loop here, in about 4 minutes; and how soon it ends and answers.

The same model, batches, optimizer and threads; swarm and plain loop take turns, rates are medians over the turns. A
turn during which other processes took more than a tenth of the machine is measured again; if it stays so the rows say
"disturbed" and count as missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import fusion_p2p
from peer.api import LocalSwarm, Run
from tests.bench import small_processes
from tests.bench.rows import Row, arguments, at_least, at_most, progress, report
from tests.cluster.interrupted import PHASES, interrupt

VOCAB, CONTEXT, LAYERS, WIDTH = 1024, 64, 6, 512
MICRO_BATCH_SIZE = 4
DISTURBED = 0.10  # of the machine, taken by others
CASE_S = 50.0  # so that all of it ends within 5 minutes, on a machine that others disturb too


def model() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    net: torch.nn.Module = GPT2LMHeadModel(settings)
    return net.train()


def batches(samples: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, VOCAB, (samples, CONTEXT), generator=generator) for _ in range(4)]
    return [{"input_ids": x, "labels": x} for x in ids]


class PlainLoop:
    """Steps of AdamW with clipping over micro-batches, in this process."""

    def __init__(self, micro_batches: int) -> None:
        self._net = model()
        self._data = batches(micro_batches * MICRO_BATCH_SIZE)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3)
        self._micro_batches = micro_batches

    def steps(self, count: int) -> None:
        for k in range(count):
            batch = self._data[k % len(self._data)]
            self._optimizer.zero_grad()
            for part in torch.split(batch["input_ids"], MICRO_BATCH_SIZE):
                loss: Any = self._net(input_ids=part, labels=part).loss
                (loss / self._micro_batches).backward()
                float(loss.detach())
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), 1.0)
            self._optimizer.step()


@dataclass(frozen=True)
class Turn:
    """Seconds per step, and the share of the machine that others took meanwhile."""

    step_s: float
    others: float


def turn(work: Callable[[int], object], steps: int) -> Turn:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    busy, own, begin = _busy_s(), _own_s(family), time.perf_counter()
    work(steps)
    seconds = time.perf_counter() - begin
    others = (_busy_s() - busy) - (_own_s(family) - own)
    return Turn(seconds / steps, max(0.0, others) / (seconds * (os.cpu_count() or 1)))


def _busy_s() -> float:
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + getattr(t, "irq", 0.0) + getattr(t, "softirq", 0.0))


def _own_s(family: list[psutil.Process]) -> float:
    total = 0.0
    for process in family:
        try:
            t = process.cpu_times()
        except psutil.Error:
            continue
        total += t.user + t.system
    return total


def compare(case: str, peers: int, micro_batches: int, bound: float, *, turns: int, steps: int, tries: int) -> Row:
    """tokens/s of `peers` volunteers with one thread each over the plain loop with one thread.

    CASE_S after the start of the first turn no turn is measured again, and none is begun after the second.
    """
    progress(f"{case}: starting")
    plain = PlainLoop(micro_batches)
    samples = micro_batches * MICRO_BATCH_SIZE
    with Run(
        model(),
        data=batches(samples),
        optimizer=fusion_p2p.AdamW(lr=1e-3, clip_norm=1.0),
        micro_batches=micro_batches,
        micro_batch_size=MICRO_BATCH_SIZE,
        swarm=LocalSwarm(peers=peers),
        stages=peers,
        save_every=0,
    ) as run:
        run.train(1)
        plain.steps(1)
        ours: list[Turn] = []
        theirs: list[Turn] = []
        until = time.monotonic() + CASE_S
        while len(ours) < turns and (len(ours) < 2 or time.monotonic() < until):
            for works, found in ((run.train, ours), (plain.steps, theirs)):
                for _ in range(tries):
                    measured = turn(works, steps)
                    if measured.others <= DISTURBED or time.monotonic() > until:
                        break
                found.append(measured)
            progress(f"{case}: turn {len(ours)} of {turns}, {ours[-1].step_s:.2f} and {theirs[-1].step_s:.2f} s a step")
    ratio = statistics.median(t.step_s for t in theirs) / statistics.median(t.step_s for t in ours)
    others = max(t.others for t in (*ours, *theirs))
    if others > DISTURBED:
        return Row(f"{case} (disturbed: others took {others:.0%})", f"{ratio:.3g}", f">= {bound:.3g}", False)
    return at_least(case, ratio, bound)


def interrupts() -> Iterator[Row]:
    """Ctrl-C in each phase of a trainer with two volunteers, which is also tested to leave nothing."""
    for phase in PHASES:
        with tempfile.TemporaryDirectory(prefix="fb-") as place:
            yield at_most(f"Ctrl-C while {phase}", interrupt(Path(place), phase).seconds, 10, " s")


def rows(quick: bool) -> Iterator[Row]:
    cases = [("1 volunteer over a plain loop", 1, 8, 0.90), ("2 volunteers, 8 micro-batches", 2, 8, 1.45)]
    if not quick:
        cases.insert(1, ("2 volunteers, 16 micro-batches", 2, 16, 1.6))
    turns, steps, tries = (1, 2, 1) if quick else (5, 4, 3)
    for case in cases:
        yield compare(*case, turns=turns, steps=steps, tries=tries)
    if not quick:
        yield from interrupts()
        yield from small_processes.rows()


def main(args: list[str]) -> int:
    about = "one turn of 2 steps; 16 micro-batches, Ctrl-C and small processes are left out"
    options = arguments(__doc__ or "", about).parse_args(args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as home:
        os.environ["FUSION_HOME"] = home
        return report(rows(options.quick), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

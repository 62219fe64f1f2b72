"""Elastic and exact, in figures.

Faults befall real processes of this machine. Seconds are from the fault to the first new step of the trainer, minus
nothing: a complete set is made just before, so that at most the steps under way are replayed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import fusion_p2p
from peer.api import LocalSwarm, Run
from peer.data_stream import as_source
from peer.lab.chaos import Chaos, schedule
from peer.lab.undisturbed import undisturbed_weights
from tests.bench.main_job import DISTURBED, Turn, turn
from tests.bench.main_job import batches as demo_batches
from tests.bench.main_job import model as demo_model
from tests.bench.rows import Row, arguments, at_most, report
from tests.cluster import plain

ADAMW = fusion_p2p.AdamW(lr=3e-3, clip_norm=1.0)
CODEC = "topk-masked:0.2"


def open_run(swarm: LocalSwarm | list[str], steps: int, **options: Any) -> Run:
    """The tiny GPT-2 on four stages."""
    settings: dict[str, Any] = {"save_every": 10, "compression": "none", "stages": 4} | options
    data = plain.token_batches(steps, 8)
    return Run(plain.gpt2(), data=data, optimizer=ADAMW, micro_batches=4, micro_batch_size=2, swarm=swarm, **settings)


def chaos(seed: int, faults: int, steps: int, compression: str) -> Row:
    """Weights under faults against those of an undisturbed run with the same numerics."""
    with (
        LocalSwarm(peers=5, beat_s=1.0, dead_s=4.0) as swarm,
        Chaos(swarm, schedule(seed, faults, steps), told=lambda line: print(f"# {line}", file=sys.stderr)) as hand,
        open_run(swarm, steps, compression=compression, recover_s=120.0) as run,
    ):
        seen = []
        for step in run.steps(steps):
            seen.append(step.step)
            hand.after(step.step, run.plan())
        found, numerics = run.report()["weights_blake2b"], run.plan().numerics
    with tempfile.TemporaryDirectory() as spool:
        source = as_source(plain.token_batches(steps, 8), Path(spool))
        expected = undisturbed_weights(plain.gpt2(), source, numerics=numerics, optimizer=ADAMW, steps=steps)
    once = seen == list(range(steps))
    case = f"{steps} steps, {faults} faults, {compression}: weights_blake2b"
    figure = f"{'equal' if found == expected else 'differ'}, {'each' if once else 'NOT each'} sample once"
    return Row(case, figure, "equal, each sample once", found == expected and once)


def loss_of_a_host(name: str, number: signal.Signals, bound_s: float) -> Row:
    """From the signal to a stage's whole volunteer until the first step that ends after it."""
    with LocalSwarm(peers=5) as swarm, open_run(swarm, 1000) as run:
        run.train(15)
        run.save()
        victim = psutil.Process(swarm.find(run.plan().host(1).peer).pid)
        family = [victim, *victim.children(recursive=True)]
        begin = time.monotonic()
        for process in family:
            process.send_signal(number)
        try:
            run.train(1)
            seconds = time.monotonic() - begin
            run.train(5)
        finally:
            for process in family:
                if process.is_running():
                    process.send_signal(signal.SIGCONT)
    return at_most(f"{name} of a stage's volunteer to the first new step", seconds, bound_s, " s")


TRAINER = """
import sys, torch
import fusion_p2p
from tests.cluster import plain
torch.set_num_threads(1)
resuming, folder, *addresses = sys.argv[1:]
from tests.bench.elastic import open_run
if resuming == "yes":
    data = plain.token_batches(1000, 8)
    run = fusion_p2p.Run.resume(folder, data=data, swarm=addresses, compute=False, save_every=10)
else:
    run = open_run(addresses, 1000, run_dir=folder, compute=False)
with run:
    for step in run.steps(900):
        print(step.step, flush=True)
"""


def restart_of_the_trainer(bound_s: float) -> list[Row]:
    """SIGKILL, then a new process on the same folder: its imports and the replay count."""

    def start(resuming: str, folder: str, swarm: LocalSwarm) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TRAINER, resuming, folder, *swarm.addresses]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with tempfile.TemporaryDirectory() as root, LocalSwarm(peers=4) as swarm:
        folder = str(Path(root) / "run")
        first = start("no", folder, swarm)
        assert first.stdout is not None
        for line in first.stdout:
            if int(line) >= 17:
                break
        first.kill()
        last = int(([line] + [rest for rest in first.stdout if rest.endswith("\n")])[-1])
        first.wait()
        begin = time.monotonic()
        again = start("yes", folder, swarm)
        assert again.stdout is not None
        try:
            replayed = 0
            for line in again.stdout:
                if int(line) > last:
                    break
                replayed += 1
            seconds = time.monotonic() - begin
        finally:
            again.kill()
            again.communicate()
    return [
        at_most("trainer killed: its restart to the first new step", seconds, bound_s, " s"),
        Row("  of which steps done again from the newest set", str(replayed), "", None),
    ]


def overhead(turns: int, steps: int) -> Row:
    """A complete set every 50 steps and kept frames, against none of it, on two swarms that take turns."""
    micro_batches = 8
    settings: dict[str, Any] = {"micro_batches": micro_batches, "micro_batch_size": 4, "stages": 2}
    data = demo_batches(micro_batches * 4)
    with (
        Run(demo_model(), data=data, swarm=LocalSwarm(peers=2), save_every=50, **settings) as kept,
        Run(demo_model(), data=data, swarm=LocalSwarm(peers=2), save_every=0, **settings) as bare,
    ):
        kept.train(2)
        bare.train(2)
        found: dict[str, list[Turn]] = {"kept": [], "bare": []}
        for _ in range(turns):
            for name, run in (("kept", kept), ("bare", bare)):
                for _ in range(3):
                    measured = turn(run.train, steps)
                    if measured.others <= DISTURBED:
                        break
                found[name].append(measured)
    ratio = statistics.median(t.step_s for t in found["kept"]) / statistics.median(t.step_s for t in found["bare"])
    others = max(t.others for ts in found.values() for t in ts)
    case = "step time with a set every 50 steps and kept frames, over without"
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


def main(args: list[str]) -> int:
    options = arguments(__doc__ or "", "shorter runs").parse_args(args)
    quick = options.quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as home:
        os.environ["FUSION_HOME"] = home
        rows = [chaos(2, 5, 60, "none"), chaos(6, 5, 60, CODEC)]
        rows.append(loss_of_a_host("SIGKILL", signal.SIGKILL, 5.0))
        rows.append(loss_of_a_host("SIGSTOP", signal.SIGSTOP, 12.0))
        rows += restart_of_the_trainer(10.0)
        rows.append(overhead(2 if quick else 5, 50))
        rows += memory(300 if quick else 2000)
        if not quick:
            rows.append(chaos(1, 25, 300, CODEC))
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

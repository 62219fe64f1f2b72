"""Faults that befall real processes of this machine: are the weights the same, and when comes the first new step.

Seconds are from the fault to the first new step of the trainer, minus nothing: a complete set is made just before, so
that at most the steps under way are replayed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import fusion_p2p
from peer.api import LocalSwarm, Run
from peer.data_stream import as_source
from peer.lab.chaos import Chaos, Fault, schedule
from peer.lab.undisturbed import undisturbed_weights
from tests.bench.rows import Row, at_most, progress
from tests.cluster import plain

ADAMW = fusion_p2p.AdamW(lr=3e-3, clip_norm=1.0)
CODEC = "topk-masked:0.2"


def open_run(swarm: LocalSwarm | list[str], steps: int, **options: Any) -> Run:
    """The tiny GPT-2 on four stages."""
    settings: dict[str, Any] = {"save_every": 10, "compression": "none", "stages": 4} | options
    data = plain.token_batches(steps, 8)
    return Run(plain.gpt2(), data=data, optimizer=ADAMW, micro_batches=4, micro_batch_size=2, swarm=swarm, **settings)


def chaos(seed: int, faults: int, steps: int, compression: str, numerics: str = "pinned") -> Row:
    """Weights under faults against those of an undisturbed run that is given the recorded numeric log."""
    with (
        LocalSwarm(peers=5, beat_s=1.0, dead_s=4.0) as swarm,
        Chaos(swarm, schedule(seed, faults, steps), told=progress) as hand,
        open_run(swarm, steps, compression=compression, recover_s=120.0, numerics=numerics) as run,
    ):
        seen = []
        for step in run.steps(steps):
            seen.append(step.step)
            hand.after(step.step, run.plan())
        found, log = run.report()["weights_blake2b"], run.numeric_log()
    with tempfile.TemporaryDirectory() as spool:
        source = as_source(plain.token_batches(steps, 8), Path(spool))
        expected = undisturbed_weights(
            plain.gpt2(), source, numerics=log[0].numerics, log=log, optimizer=ADAMW, steps=steps
        )
    once = seen == list(range(steps))
    case = f"{steps} steps, {len(hand.struck)} faults, {compression}, {numerics}: weights_blake2b"
    figure = f"{'equal' if found == expected else 'differ'}, {'each' if once else 'NOT each'} sample once"
    if numerics != "pinned":
        figure += f", {len(log) - 1} changes of cuts or codecs"
    return Row(case, figure, "equal, each sample once", found == expected and once)


def neighbours(steps: int = 40) -> Row:
    """The hosts of two neighbouring stages killed together."""
    struck = (Fault(step=steps // 2, kind="neighbours", pick=1, steps=0),)
    with (
        LocalSwarm(peers=5, beat_s=1.0, dead_s=4.0) as swarm,
        Chaos(swarm, struck, told=progress) as hand,
        open_run(swarm, steps, recover_s=120.0) as run,
    ):
        for step in run.steps(steps):
            hand.after(step.step, run.plan())
        found, log = run.report()["weights_blake2b"], run.numeric_log()
    with tempfile.TemporaryDirectory() as spool:
        source = as_source(plain.token_batches(steps, 8), Path(spool))
        expected = undisturbed_weights(plain.gpt2(), source, numerics=log[0].numerics, optimizer=ADAMW, steps=steps)
    case = f"{len(hand.struck)} hosts of neighbouring stages killed together: weights_blake2b"
    return Row(case, "equal" if found == expected else "differ", "equal", found == expected)


def losses_of_hosts(signals: Sequence[tuple[signal.Signals, float]]) -> list[Row]:
    """Each signal to a stage's whole volunteer, in turn, until the first step that ends after it; bounds in seconds."""
    with LocalSwarm(peers=4 + len(signals)) as swarm, open_run(swarm, 1000) as run:
        run.train(15)
        return [_loss_of_a_host(swarm, run, number, bound_s) for number, bound_s in signals]


def _loss_of_a_host(swarm: LocalSwarm, run: Run, number: signal.Signals, bound_s: float) -> Row:
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
    return at_most(f"{number.name} of a stage's volunteer to the first new step", seconds, bound_s, " s")


TRAINER = """
import sys, torch
import fusion_p2p
from tests.cluster import plain
torch.set_num_threads(1)
resuming, folder, *addresses = sys.argv[1:]
from tests.bench.elastic_faults import open_run
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

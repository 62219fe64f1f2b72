"""A trainer of the network tests: two stages on the named peers, a few steps, JSON lines on stdout.

python -m tests.netlab.train_once FOLDER STEPS PEER,PEER ADDRESS [ADDRESS ...]; a line on stdin lets each step begin.
$WIDTH: of the model (default: 32)
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from fusion_p2p import SGD, Run
from tests.cluster import plain

SAMPLES, MICRO = 4, 2


_ONE_LINE = threading.Lock()  # a run's events are heard on its own thread


def say(event: str, **what: object) -> None:
    with _ONE_LINE:
        print(json.dumps({"event": event, **what}), flush=True)


def main(folder: Path, steps: int, peers: list[str], swarm: list[str]) -> None:
    model = plain.gpt2(width=int(os.environ.get("WIDTH", "32")))
    with Run(
        model, data=plain.token_batches(steps, SAMPLES), swarm=swarm, run_dir=folder, allow_peers=peers,
        stages=2, compute=False, micro_batches=SAMPLES // MICRO, micro_batch_size=MICRO, optimizer=SGD(lr=0.1),
        compression="none", save_every=0, recover_s=300.0, on=[lambda h: say("heard", what=repr(h)[:300])],
    ) as run:  # fmt: skip
        say("ready", hosts=[s.peer for s in run.plan().placement])
        sys.stdin.readline()
        for step in run.steps(steps):
            say("step", step=step.step, loss=step.loss)
            sys.stdin.readline()
    say("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:])

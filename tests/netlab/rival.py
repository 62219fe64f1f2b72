"""One worker of torch.distributed.pipelining over gloo, 1F1B: `python -m tests.netlab.rival RANK WORLD HOST PORT`.

It prints "ready" once torch is loaded, waits for a line, joins the group, and then does one job per line of its input:
{"order": [rank of each stage], "stages": [[first, last block], ...], "steps": n}. The answer is one line: when the
steps began and ended by the machine's monotonic clock, and the losses where it has them. An empty line ends it.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.netlab import model as m

WAIT = datetime.timedelta(minutes=20)


def job(rank: int, order: list[int], stages: list[tuple[int, int]], steps: int) -> dict[str, object]:
    index = order.index(rank)
    module = m.stage(*stages[index], stages=stages)
    first, last = index == 0, index == len(order) - 1
    tokens = torch.zeros(m.MICRO_BATCH, m.CONTEXT, dtype=torch.int64)
    hidden = torch.zeros(m.MICRO_BATCH, m.CONTEXT, m.WIDTH, requires_grad=True)
    given = tokens if first else hidden
    made = module(given)
    made.sum().backward()  # torch's own first calls are no part of a step
    optimizer = torch.optim.AdamW(module.parameters(), lr=m.LR, foreach=True)
    optimizer.zero_grad()
    shape = {"input_args": (given,), "output_args": (made.detach().requires_grad_(),)}
    stage = PipelineStage(module, index, len(order), torch.device("cpu"), **shape)
    stage.stage_index_to_group_rank = dict(enumerate(order))
    schedule = Schedule1F1B(stage, n_microbatches=m.MICRO_BATCHES, loss_fn=m.loss)
    data = m.batches(steps)
    losses: list[float] = []
    times = []
    dist.barrier()
    for tokens_bt, labels_bt in data:
        begin = time.monotonic()
        found: list[torch.Tensor] = []
        inputs = (tokens_bt,) if first else ()
        if last:
            schedule.step(*inputs, target=labels_bt, losses=found, return_outputs=False)
            losses.append(float(torch.stack(found).mean()))
        else:
            schedule.step(*inputs, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        times.append((begin, time.monotonic()))
    dist.barrier()
    return {"times": times, "losses": losses}


def main(rank: int, world: int, host: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    print("ready", flush=True)
    sys.stdin.readline()
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world, timeout=WAIT)
    print("joined", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        work = json.loads(line)
        stages = [(a, b) for a, b in work["stages"]]
        print(json.dumps(job(rank, work["order"], stages, work["steps"])), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

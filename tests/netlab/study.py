"""The headline's experiments on one bed: links measured, rivals, then our runtime under several plans and codecs.

Nothing here judges; `tests.bench.netlab` makes rows of what comes back. What fails is recorded with its reason, and the
next thing is tried.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fusion_p2p
from dht.errors import DhtError
from fusion_p2p.errors import FusionError
from peer.api import Run
from peer.lab.bed import load_bed
from peer.lab.lab_swarm import LabSwarm
from peer.lab.measure import Delivered, measure
from peer.lab.measured_run import Measured, measured_run
from peer.lab.netns import Lab
from tests.netlab import model as m
from tests.netlab import rivals as r

FILE = Path(__file__).parents[2] / "examples" / "testbeds" / "lab.json"
OURS, PLAN_ALONE = "ours", "ours, compression off"
PUBLISHED, PUBLISHED_UNIFORM = "published OP-Fence, published AdaTopK", "published OP-Fence, uniform Top-K"
DRAWS = 3  # of what the published rule leaves open: the order of communities and of their peers
CONFIGS = {
    OURS: ("opfence", "adatopk"),
    PLAN_ALONE: ("opfence", "none"),
    **{f"{PUBLISHED_UNIFORM}, draw {k}": (f"published:{k}", "topk:100") for k in range(DRAWS)},
    PUBLISHED: ("published:0", "adatopk-paper"),
    "equal compute, dense": ("equal-compute:0", "none"),
    "equal compute, uniform Top-K": ("equal-compute:0", "topk:100"),
}
NO_TIME, LEAST_ORDERS = "no time left", 3
SETTLE_S, LOOK_S, IDLE = 120.0, 10.0, 0.25  # the share of its quota that a peer takes with nothing to train
EQUAL, BY_SPEED = "equal layers", "layers by speed"
Say = Callable[[str], None]
FAILURES = (FusionError, DhtError, r.RivalFailed, OSError, TimeoutError, StopIteration)


@dataclass(kw_only=True)
class Found:
    """Everything measured on one bed. `failed`: what could not be, and why."""

    bed: str
    rate_scale: float
    cores: dict[str, float] = field(default_factory=dict)
    cpu: str = ""
    links: list[Delivered] = field(default_factory=list)
    rivals: dict[str, list[r.RivalRun]] = field(default_factory=dict)
    runs: dict[str, Measured] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def rival_step_s(self, how: str = EQUAL) -> float:
        """The median over the device orders; NaN if none came to an end."""
        runs = self.rivals.get(how, [])
        return statistics.median(x.step_s for x in runs) if runs else float("nan")

    def step_s(self, config: str) -> float:
        """The median over a configuration's draws; NaN if it did not run."""
        times = [run.step_s for name, run in self.runs.items() if name == config or name.startswith(f"{config}, draw ")]
        return statistics.median(times) if times else float("nan")

    def tried(self, config: str) -> bool:
        names = (*self.runs, *self.failed)
        return any(n == config or n.startswith(f"{config}, draw ") for n in names)

    def least_step_s(self) -> float:
        """Of any chain that sends nothing at all: the least work that a run did in a step, in CPU seconds, spread
        evenly over the best number of peers, and the time in which such a pipeline fills."""
        work_s = min((sum(run.cpu_s.values()) / len(run.steps) for run in self.runs.values() if run.cpu_s), default=0.0)
        fastest = itertools.accumulate(sorted(self.cores.values(), reverse=True))
        fill = [(m.MICRO_BATCHES + k) / m.MICRO_BATCHES for k in range(len(self.cores))]
        times = [work_s * f / cores for f, cores in zip(fill, fastest, strict=True)]
        return min(times, default=0.0) or float("nan")

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate_scale": self.rate_scale,
            "cores": self.cores,
            "cpu": self.cpu,
            "links": [
                {"src": d.src, "dst": d.dst, "bits_per_s": d.link.bits_per_s, "delivered": d.of_configured}
                for d in self.links
            ],
            "rivals": {how: [r.as_dict(x) for x in runs] for how, runs in self.rivals.items()},
            "runs": {name: found.as_dict() for name, found in self.runs.items()},
            "failed": self.failed,
        }


def study(
    bed_name: str,
    *,
    say: Say,
    configs: Sequence[str] = tuple(CONFIGS),
    orders: int = 5,
    by_speed: int = 5,
    steps: int = 8,
    rate_scale: float = 0.1,
    until: float = float("inf"),
    rivals_s: float = float("inf"),
) -> Found:
    """`orders` and `by_speed`: device orders of the rival with equal layers, and with layers in proportion to speed.

    After `until` (monotonic) the rest is left out and said to be; likewise device orders that would end after
    `rivals_s`, but for the first LEAST_ORDERS. LabUnsupported where there can be no lab.
    """
    bed = load_bed(FILE, bed_name, rate_scale=rate_scale)
    found = Found(bed=bed_name, rate_scale=rate_scale, cores={p.name: p.cores for p in bed.peers})
    with Lab(bed) as lab:
        found.cpu = lab.quotas.how
        say(f"{bed_name}: links")
        found.links = measure(lab)
        for d in found.links:
            say(f"{bed_name}: {d.src}-{d.dst} {d.link.bits_per_s / 1e6:.4g} Mbps, {d.of_configured:.3f} delivered")
        _rivals(lab, found, orders, by_speed, say, min(until, time.monotonic() + rivals_s))
        _ours(lab, found, configs, steps, say, until)
    return found


def _rivals(lab: Lab, found: Found, orders: int, by_speed: int, say: Say, until: float) -> None:
    if not orders + by_speed:
        return
    say(f"{found.bed}: torch.distributed.pipelining begins")
    try:
        with r.Rivals(lab) as rivals:
            for how, count in ((EQUAL, orders), (BY_SPEED, by_speed)):
                for seed in range(count):
                    done = found.rivals.get(how, [])
                    took_s = done[-1].step_s if done else 0.0
                    if time.monotonic() + took_s > until and len(done) >= LEAST_ORDERS:
                        found.failed[f"rival, {how}, order {seed}"] = NO_TIME
                        continue
                    order = r.shuffled(len(lab.bed.peers), seed)
                    stages = r.equal_layers(lab) if how == EQUAL else r.by_speed(lab, order)
                    run = rivals.measured(order, stages)
                    found.rivals.setdefault(how, []).append(run)
                    say(f"{found.bed}: rival, {how}, {'-'.join(run.order)}: {run.step_s:.3g} s a step")
    except FAILURES as error:
        found.failed["torch.distributed.pipelining"] = str(error)
        say(f"{found.bed}: rival failed: {error}")


def _ours(lab: Lab, found: Found, configs: Sequence[str], steps: int, say: Say, until: float) -> None:
    if not configs:
        return
    say(f"{found.bed}: {len(lab.bed.peers)} volunteers start")
    try:
        with lab.inside(), LabSwarm(lab) as swarm:
            took_s = settled(lab)
            say(f"{found.bed}: volunteers have settled after {took_s:.0f} s")
            for name in configs:
                if time.monotonic() > until:
                    found.failed[name] = NO_TIME
                    continue
                try:
                    found.runs[name] = one_run(
                        swarm, *CONFIGS[name], steps=steps, say=lambda t: say(f"{found.bed}: {t}")
                    )
                except FAILURES as error:
                    found.failed[name] = f"{type(error).__name__}: {error}"
                    say(f"{found.bed}: {name} failed: {error}")
                    continue
                for line in found.runs[name].lines():
                    say(f"{found.bed}: {name}: {line.strip()}")
                gc.collect()
    except FAILURES as error:
        found.failed["volunteers"] = f"{type(error).__name__}: {error}"
        say(f"{found.bed}: volunteers failed: {error}")


def settled(lab: Lab) -> float:
    """Wait, for SETTLE_S at most, until the peers use little of their cores: in their first minute on so little of one
    they look at many others, and every trial step would be too slow by that. Seconds that it took."""
    start, used = time.monotonic(), lab.used_s()
    while time.monotonic() - start < SETTLE_S:
        time.sleep(LOOK_S)
        before, used = used, lab.used_s()
        busy = [(used.get(p.name, 0.0) - before.get(p.name, 0.0)) / LOOK_S / p.cores for p in lab.bed.peers]
        if max(busy) < IDLE:
            break
    return time.monotonic() - start


def one_run(swarm: LabSwarm, planner: str, compression: str, *, steps: int, say: Say) -> Measured:
    """The byte GPT-2 on the swarm for 1 + `steps` steps."""
    with (
        tempfile.TemporaryDirectory(prefix="fusion-study-") as folder,
        Run(
            m.Gpt(),
            data=m.batches(steps + 4),
            loss=lambda output, batch: output,
            name="headline",
            optimizer=fusion_p2p.AdamW(lr=m.LR),
            micro_batches=m.MICRO_BATCHES,
            micro_batch_size=m.MICRO_BATCH,
            run_dir=Path(folder) / "run",
            compression=compression,
            planner=planner,
            swarm=swarm,
            save_every=0,
        ) as run,
    ):
        text = run.plan().explain()
        for peer, name in swarm.names.items():
            text = text.replace(peer[-8:], name)
        for line in text.splitlines():
            say(line)
        return measured_run(run, swarm, steps, tell=lambda s: say(f"step {s.step}: {s.step_time_s:.3g} s"))

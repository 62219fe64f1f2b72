"""Loss against steps, bytes and time under each plan's codecs: GPT-2 on the Bible's bytes, a ResNet on MNIST digits.

Trained in one process (`LocalPipeline`) with the cuts and codecs that plans have on the testbed N1, rates x 0.1; ours
measures its codecs on the model first, as a live run does. Each curve is kept in tests/bench/results/local, so it may
be stopped and started again. 25 minutes of one core.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import fusion_p2p
from fusion_p2p.capture import Captured, capture
from fusion_p2p.frame import Frame
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import Numerics, Plan
from fusion_p2p.planner import Ladder, Link
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.workload import atoms
from peer import config as configuration
from peer.api import PROBE_S
from peer.data_open import OpenedData, open_data
from peer.lab.bed import load_bed
from peer.models import build_model
from peer.offers import DeviceOffer, SwarmLinks
from peer.placement import PlanRequest, make_plan, proposal_of, revise
from peer.plan_codecs import channels_of
from peer.trainer_ladder import LadderProbe
from tests.bench.netlab import machine
from tests.bench.rows import Row, arguments, at_most, progress, report
from tests.netlab import model as m
from tests.netlab.study import CONFIGS, FILE, OURS, PUBLISHED, PUBLISHED_UNIFORM

RESULTS = Path(__file__).parent / "results"
DENSE = "dense"
SHOWN = {  # configuration: planner, compression; the published rule draws by the run's seed
    DENSE: ("opfence", "none"),
    OURS: CONFIGS[OURS],
    PUBLISHED_UNIFORM: ("published", "topk:100"),
    PUBLISHED: ("published", "adatopk-paper"),
}
TRIAL_OVER_RECORD = 3.0  # as on the lab: a record's matrix products promise more than small operators keep
LOSS, POINTS = 0.02, 0.5
STEPS, SEEDS = {"gpt2": 200, "resnet": 300}, (0, 1, 2)
HELD_OUT_TOKENS, HELD_OUT_IMAGES = 40_960, 1000


@dataclass(frozen=True)
class Curve:
    """`final`: held-out loss of GPT-2, held-out accuracy in percent of the ResNet. `bytes_per_step`: all cuts."""

    losses: list[float]
    bytes_per_step: float
    step_s: float  # predicted on the testbed
    final: float
    codecs: dict[str, str]


@dataclass(frozen=True)
class Task:
    """What is trained. `batches(steps, seed)` yields one global batch a step; `judge` reads the trained model."""

    name: str
    micro_batches: int
    micro_batch_size: int
    optimizer: OptimizerSpec
    model: Callable[[int], nn.Module]
    batches: Callable[[int, int], Iterator[Any]]
    judge: Callable[[nn.Module], float]
    loss: Callable[[Any, Any], torch.Tensor] | None


def gpt2() -> Task:
    micro_batches = 2

    def batches(steps: int, seed: int) -> Iterator[Any]:
        size = micro_batches * m.MICRO_BATCH
        for tokens, labels in m.batches(-(-steps * size // (m.MICRO_BATCH * m.MICRO_BATCHES)), 1000 + seed):
            yield from zip(tokens.split(size), labels.split(size), strict=True)

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        held = itertools.islice(batches(10**4, 10**6), HELD_OUT_TOKENS // (micro_batches * m.MICRO_BATCH * m.CONTEXT))
        return statistics.fmean(float(model.eval()(*batch)) for batch in held)

    optimizer = fusion_p2p.AdamW(lr=1e-3, schedule=fusion_p2p.Cosine(warmup=20))
    made: Callable[[int], nn.Module] = m.Gpt
    return Task("gpt2", micro_batches, m.MICRO_BATCH, optimizer, made, batches, judge, lambda output, batch: output)


def resnet() -> Task:
    c = configuration.load(Path(__file__).parents[2] / "examples" / "resnet_mnist.toml")
    shape = msgspec.structs.replace(c.model.resnet, depths=(3, 3, 3), widths=(16, 32, 64))  # as ResNet-20
    c = msgspec.structs.replace(c, model=msgspec.structs.replace(c.model, resnet=shape))
    c = msgspec.structs.replace(c, data=msgspec.structs.replace(c.data, held_out=HELD_OUT_IMAGES / 5000))
    size = c.batch.micro_batches * c.batch.micro_batch_size

    def opened(seed: int) -> OpenedData:
        seeded = msgspec.structs.replace(c, run=msgspec.structs.replace(c.run, seed=seed))
        with tempfile.TemporaryDirectory() as folder:
            return open_data(seeded, Path(folder), 0)

    def model(seed: int) -> nn.Module:
        seeded = msgspec.structs.replace(c, run=msgspec.structs.replace(c.run, seed=seed))
        return build_model(seeded, opened(seed))

    def batches(steps: int, seed: int) -> Iterator[Any]:
        source = opened(seed).train
        for _ in range(steps):
            yield source.next_batch(size)

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        held = opened(0).held_out.next_batch(HELD_OUT_IMAGES)
        logits = model.eval()(**held).logits
        return 100 * float((logits.argmax(-1) == held["labels"]).float().mean())

    spec = c.optimizer_spec()
    return Task("resnet", c.batch.micro_batches, c.batch.micro_batch_size, spec, model, batches, judge, None)


def plan_of(task: Task, dag: Any, planner: str, compression: str, ladder: Ladder | None) -> Plan:
    """The plan on N1, as a run there has it after its trial steps. `ladder`: as the run measures it on its model."""
    bed = load_bed(FILE, "N1", rate_scale=0.1)
    devices, rates = bed.network.devices, bed.network.bandwidth_bytes_per_s
    offers = [
        DeviceOffer(
            peer=d.peer, flops_per_s=TRIAL_OVER_RECORD * d.flops_per_s, memory_bytes=int(d.memory_bytes),
            memory_bytes_per_s=TRIAL_OVER_RECORD * d.memory_bytes_per_s,
        )
        for d in devices
    ]  # fmt: skip
    links = SwarmLinks(
        links=tuple(
            Link(src=a.peer, dst=b.peer, bandwidth_bytes_per_s=float(rates[i, j]), latency_s=1e-4)
            for (i, a), (j, b) in itertools.permutations(enumerate(devices), 2)
        )
    )
    base = Numerics(cuts=(), micro_batches=m.MICRO_BATCHES, micro_batch_size=task.micro_batch_size)
    size = task.micro_batch_size
    request = PlanRequest(
        base=base,
        links=links,
        compression=compression,
        planner=planner,
        channels=lambda cuts: channels_of(dag, cuts, size),
        ladder=ladder,
    )
    chain = atoms(dag, size)
    plan = make_plan(chain, offers, request)
    promised = proposal_of(plan, chain, offers, request).score.stage_s
    return revise(plan, chain, offers, request, {k: TRIAL_OVER_RECORD * s for k, s in enumerate(promised)}).plan


def train(task: Task, config: str, seed: int, steps: int) -> Curve:
    model = task.model(seed)
    first = next(task.batches(1, seed))
    example = _part(first, task.micro_batch_size)
    captured = capture(model, example, loss=task.loss, seed=seed)
    planner, compression = SHOWN[config]
    ladder = _measured(task, captured, example, seed) if compression == "adatopk" else None
    plan = plan_of(
        task, captured.opdag, f"published:{seed}" if planner == "published" else planner, compression, ladder
    )
    sent = 0

    def count(frame: Frame) -> None:
        nonlocal sent
        sent += len(frame.payload)

    pipeline = LocalPipeline(
        captured, optimizer=task.optimizer, micro_batches=task.micro_batches, micro_batch_size=task.micro_batch_size,
        cuts=plan.numerics.cuts, codecs=plan.numerics.codecs, seed=seed, on_frame=count,
    )  # fmt: skip
    losses = [pipeline.train_step(batch) for batch in itertools.islice(task.batches(steps, seed), steps)]
    model.load_state_dict(pipeline.state_dict())
    return Curve(
        losses=losses,
        bytes_per_step=sent / steps,
        step_s=plan.prediction.step_time_s if plan.prediction else float("nan"),
        final=task.judge(model),
        codecs={f"{c.src}-{c.dst}": c.codec for c in plan.numerics.codecs},
    )


def _measured(task: Task, captured: Captured, example: Any, seed: int) -> Ladder | None:
    """What a live run learns of its codecs before its plan."""
    with tempfile.TemporaryDirectory() as folder:
        return LadderProbe(
            captured=captured, example=example, optimizer=task.optimizer, micro_batch_size=task.micro_batch_size,
            seed=seed, folder=Path(folder), limit_s=PROBE_S,
        )()  # fmt: skip


def _part(batch: Any, size: int) -> Any:
    if isinstance(batch, dict):
        return {k: v[:size] for k, v in batch.items()}
    return tuple(x[:size] for x in batch)


def held(task: Task, config: str, seed: int, steps: int) -> Curve:
    """The run's curve, from disk if it is there; another name once codecs' bytes, the ladder or its probe change."""
    golden, science = Path(__file__).parents[1] / "golden" / "codec_bytes.json", Path(fusion_p2p.__file__).parent
    decides = [golden, science / "planner" / "ladder.py", *([science / "probe.py"] if config == OURS else [])]
    build = hashlib.blake2b(b"".join(p.read_bytes() for p in decides), digest_size=4).hexdigest()
    label = config.replace(" ", "-").replace(",", "")
    path = RESULTS / "local" / f"convergence-{task.name}-{label}-{seed}-{steps}-{build}.json"
    if path.exists():
        return Curve(**json.loads(path.read_text()))
    begin = time.monotonic()
    found = train(task, config, seed, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.rename(path)
    sent = f"{found.bytes_per_step / 1e3:,.0f} kB a step"
    progress(f"{task.name}, {config}, seed {seed}: {found.final:.4g}, {sent}, {time.monotonic() - begin:.0f} s")
    return found


def rows(task: Task, curves: dict[str, list[Curve]]) -> Iterator[Row]:
    means = {config: statistics.fmean(c.final for c in found) for config, found in curves.items()}
    seeds = len(curves[DENSE])
    for config, mean in means.items():
        if config == DENSE:
            continue
        sent = statistics.fmean(c.bytes_per_step for c in curves[config]) / 1e3
        case = f"{task.name}: {config}, {seeds} seeds, {sent:,.0f} kB a step"
        if task.name == "gpt2":
            over, bound, unit = 100 * (mean / means[DENSE] - 1), 100 * LOSS, "% of loss over dense"
        else:
            over, bound, unit = means[DENSE] - mean, POINTS, " points of accuracy below dense"
        judged = at_most(case, over, bound, unit)
        yield judged if config == OURS else Row(case, judged.figure, "reported", None)
    ours = Mean(curves[OURS])
    for config in means:
        if config != OURS:
            theirs = Mean(curves[config])
            target = max(ours.losses[-1], theirs.losses[-1])
            a, b = theirs.seconds_to(target), ours.seconds_to(target)
            case = f"{task.name}: time to a training loss of {target:.3g}, {config} over ours, step times as predicted"
            yield Row(case, f"{a:.4g} s / {b:.4g} s = {a / b:.3g}x", "reported", None)


class Mean:
    """Of one configuration's seeds: the smoothed losses by step, seconds a step."""

    def __init__(self, runs: Sequence[Curve]) -> None:
        self.losses = torch.tensor([_smooth(r.losses) for r in runs]).mean(0).tolist()
        self.step_s = statistics.fmean(r.step_s for r in runs)

    def seconds_to(self, loss: float) -> float:
        """Until the loss is first as low as that; it is."""
        return self.step_s * (1 + next(k for k, x in enumerate(self.losses) if x <= loss))


def page(judged: Sequence[Row], about: dict[str, Any]) -> str:
    """Markdown: the rows and the picture."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = [f"| {r.case} | {r.figure} | {r.bound} | {words[r.holds]} |" for r in judged]
    head = f"Trained {about['date'][:10]} on {about['cpu']}, torch {about['torch']}."
    top = ["# Loss under each plan's codecs", "", f"{head} Again: `python -m tests.bench.convergence --save`.", ""]
    top += ["| case | figure | bound | holds |", "| --- | --- | --- | --- |"]
    return "\n".join([*top, *lines, "", "![loss against steps, bytes and time](convergence.png)", ""])


def draw(curves: dict[str, dict[str, list[Curve]]], path: Path) -> bool:
    """PNG: a row a model; loss against steps, bytes and time, means over seeds with their spread."""
    try:
        import matplotlib
    except ImportError:
        progress("no picture: matplotlib is not installed (it comes with mlxtend)")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(curves), 3, figsize=(15, 4.2 * len(curves)), squeeze=False)
    for row, (name, found) in zip(axes, curves.items(), strict=True):
        for config, runs in found.items():
            loss = torch.tensor([_smooth(r.losses) for r in runs])
            mean, low, high = loss.mean(0), loss.min(0).values, loss.max(0).values
            steps = torch.arange(1, len(mean) + 1, dtype=torch.float64)
            sent = statistics.fmean(r.bytes_per_step for r in runs) / 1e6
            seconds = statistics.fmean(r.step_s for r in runs)
            units = {"steps": 1.0, "MB sent": sent, "s, predicted on N1": seconds}
            for axis, (unit, scale) in zip(row, units.items(), strict=True):
                axis.plot(steps * scale, mean, label=config)
                axis.fill_between(steps * scale, low, high, alpha=0.15)
                axis.set_xlabel(unit)
        row[1].set_xscale("log")
        row[2].set_xscale("log")
        row[0].set_ylabel(f"{name}: training loss")
        row[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _smooth(losses: Sequence[float], window: int = 10) -> list[float]:
    return [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def main(args: list[str]) -> int:
    parser = arguments(__doc__ or "", "GPT-2 alone, one seed, 8 steps; nothing is judged")
    parser.add_argument("--steps", type=int, metavar="N", help="(default: 200)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), metavar="N", help="(default: 3)")
    parser.add_argument("--tasks", nargs="+", choices=("gpt2", "resnet"), default=["gpt2", "resnet"])
    parser.add_argument("--save", action="store_true", help="write results/convergence.json, .md, .png")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    tasks = [gpt2()] if options.quick else [{"gpt2": gpt2, "resnet": resnet}[name]() for name in options.tasks]
    configs = (DENSE, OURS) if options.quick else tuple(SHOWN)
    curves: dict[str, dict[str, list[Curve]]] = {}
    judged: list[Row] = []
    for task in tasks:
        steps = 8 if options.quick else options.steps or STEPS[task.name]
        seeds = range(1 if options.quick else options.seeds)
        curves[task.name] = {c: [held(task, c, seed, steps) for seed in seeds] for c in configs}
        judged += rows(task, curves[task.name])
    if options.quick:
        judged = [Row(r.case, r.figure, "reported", None) for r in judged]
    if options.save:
        about = machine()
        whole = {name: {c: [asdict(x) for x in runs] for c, runs in found.items()} for name, found in curves.items()}
        saved = {"machine": about, "rows": [asdict(r) for r in judged], "curves": whole}
        (RESULTS / "convergence.json").write_text(json.dumps(saved) + "\n")
        (RESULTS / "convergence.md").write_text(page(judged, about))
        draw(curves, RESULTS / "convergence.png")
    return report(judged, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

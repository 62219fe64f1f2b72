"""AdaTopK's long rows: training from scratch under the default policy, and a million mutated frames.

`python -m tests.bench.adatopk_soak [SEED ...]` does the training runs of these seeds (default: 0) that are missing and
writes what it found to results/adatopk_scratch.json.

The model is a byte GPT-2 of 200,000 parameters (width 64, 4 layers, context 64) in 4 stages on two sites.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusion_p2p.adatopk import Choice, Finding, LinkLoad, Observation, choose, observe
from fusion_p2p.capture import capture
from fusion_p2p.frame import TickReport
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import Numerics
from fusion_p2p.probe import even_cuts
from fusion_p2p.settings import OptimizerSpec, Schedule
from fusion_p2p.workload import atoms
from peer.trainer_gate import GateMemory
from tests.adversarial.codec_fuzz import ROOM_BYTES, fuzz
from tests.bench import adatopk_model as small
from tests.bench import adatopk_record as record
from tests.bench.rows import Row, at_most

FILE = record.RESULTS / "adatopk_scratch.json"
STEPS, STAGES, SEEDS = 2000, 4, (0, 1, 2, 3)
RUNS = (("none", STEPS), ("adatopk", STEPS), ("none", STEPS // 2))  # the last: what compression has to be worth
WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 4, 64
MICRO_BATCH, MICRO_BATCHES = 8, 2
# Stages 0 and 1 here, 2 and 3 there; a home's uplink between the sites; a stage takes 40 ms a micro-batch.
SITE_MBPS, BETWEEN_MBPS, STAGE_S = 1000.0, 8.0, 0.04
HELD_OUT = 100_000


@dataclass(frozen=True)
class Scratch:
    """`norms`: of the held-out activations at each cut, through the trained weights. `findings`: of the stability
    gate, from the figures that the stages report. `every`: steps from one value of `curve` and `sent` to the next."""

    compression: str
    seed: int
    steps: int
    codecs: dict[str, str]
    loss: float
    norms: list[float]
    findings: list[str]
    curve: list[float]
    sent: list[int]
    cpu_s: float
    every: int = 1
    measured: str = ""  # the day, ISO


class _Gate:
    """Hears every step as a run's gate does."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        codecs = tuple(c.link_codec for c in choices)
        self._numerics = Numerics(
            cuts=(1, 2, 3), codecs=codecs, micro_batches=MICRO_BATCHES, micro_batch_size=MICRO_BATCH
        )
        self._memory, self.findings = GateMemory(), list[str]()

    def hear(self, seen: Observation) -> None:
        found: tuple[Finding, ...] = self._memory.take(seen, self._numerics)
        self.findings += [f"step {f.step}: {f.reason}" for f in found]


class _WithLoss(nn.Module):
    def __init__(self, model: small.Gpt) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x, lambda cut, h: h).flatten(0, 1), y.flatten())


def _batch(rng: np.random.Generator, data: np.ndarray, rows: int) -> dict[str, torch.Tensor]:
    x, y = small.batch(data, rows, rng, CONTEXT)
    return {"x": x.contiguous(), "y": y.contiguous()}


def _choices(compression: str) -> tuple[Choice, ...]:
    """The policy's codecs for the two-site testbed."""
    elements, links = MICRO_BATCH * CONTEXT * WIDTH, []
    for src in range(STAGES):
        for dst in range(src + 1, STAGES):
            rate = (SITE_MBPS if (src < 2) == (dst < 2) else BETWEEN_MBPS) * 125e3
            links.append(
                LinkLoad(
                    src=src,
                    dst=dst,
                    elements=elements,
                    dense_bytes=4 * elements,
                    forward_bytes_per_s=rate,
                    backward_bytes_per_s=rate,
                )
            )
    return choose(compression, links, [STAGE_S] * STAGES)


def from_scratch(compression: str, steps: int, tokens: int = HELD_OUT, seed: int = 0) -> Scratch:
    """Trains the model for `steps` in LocalPipeline with the codecs that the policy gives the testbed."""
    torch.manual_seed(seed)
    model = small.Gpt(WIDTH, LAYERS, HEADS, CONTEXT)
    data, held = small.text()[0], small.text()[2]
    rng = np.random.default_rng(seed)
    captured = capture(_WithLoss(model), _batch(np.random.default_rng(9), data, MICRO_BATCH))
    choices = _choices(compression)
    reports: dict[int, TickReport] = {}
    pipeline = LocalPipeline(
        captured,
        optimizer=OptimizerSpec(
            kind="adamw",
            lr=1e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip_norm=1.0,
            schedule=Schedule(kind="cosine", warmup=min(50, steps // 4), total=steps, floor=0.1),
        ),
        micro_batches=MICRO_BATCHES,
        micro_batch_size=MICRO_BATCH,
        cuts=even_cuts(atoms(captured.opdag, MICRO_BATCH), STAGES),
        codecs=[c.link_codec for c in choices],
        seed=seed,
        on_report=reports.__setitem__,
    )
    curve: list[float] = []
    sent: list[int] = []
    watch = _Gate(choices)
    start = time.process_time()
    for step in range(steps):
        curve.append(pipeline.train_step(_batch(rng, data, MICRO_BATCH * MICRO_BATCHES)))
        watch.hear(observe(step, curve[-1], reports))
        sent.append(sum(c.sent_bytes for r in reports.values() for c in r.cuts) + (sent[-1] if sent else 0))
    spent_s = time.process_time() - start
    model.load_state_dict({k.removeprefix("model."): v for k, v in pipeline.state_dict().items()})
    loss = small.evaluate(model, held, None, 0, tokens)
    names = {f"{c.src}-{c.dst}": c.rung.codec for c in choices}
    norms = _norms(model, _batch(np.random.default_rng(5), held, 64)["x"])
    return Scratch(
        compression, seed, steps, names, loss, norms, watch.findings, curve, sent, spent_s, 1, record.today()
    )


def _norms(model: small.Gpt, x: torch.Tensor) -> list[float]:
    """Of what enters each block but the first, where stages are cut."""
    norms: list[float] = []
    for block in list(model.blocks)[1:]:
        block.register_forward_pre_hook(lambda _, args: norms.append(float(args[0].norm())))
    with torch.no_grad():
        model(x, lambda c, h: h)
    return norms


def spec(compression: str) -> str:
    """What a run's result depends on, the policy's codecs included."""
    task = (STAGES, WIDTH, LAYERS, HEADS, CONTEXT, MICRO_BATCH, MICRO_BATCHES, HELD_OUT)
    codecs = [(c.src, c.dst, c.rung.codec) for c in _choices(compression)]
    return record.spec([c for *_, c in codecs], *task, codecs)


def _path(compression: str, seed: int, steps: int) -> Path:
    return record.LOCAL / f"scratch-{compression}-{seed}-{steps}-{spec(compression)}.json"


def held(compression: str, seed: int, steps: int = STEPS) -> Scratch | None:
    """A run's result, as measured here, else as recorded; None where there is none."""
    path = _path(compression, seed, steps)
    if path.exists():
        return Scratch(**json.loads(path.read_text()))
    wanted = compression, seed, steps
    found = (
        r for r in record.read(FILE).get(spec(compression), []) if (r["compression"], r["seed"], r["steps"]) == wanted
    )
    return next((Scratch(**r) for r in found), None)


def trained(compression: str, seed: int, steps: int = STEPS) -> Scratch:
    """The run's result; trains if there is none."""
    found = held(compression, seed, steps)
    if found is None:
        found = from_scratch(compression, steps, seed=seed)
        record.keep(_path(compression, seed, steps), asdict(found))
    return found


def write() -> int:
    """Records every whole run there is, curves thinned; how many."""
    found = [r for s in SEEDS for c, steps in RUNS if (r := held(c, s, steps)) is not None]
    about = f"from scratch on two sites, {HELD_OUT} held-out tokens, nats a byte"
    record.write(FILE, about, [(spec(r.compression), _thin(r)) for r in found])
    return len(found)


def _thin(r: Scratch) -> record.Figures:
    """Every tenth value of the curves, of the first seed only, which the plots show."""
    step = 1 if r.every > 1 else 10
    curve = [round(x, 4) for x in record.smooth(r.curve)[::step]] if step > 1 else r.curve
    if r.seed != SEEDS[0]:
        return asdict(replace(r, curve=[], sent=[], every=10))
    return asdict(replace(r, curve=curve, sent=r.sent[::step], every=10))


def judged(dense: Scratch, ours: Scratch, when: str) -> Iterator[Row]:
    """The rows of one seed's two runs."""
    used = sorted(set(ours.codecs.values()) - {"dense"})
    what = f"{STEPS} steps from scratch, seed {ours.seed}, {', '.join(used)} between two sites ({when})"
    yield at_most(f"{what}: held-out loss over dense", 100 * (ours.loss / dense.loss - 1), 2, "%")
    growth = max(a / b for a, b in zip(ours.norms, dense.norms, strict=True))
    yield at_most(f"{what}: activation norm over dense, the worst block", growth, 1.2, "x")
    yield at_most(f"{what}: findings of the stability gate", len(ours.findings), 0)


def scratch_rows() -> Iterator[Row]:
    """Of every seed that is recorded for this code."""
    if None in (held("none", SEEDS[0]), held("adatopk", SEEDS[0])):
        todo = "not measured on this code: python -m tests.bench.adatopk_soak"
        yield Row(f"{STEPS} steps from scratch with the default policy", todo, "<= 2%", False)
    for seed in SEEDS:
        dense, ours, half = (held(c, seed, steps) for c, steps in RUNS)
        if dense is None or ours is None:
            continue
        when = record.when([dense.measured, ours.measured], fresh=False)
        yield from judged(dense, ours, when)
        if half is not None:
            case = f"dense in half the steps, seed {seed} ({when}): loss over dense, which twice the speed has to beat"
            yield Row(case, f"{100 * (half.loss / dense.loss - 1):.3g}%", "reported", None)


def fresh_rows() -> Iterator[Row]:
    """Measured now, whatever is recorded: three minutes of one core."""
    yield from judged(from_scratch("none", STEPS), from_scratch("adatopk", STEPS), record.when([], fresh=True))


def fuzz_rows() -> Iterator[Row]:
    """A minute of one core."""
    tally = fuzz(0, 1_000_000)
    what = f"1,000,000 mutated frames, address space grows by at most {ROOM_BYTES >> 20} MiB"
    yield Row(what, f"{tally.refused} refused, {tally.decoded} decoded", "typed errors only", True)


def main(only: list[str]) -> int:
    torch.set_num_threads(1)
    for seed in [int(s) for s in only] or SEEDS[:1]:
        for compression, steps in RUNS:
            r = trained(compression, seed, steps)
            print(
                f"{compression} seed {seed}, {steps} steps, {r.codecs}: loss {r.loss:.4f}, {r.cpu_s:.0f} CPU seconds",
                flush=True,
            )
    print(f"{write()} runs are recorded in {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""AdaTopK's long rows: training from scratch under the default policy, and a million mutated frames.

`python -m tests.bench.adatopk_soak` does the training runs that are missing; their results are kept in results/local.
The model is a byte GPT-2 of 200,000 parameters (width 64, 4 layers, context 64) in 4 stages on two sites.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusion_p2p.adatopk import Choice, Finding, LinkLoad, Observation, choose, observe
from fusion_p2p.capture import capture
from fusion_p2p.frame import TickReport
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.probe import even_cuts
from fusion_p2p.settings import OptimizerSpec, Schedule
from fusion_p2p.workload import atoms
from peer.trainer_gate import GateMemory
from tests.adversarial.codec_fuzz import fuzz
from tests.bench import adatopk_model as small
from tests.bench.adatopk_train import LOCAL
from tests.bench.rows import Row, at_most

STEPS, STAGES = 2000, 4
WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 4, 64
MICRO_BATCH, MICRO_BATCHES = 8, 2
# Stages 0 and 1 here, 2 and 3 there; a home's uplink between the sites; a stage takes 40 ms a micro-batch.
SITE_MBPS, BETWEEN_MBPS, STAGE_S = 1000.0, 8.0, 0.04
HELD_OUT = 100_000


@dataclass(frozen=True)
class Scratch:
    """`norms`: of the held-out activations at each cut, through the trained weights. `rms`: per step, of links 0-1, 1-2
    and 2-3, as the stages report it."""

    codecs: dict[str, str]
    loss: float
    norms: list[float]
    curve: list[float]
    sent: list[int]
    rms: list[list[float]]
    cpu_s: float

    def gate(self) -> list[Finding]:
        """What the stability gate says, from the recorded figures."""
        codecs = tuple(LinkCodec(int(k[0]), int(k[2]), name) for k, name in self.codecs.items())
        numerics = Numerics(cuts=(1, 2, 3), codecs=codecs, micro_batches=MICRO_BATCHES, micro_batch_size=MICRO_BATCH)
        memory, found = GateMemory(), list[Finding]()
        for step, (loss, rms) in enumerate(zip(self.curve, self.rms, strict=True)):
            norms = {(k, k + 1): x for k, x in enumerate(rms)}
            found += memory.take(Observation(step=step, loss=loss, norms=norms), numerics)
        return found


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
    rms: list[list[float]] = []
    start = time.process_time()
    for step in range(steps):
        curve.append(pipeline.train_step(_batch(rng, data, MICRO_BATCH * MICRO_BATCHES)))
        seen = observe(step, curve[-1], reports)
        rms.append([round(norm, 5) for _, norm in sorted(seen.norms.items())])
        sent.append(sum(c.sent_bytes for r in reports.values() for c in r.cuts) + (sent[-1] if sent else 0))
    spent_s = time.process_time() - start
    model.load_state_dict({k.removeprefix("model."): v for k, v in pipeline.state_dict().items()})
    loss = small.evaluate(model, held, None, 0, tokens)
    names = {f"{c.src}-{c.dst}": c.rung.codec for c in choices}
    norms = _norms(model, _batch(np.random.default_rng(5), held, 64)["x"])
    return Scratch(names, loss, norms, curve, sent, rms, spent_s)


def _norms(model: small.Gpt, x: torch.Tensor) -> list[float]:
    """Of what enters each block but the first, where stages are cut."""
    norms: list[float] = []
    for block in list(model.blocks)[1:]:
        block.register_forward_pre_hook(lambda _, args: norms.append(float(args[0].norm())))
    with torch.no_grad():
        model(x, lambda c, h: h)
    return norms


def scratch(compression: str, steps: int = STEPS) -> Scratch:
    """The run's result, from disk if it is there."""
    path = LOCAL / f"scratch-{compression}-{steps}.json"
    if path.exists():
        return Scratch(**json.loads(path.read_text()))
    found = from_scratch(compression, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.rename(path)
    return found


def scratch_rows(steps: int = STEPS) -> Iterator[Row]:
    dense, ours = scratch("none", steps), scratch("adatopk", steps)
    used = sorted(set(ours.codecs.values()) - {"dense"})
    what = f"{steps} steps from scratch, {', '.join(used)} between two sites"
    yield at_most(f"{what}: held-out loss over dense", 100 * (ours.loss / dense.loss - 1), 2, "%")
    growth = max(a / b for a, b in zip(ours.norms, dense.norms, strict=True))
    yield at_most(f"{what}: activation norm over dense, the worst block", growth, 1.2, "x")
    yield at_most(f"{what}: findings of the stability gate", len(ours.gate()), 0)


def soak_rows() -> Iterator[Row]:
    yield from scratch_rows()
    tally = fuzz(0, 1_000_000)
    yield Row(
        "1,000,000 mutated frames", f"{tally.refused} refused, {tally.decoded} decoded", "typed errors only", True
    )


def main() -> int:
    torch.set_num_threads(1)
    for compression in ("none", "adatopk"):
        r = scratch(compression)
        print(f"{compression} {r.codecs}: loss {r.loss:.4f}, {r.sent[-1]} bytes, {r.cpu_s:.0f} CPU seconds, {r.gate()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

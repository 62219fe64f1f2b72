"""AdaTopK's long rows: training from scratch under the default policy, and a million mutated frames."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusion_p2p.adatopk import Choice, LinkLoad, choose
from fusion_p2p.capture import capture
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.probe import even_cuts
from fusion_p2p.settings import OptimizerSpec, Schedule
from fusion_p2p.workload import atoms
from tests.adversarial.codec_fuzz import fuzz
from tests.bench import adatopk_model as small
from tests.bench.rows import Row, at_most

STEPS, STAGES, SITE_MBPS, BETWEEN_MBPS = 2000, 4, 1000.0, 8.0
# Stages of a two-site testbed: 0 and 1 here, 2 and 3 there; a stage takes 40 ms a micro-batch.
STAGE_S = 0.04


class _WithLoss(nn.Module):
    def __init__(self, model: small.Gpt) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x, lambda cut, h: h).flatten(0, 1), y.flatten())


def _batch(rng: np.random.Generator, data: np.ndarray, rows: int) -> dict[str, torch.Tensor]:
    x, y = small.batch(data, rows, rng)
    return {"x": x.contiguous(), "y": y.contiguous()}


def from_scratch(compression: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """Trains the small GPT-2 for `steps` in LocalPipeline with the codecs that the policy gives a two-site testbed."""
    torch.manual_seed(seed)
    model = small.Gpt()
    data, held = small.text()[0], small.text()[2]
    rng = np.random.default_rng(seed)
    captured = capture(_WithLoss(model), _batch(np.random.default_rng(9), data, small.MICRO_BATCH))
    parts = atoms(captured.opdag, small.MICRO_BATCH)
    cuts = even_cuts(parts, STAGES)
    elements = small.MICRO_BATCH * small.CONTEXT * small.WIDTH
    links = []
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
    choices: tuple[Choice, ...] = choose(compression, links, [STAGE_S] * STAGES)
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
        micro_batches=small.MICRO_BATCHES,
        micro_batch_size=small.MICRO_BATCH,
        cuts=cuts,
        codecs=[c.link_codec for c in choices],
        seed=seed,
    )
    start = time.perf_counter()
    curve = [pipeline.train_step(_batch(rng, data, small.MICRO_BATCH * small.MICRO_BATCHES)) for _ in range(steps)]
    model.load_state_dict({k.removeprefix("model."): v for k, v in pipeline.state_dict().items()})
    norms: list[float] = []
    with torch.no_grad():
        model(_batch(np.random.default_rng(5), held, 64)["x"], lambda c, h: (norms.append(float(h.norm())), h)[1])
    return {
        "codecs": sorted({c.rung.codec for c in choices}),
        "loss": small.evaluate(model, held, None, 0, 50_000),
        "norms": norms,
        "curve": curve,
        "seconds": time.perf_counter() - start,
    }


def soak_rows(results: Path, steps: int = STEPS) -> Iterator[Row]:
    dense, ours = from_scratch("none", steps), from_scratch("adatopk", steps)
    results.mkdir(exist_ok=True)
    (results / "adatopk_scratch.json").write_text(json.dumps({"dense": dense, "adatopk": ours}) + "\n")
    over = 100 * (ours["loss"] / dense["loss"] - 1)
    what = f"{steps} steps from scratch, {', '.join(ours['codecs'])}"
    yield at_most(f"{what}: loss over dense", over, 2, "%")
    growth = max(a / b for a, b in zip(ours["norms"], dense["norms"], strict=True))
    yield at_most(f"{what}: activation norm over dense", growth, 1.2, "x")
    tally = fuzz(0, 1_000_000)
    yield Row(
        "1,000,000 mutated frames", f"{tally.refused} refused, {tally.decoded} decoded", "typed errors only", True
    )

"""Fine-tuning through codecs: `python -m tests.bench.adatopk_train [CODEC ...]` does the missing runs, of these
codecs or all, and says how far it is. Each run's result is kept in results/local, so it may be stopped and started
again. `rows` judges what there is.

The pretrained start (1,600,000 parameters: width 128, 8 layers) is trained once and cached. A run takes STEPS steps of
2,048 tokens with the codec at all three cuts, both directions, and is judged on HELD_OUT tokens that no run saw.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tests.bench import adatopk_model as small
from tests.bench.rows import Row, at_least, at_most

RESULTS = Path(__file__).parent / "results"
LOCAL = RESULTS / "local"
SEEDS, STEPS, HELD_OUT, HELD_OUT_CODED = (0, 1, 2, 3), 100, 200_000, 50_000
# (codec, least true ratio, most loss over dense) of the table
LADDER = (
    ("transform:4/4", 7.8, 0.005),
    ("transform:3/2", 10.0, 0.01),
    ("transform:2/1", 13.0, 0.02),
    ("transform:1/0.5", 30.0, 0.06),
)
# Published Top-K at about 8, 19 and 35 times fewer bytes
PUBLISHED = ("topk:0.0605", "topk:0.0265", "topk:0.0142")
# One seed: for the constant ladder and the plots
ONCE = (
    "dense:bf16",
    "int8",
    "rotated:4/2",
    "subspace:64/4",
    "transform:1/1",
    "transform:0.5/0.5",
    "topk-masked:0.1",
    "topk-masked:0.01",
)
RUNS = (
    *((c, s) for s in SEEDS for c in ("dense", *(c for c, _, _ in LADDER))),
    *((c, s) for s in SEEDS for c in PUBLISHED),
    *((c, 0) for c in ONCE),
)


def path_of(codec: str, seed: int) -> Path:
    """Where a run's result lies: another name once any codec's bytes change."""
    golden = Path(__file__).parent.parent / "golden" / "codec_bytes.json"
    build = hashlib.blake2b(golden.read_bytes(), digest_size=4).hexdigest()
    name = codec.replace(":", "_").replace("/", "-")
    return LOCAL / f"finetune-{name}-{seed}-{STEPS}-{HELD_OUT}-{build}.json"


def held(codec: str, seed: int) -> small.Result | None:
    path = path_of(codec, seed)
    return small.Result(**json.loads(path.read_text())) if path.exists() else None


def finetuned(codec: str, seed: int) -> small.Result:
    """The run's result, from disk if it is there."""
    found = held(codec, seed)
    if found is None:
        found = small.finetune(codec, seed, STEPS, HELD_OUT, HELD_OUT_CODED)
        path = path_of(codec, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)))
        part.rename(path)
    return found


def upper_90(values: list[float]) -> float:
    """Upper end of the two-sided 90% interval of the mean (Student's t)."""
    t = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}[len(values)]
    return float(np.mean(values) + t * np.std(values, ddof=1) / math.sqrt(len(values)))


def _over(codec: str, dense: dict[int, small.Result]) -> tuple[list[float], list[float], float]:
    """(loss over dense per seed: weights run dense; through the codec; true ratio)."""
    runs = [finetuned(codec, s) for s in SEEDS]
    plain = [r.loss / dense[r.seed].loss - 1 for r in runs]
    coded = [r.loss_coded / dense[r.seed].loss_coded - 1 for r in runs]
    return plain, coded, float(np.mean([r.ratio for r in runs]))


def rows() -> Iterator[Row]:
    """The table's training rows; runs what is missing."""
    dense = {s: finetuned("dense", s) for s in SEEDS}
    ours = {name: _over(name, dense) for name, _, _ in LADDER}
    for name, ratio, bound in LADDER:
        plain, coded, got = ours[name]
        yield at_least(f"true ratio of {name}", got, ratio, "x")
        what = f"fine-tuning loss over dense, {name} ({got:.1f}x), {len(SEEDS)} seeds"
        yield at_most(f"{what}, mean {100 * np.mean(plain):+.3f}%, upper 90%", 100 * upper_90(plain), 100 * bound, "%")
        yield Row(
            f"the same, evaluated through the codec ({HELD_OUT_CODED} tokens), mean {100 * np.mean(coded):+.3f}%",
            f"{100 * upper_90(coded):.4g}%",
            "reported",
            None,
        )
    for published in PUBLISHED:
        theirs, _, got = _over(published, dense)
        name = max((n for n in ours), key=lambda n: (ours[n][2] >= 0.99 * got, -ours[n][2]))  # as many bytes or fewer
        mine = ours[name]
        gap = upper_90([a - b for a, b in zip(mine[0], theirs, strict=True)])
        what = (
            f"published {published} ({got:.1f}x, {100 * np.mean(theirs):+.1f}%): {name} at {mine[2]:.1f}x less theirs"
        )
        yield at_most(f"{what}, paired, upper 90%", 100 * gap, 0, "%")


def main(only: list[str]) -> int:
    torch.set_num_threads(1)
    runs = [r for r in RUNS if not only or r[0] in only]
    for i, (codec, seed) in enumerate(runs):
        start, fresh = time.process_time(), held(codec, seed) is None
        r = finetuned(codec, seed)
        dense = held("dense", seed)
        over = f"{100 * (r.loss / dense.loss - 1):+.3f}%" if dense else ""
        spent = f", {time.process_time() - start:.0f} CPU seconds" if fresh else ""
        print(f"{i + 1}/{len(runs)} {codec} seed {seed}: loss {r.loss:.4f} {over} at {r.ratio:.1f}x{spent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

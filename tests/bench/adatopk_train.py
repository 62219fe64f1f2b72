"""Fine-tuning through codecs: `python -m tests.bench.adatopk_train [CODEC ...]` does the missing runs, of these codecs
or all, says how far it is, and writes what it found to results/adatopk_finetune.json. Each run's result is also kept in
results/local, so it may be stopped and started again. `rows` judges what there is, and says from when it is.

The pretrained start (1,600,000 parameters: width 128, 8 layers) is trained once and cached. A run takes STEPS steps of
2,048 tokens with the codec at all three cuts, both directions, and is judged on HELD_OUT tokens that no run saw.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from tests.bench import adatopk_model as small
from tests.bench import adatopk_record as record
from tests.bench.rows import Row, at_least, at_most

SEEDS, STEPS, HELD_OUT, HELD_OUT_CODED = (0, 1, 2, 3), 100, 200_000, 50_000
FILE = record.RESULTS / "adatopk_finetune.json"
# (codec, least true ratio, most loss over dense) of the table
LADDER = (
    ("transform:4/4", 7.8, 0.005),
    ("transform:3/2", 10.0, 0.01),
    ("transform:2/1", 13.0, 0.02),
    ("transform:1/0.5", 30.0, 0.06),
)
# (published Top-K; of ours, what sends as many bytes or fewer)
PAIRS = (
    ("topk:0.0605", "transform:3/2"),
    ("topk:0.0425", "transform:3/2"),
    ("topk:0.0265", "transform:2/1"),
    ("topk:0.0178", "transform:1/1"),
    ("topk:0.0142", "transform:1/0.5"),
    ("topk:0.01", "transform:0.5/0.5"),
    ("topk:0.00156", "topk-masked:0.01"),
)
ONCE = ("dense:bf16", "int8", "rotated:4/2", "subspace:64/4", "topk-masked:0.1")  # one seed: for ladder and plots
_SEEDED = dict.fromkeys(("dense", *(c for c, _, _ in LADDER), *(c for pair in PAIRS for c in pair)))
RUNS = (*((c, s) for c in _SEEDED for s in SEEDS), *((c, 0) for c in ONCE))


def spec(codec: str) -> str:
    """What a run's result depends on: another once the codec's bytes, the model or the task change."""
    shape = (small.WIDTH, small.LAYERS, small.HEADS, small.CONTEXT, small.CUTS, small.PRETRAIN_STEPS)
    return record.spec([codec], *shape, small.MICRO_BATCH, small.MICRO_BATCHES, STEPS, HELD_OUT, HELD_OUT_CODED)


def held(codec: str, seed: int) -> small.Result | None:
    """A run's result, as measured here, else as recorded (curves of the first seed only); None where there is none."""
    path = _path(codec, seed)
    if path.exists():
        return small.Result(**json.loads(path.read_text()))
    runs = record.read(FILE).get(spec(codec), [])
    found = (r for r in runs if (r["codec"], r["seed"]) == (codec, seed))
    return next((small.Result(**r) for r in found), None)


def finetuned(codec: str, seed: int) -> small.Result:
    """The run's result; trains if there is none."""
    found = held(codec, seed)
    if found is None:
        found = small.finetune(codec, seed, STEPS, HELD_OUT, HELD_OUT_CODED)
        found = replace(found, measured=record.today())
        record.keep(_path(codec, seed), asdict(found))
    return found


def _path(codec: str, seed: int) -> Path:
    name = codec.replace(":", "_").replace("/", "-")
    return record.LOCAL / f"finetune-{name}-{seed}-{spec(codec)}.json"


def write() -> int:
    """Records every run there is; how many."""
    found = [r for codec, seed in RUNS if (r := held(codec, seed)) is not None]
    about = f"fine-tuning, {STEPS} steps, {HELD_OUT} held-out tokens, {HELD_OUT_CODED} through the codec; nats a byte"
    record.write(FILE, about, [(spec(r.codec), _short(r)) for r in found])
    return len(found)


def _short(r: small.Result) -> record.Figures:
    """Curves of the first seed only, which the plots show; of the norms the largest."""
    curve = [round(x, 4) for x in r.curve] if r.seed == 0 else []
    out = replace(r, curve=curve, sent=r.sent if r.seed == 0 else [], norms=[round(max(r.norms), 3)])
    return asdict(replace(out, loss=round(r.loss, 6), loss_coded=round(r.loss_coded, 6), ratio=round(r.ratio, 3)))


def upper_90(values: list[float]) -> float:
    """Upper end of the two-sided 90% interval of the mean (Student's t)."""
    t = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}[len(values)]
    return float(np.mean(values) + t * np.std(values, ddof=1) / math.sqrt(len(values)))


def _all(codec: str, missing: bool) -> list[small.Result]:
    """Every seed's run; fewer where some are not recorded and may not be trained now."""
    return [r for s in SEEDS if (r := finetuned(codec, s) if missing else held(codec, s)) is not None]


def rows(missing: bool = False) -> Iterator[Row]:
    """The table's training rows. `missing`: train what is not recorded (minutes a run), else such a row does not
    hold."""
    known = {r.codec for c, s in RUNS if (r := held(c, s)) is not None}
    runs = {c: _all(c, missing) for c in dict.fromkeys(c for c, _ in RUNS)}
    now = {c for c in runs if c not in known}

    def when(*codecs: str) -> str:
        return record.when([r.measured for c in codecs for r in runs[c]], set(codecs) <= now)

    def complete(case: str, *codecs: str) -> Iterator[Row]:
        lacking = [c for c in codecs if len(runs[c]) < len(SEEDS)]
        if lacking:
            todo = f"not measured on this code: python -m tests.bench.adatopk_train {' '.join(lacking)}"
            yield Row(case, todo, f"{len(SEEDS)} seeds", False)

    def over(codec: str, coded: bool = False) -> list[float]:
        pick = (lambda r: r.loss_coded) if coded else (lambda r: r.loss)
        return [pick(a) / pick(b) - 1 for a, b in zip(runs[codec], runs["dense"], strict=True)]

    for name, ratio, bound in LADDER:
        yield from (short := list(complete(f"fine-tuning loss over dense, {name}", "dense", name)))
        if short:
            continue
        got, plain, coded = _ratio(runs[name]), over(name), over(name, coded=True)
        yield at_least(f"true ratio of {name} ({when(name)})", got, ratio, "x")
        what = f"fine-tuning loss over dense, {name} ({got:.1f}x), {len(SEEDS)} paired seeds ({when('dense', name)})"
        yield at_most(f"{what}, mean {100 * np.mean(plain):+.3f}%, upper 90%", 100 * upper_90(plain), 100 * bound, "%")
        case = f"the same through the codec ({HELD_OUT_CODED} tokens), mean {100 * np.mean(coded):+.3f}%, upper 90%"
        yield Row(case, f"{100 * upper_90(coded):.4g}%", "reported", None)
    for published, name in PAIRS:
        yield from (short := list(complete(f"{name} against {published}", "dense", published, name)))
        if short:
            continue
        theirs, ours = _ratio(runs[published]), _ratio(runs[name])
        logs = [math.log(a.loss / b.loss) for a, b in zip(runs[name], runs[published], strict=True)]
        what = (
            f"{name} at {ours:.1f}x ({100 * np.mean(over(name)):+.2f}%) against published {published} at {theirs:.1f}x "
            f"({100 * np.mean(over(published)):+.1f}%), {len(SEEDS)} paired seeds ({when(name, published)})"
        )
        yield at_most(f"{what}: our loss over theirs, upper 90%", math.exp(upper_90(logs)), 1)
        yield at_least("the same: our ratio over theirs", ours / theirs, 0.99)


def _ratio(runs: list[small.Result]) -> float:
    return float(np.mean([r.ratio for r in runs]))


def main(only: list[str]) -> int:
    torch.set_num_threads(1)
    runs = [r for c in only for r in RUNS if r[0] == c] if only else list(RUNS)
    for i, (codec, seed) in enumerate(runs):
        start, fresh = time.process_time(), held(codec, seed) is None
        r = finetuned(codec, seed)
        dense = held("dense", seed)
        over = f"{100 * (r.loss / dense.loss - 1):+.3f}%" if dense else ""
        spent = f", {time.process_time() - start:.0f} CPU seconds" if fresh else ""
        print(f"{i + 1}/{len(runs)} {codec} seed {seed}: loss {r.loss:.4f} {over} at {r.ratio:.1f}x{spent}", flush=True)
    print(f"{write()} of {len(RUNS)} runs are recorded in {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Curves of the training runs as SVG: `python -m tests.bench.adatopk_plots`.

Reads what `adatopk_train` and `adatopk_soak` measured or recorded, writes to results/: training loss against steps and
against true bytes, for every codec that has run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.bench import adatopk_model as small
from tests.bench import adatopk_record as record
from tests.bench import adatopk_soak as soak
from tests.bench import adatopk_train as runs

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 760, 380, 60, 30, 190
COLOURS = ("#111111", "#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d")
TOP_LOSS = 2.6  # of the fine-tuning pictures: what diverges leaves them

Curve = tuple[Sequence[float], Sequence[float]]  # xs, ys


def svg(title: str, curves: Mapping[str, Curve], x_name: str, top_loss: float, *, log_x: bool = False) -> str:
    """Loss over steps or bytes; losses above `top_loss` leave the picture."""
    place = math.log10 if log_x else float
    xs = [place(x) for at, _ in curves.values() for x in at]
    ys = [y for _, at in curves.values() for y in at if y <= top_loss]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), min(top_loss, max(ys))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + LEGEND}" height="{TOP + HEIGHT + 45}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="#f7f7f7"/>',
        f'<clipPath id="c"><rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/></clipPath>',
    ]
    for i in range(6):
        x, y = LEFT + WIDTH * i / 5, TOP + HEIGHT * i / 5
        value = x0 + (x1 - x0) * i / 5
        shown = f"{10**value:.2g}" if log_x else f"{value:.4g}"
        out.append(f'<text x="{x:.0f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{shown}</text>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{y1 - (y1 - y0) * i / 5:.3g}</text>')
    out.append(f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{escape(x_name)}</text>')
    for i, (name, (at, values)) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="4 3"' if i >= len(COLOURS) else ""
        points = " ".join(
            f"{LEFT + WIDTH * (place(x) - x0) / (x1 - x0):.1f},{TOP + HEIGHT * (y1 - y) / (y1 - y0):.1f}"
            for x, y in zip(at, values, strict=True)
        )
        out.append(
            f'<polyline clip-path="url(#c)" points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"{dash}/>'
        )
        y = TOP + 12 + 16 * i
        out.append(f'<path d="M{LEFT + WIDTH + 10} {y - 4}h18" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{LEFT + WIDTH + 32}" y="{y}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def finetuning() -> dict[str, small.Result]:
    """The first seed of every codec that has run, by the bytes it takes, dense first."""
    found = {c: r for c in dict.fromkeys(c for c, _ in runs.RUNS) if (r := runs.held(c, runs.SEEDS[0])) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1].ratio))


def write(folder: Path = record.RESULTS) -> Iterator[Path]:
    """Writes every picture there are results for."""
    named = {f"{c} ({r.ratio:.1f}x)": r for c, r in finetuning().items()}
    if named:
        steps = {n: (range(len(r.curve)), record.smooth(r.curve)) for n, r in named.items()}
        sent = {n: (r.sent, record.smooth(r.curve)) for n, r in named.items()}
        what = "fine-tuning the byte GPT-2, training loss (nats per byte)"
        yield _kept(folder / "adatopk_loss_steps.svg", svg(f"{what} against steps", steps, "step", TOP_LOSS))
        yield _kept(
            folder / "adatopk_loss_bytes.svg",
            svg(
                f"{what} against true bytes", sent, "bytes sent over three cuts, both directions", TOP_LOSS, log_x=True
            ),
        )
    both = {"dense": soak.held("none", soak.SEEDS[0]), "default policy": soak.held("adatopk", soak.SEEDS[0])}
    known = {n: r for n, r in both.items() if r is not None}
    if len(known) == len(both):
        thin = {n: (r, record.smooth(r.curve)[::10] if r.every == 1 else r.curve) for n, r in known.items()}
        curves = {n: (range(0, 10 * len(c), 10), c) for n, (_, c) in thin.items()}
        over = {n: (r.sent[:: 10 // r.every], c) for n, (r, c) in thin.items()}
        what = f"{soak.STEPS} steps from scratch on two sites, training loss"
        yield _kept(folder / "adatopk_scratch_steps.svg", svg(f"{what} against steps", curves, "step", 6.0))
        yield _kept(
            folder / "adatopk_scratch_bytes.svg", svg(f"{what} against bytes", over, "bytes sent", 6.0, log_x=True)
        )


def _kept(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def main() -> int:
    for path in write():
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

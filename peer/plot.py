"""A curve as text: braille cells of 2 x 4 dots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille cell


def curve(xs: Sequence[float], ys: Sequence[float], *, width: int = 72, height: int = 12, label: str = "") -> str:
    """`ys` over `xs` in width x height cells, with the ranges at the margins; "" for fewer than two finite points."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if abs(y) < float("inf")]
    if len(points) < 2:
        return ""
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    cells = [[0] * width for _ in range(height)]
    for (xa, ya), (xb, yb) in pairwise(points):
        columns = (xb - xa) / ((x1 - x0) or 1) * (2 * width - 1)
        dots = max(1, int(columns))
        for i in range(dots + 1):  # a line to the next point, a dot per column
            x, y = xa + (xb - xa) * i / dots, ya + (yb - ya) * i / dots
            column = int((x - x0) / ((x1 - x0) or 1) * (2 * width - 1))
            row = int((y1 - y) / ((y1 - y0) or 1) * (4 * height - 1))
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    margins = [f"{y1:8.3f} ", *[" " * 9] * (height - 2), f"{y0:8.3f} "] if height > 1 else [f"{y1:8.3f} "]
    lines = [margin + "│" + "".join(chr(0x2800 + c) for c in row) for margin, row in zip(margins, cells, strict=True)]
    axis = f"{x0:g}".ljust(width - len(f"{x1:g}")) + f"{x1:g}"
    return "\n".join(([f"{' ' * 10}{label}"] if label else []) + [*lines, " " * 9 + "└" + "─" * width, " " * 10 + axis])


def spark(ys: Sequence[float], width: int = 40) -> str:
    """The last `width` values as one line of bars."""
    tail = [y for y in ys if abs(y) < float("inf")][-width:]
    if not tail:
        return ""
    low, high = min(tail), max(tail)
    return "".join("▁▂▃▄▅▆▇█"[int((y - low) / ((high - low) or 1) * 7)] for y in tail)

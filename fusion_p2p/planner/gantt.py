"""A schedule as an SVG picture: one row per stage, forwards blue, backwards orange, sends as thin bars below."""

from __future__ import annotations

from xml.sax.saxutils import escape

from fusion_p2p.planner.proposal import Proposal

WIDTH, ROW, LEFT, TOP = 1200, 26, 150, 40
COLOURS = {"F": "#4c78a8", "B": "#f58518"}


def svg(p: Proposal) -> str:
    """The simulated step of a proposal, times in seconds from its start."""
    s = p.schedule
    height: float = TOP + ROW * s.stages + 30
    scale = WIDTH / s.step_s
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16">{escape(p.workload.name)} on {escape(p.network.name)}: {s.stages} stages, '
        f"{p.costs.m} micro-batches, {s.step_s:.3f} s a step (at best {p.lower_bound_s:.3f} s)</text>",
    ]
    for k, h in enumerate(p.chain.hosts):
        top = TOP + ROW * k
        busy = s.busy_s(k) / s.step_s
        out.append(f'<text x="4" y="{top + 14}">{k} {escape(p.network.devices[h].name)} {busy:.0%}</text>')
        out.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW - 4}" fill="#f2f2f2"/>')
    for span in s.spans:
        x, w = LEFT + span.start_s * scale, max(0.3, (span.end_s - span.start_s) * scale)
        y, bar = float(TOP + ROW * span.stage), ROW - 10.0
        if span.to is not None:
            y, bar = y + ROW - 9, 4.0
        what = "computes" if span.to is None else f"sends to stage {span.to}"
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{bar}" fill="{COLOURS[span.kind]}">'
            f"<title>stage {span.stage} {what}, micro-batch {span.micro_batch} {span.kind}, "
            f"{span.start_s:.4f}-{span.end_s:.4f} s</title></rect>"
        )
    for i in range(11):
        x = LEFT + WIDTH * i / 10
        out.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{s.step_s * i / 10:.3g} s</text>')
    return "\n".join([*out, "</svg>"]) + "\n"

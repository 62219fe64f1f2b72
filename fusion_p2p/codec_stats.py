"""The ladder as a running job measures it: true bytes and time of the codecs in use (DESIGN section 6). Pure.

What a codec costs in loss is not seen while training goes on; the probe's or the constant ladder's figure stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from fusion_p2p.adatopk import pareto
from fusion_p2p.frame import TickReport
from fusion_p2p.plan import LinkCodec
from fusion_p2p.planner.ladder import DENSE, Ladder, Rung

FORGET = 0.9  # weight of what was known, per training step
LEAST_STEPS = 8  # before a codec's figures count


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one codec over the last steps: bytes over dense float32 bytes of the larger direction; seconds per element
    that one end spends, encoding one direction and decoding the other."""

    steps: int
    byte_share: float
    seconds_per_element: float


class CodecStats:
    """Exponentially weighted figures of each codec that links use."""

    def __init__(self) -> None:
        self._figures: dict[str, CodecFigures] = {}

    def take(self, reports: Mapping[int, TickReport], codecs: tuple[LinkCodec, ...]) -> None:
        """One training tick's reports, by stage, under the codecs in force."""
        names = {(c.src, c.dst): c.codec for c in codecs}
        sums: dict[tuple[str, bool], list[float]] = {}  # (codec, forward) -> bytes, elements, seconds
        for stage, report in reports.items():
            for cut in report.cuts:
                name = names.get((cut.src, cut.dst))
                if name is not None:
                    total = sums.setdefault((name, cut.src == stage), [0.0, 0.0, 0.0])
                    for i, x in enumerate((cut.sent_bytes, cut.elements, cut.codec_s)):
                        total[i] += x
        for name in {name for name, _ in sums}:
            ends = [sums[name, forward] for forward in (True, False) if sums.get((name, forward), [0, 0])[1] > 0]
            if ends:
                self._add(name, max(b / (4 * n) for b, n, _ in ends), max(s / n for _, n, s in ends))

    def figures(self) -> dict[str, CodecFigures]:
        """Of the codecs seen for long enough."""
        return {name: f for name, f in self._figures.items() if f.steps >= LEAST_STEPS}

    def _add(self, name: str, share: float, seconds: float) -> None:
        old = self._figures.get(name)
        if old is None:
            self._figures[name] = CodecFigures(steps=1, byte_share=share, seconds_per_element=seconds)
            return
        self._figures[name] = CodecFigures(
            steps=old.steps + 1,
            byte_share=FORGET * old.byte_share + (1 - FORGET) * share,
            seconds_per_element=FORGET * old.seconds_per_element + (1 - FORGET) * seconds,
        )


def refreshed(ladder: Ladder, seen: Mapping[str, CodecFigures]) -> Ladder:
    """The ladder with what was measured in place of what was thought; rungs not in use take the times of a device that
    is as much slower or faster as those in use show."""
    known = {r.codec: r for r in ladder.rungs}
    ratios = [
        f.seconds_per_element / _seconds(known[name])
        for name, f in seen.items()
        if name in known and _seconds(known[name]) > 0 and f.seconds_per_element > 0
    ]
    speed = statistics.median(ratios) if ratios else 1.0
    rungs = []
    for r in ladder.rungs:
        f = seen.get(r.codec)
        encode, decode, share = r.encode_s_per_element * speed, r.decode_s_per_element * speed, r.byte_share
        if f is not None and f.seconds_per_element > 0:
            part = r.encode_s_per_element / _seconds(r) if _seconds(r) > 0 else 0.5
            encode, decode = f.seconds_per_element * part, f.seconds_per_element * (1 - part)
        if f is not None:
            share = f.byte_share
        if r.codec != DENSE.codec and share < 1.0:
            rungs.append(Rung(r.codec, share, encode, decode, r.loss_cost))
    return replace(pareto(rungs, ladder.tau), in_use=bool(ratios))


def short_of(ladder: Ladder, codec: str) -> Ladder:
    """The rungs before `codec`: what is left once the gate has stepped back from it. All, if it is not on it."""
    names = [r.codec for r in ladder.rungs]
    return replace(ladder, rungs=ladder.rungs[: max(1, names.index(codec))], dearer=()) if codec in names else ladder


def _seconds(rung: Rung) -> float:
    return rung.encode_s_per_element + rung.decode_s_per_element

"""AdaTopK: which codec each link of a plan uses and why (FusionLLM section 5; DESIGN section 6), and the gate over it.

Everything here only proposes: what holds is an entry of the numeric log, from a named step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from fusion_p2p.codec import Codec, Direction, parse
from fusion_p2p.errors import InputError
from fusion_p2p.frame import TickReport
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.planner.ladder import DENSE, MOST_LOSS, Ladder, Rung, beyond, default_ladder, top_k, within

PAPER_FACTOR = 3.0  # an index and a value take three times the value: the published ratio makes up for it


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of stages and what a micro-batch sends between them; rates are the lower of both ends' figures."""

    src: int
    dst: int
    elements: int
    dense_bytes: int
    forward_bytes_per_s: float
    backward_bytes_per_s: float

    @property
    def dense_s(self) -> float:
        """Seconds of the slower direction, uncompressed."""
        return self.dense_bytes / min(self.forward_bytes_per_s, self.backward_bytes_per_s)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The codec of a pair of stages; `transfer_s` of the slower direction, `codec_s` at both ends, per micro-batch."""

    src: int
    dst: int
    rung: Rung
    dense_s: float
    transfer_s: float
    codec_s: float
    reason: str

    @property
    def link_codec(self) -> LinkCodec:
        return LinkCodec(self.src, self.dst, self.rung.codec)


def pareto(rungs: Sequence[Rung], tau: float = 0.25) -> Ladder:
    """The rungs worth having, dense first: each costs more loss than the one before and sends fewer bytes."""
    kept: list[Rung] = []
    for rung in sorted((DENSE, *rungs), key=lambda r: (r.loss_cost, r.byte_share)):
        if not kept or rung.byte_share < kept[-1].byte_share:
            kept.append(rung)
    if kept[0].codec != DENSE.codec:  # a codec that costs nothing comes after dense, which takes no time
        kept.insert(0, DENSE)
    return Ladder(tuple(kept), tau)


def allowed_loss(compression: str) -> float | None:
    """What "adatopk" (MOST_LOSS) or "adatopk:PERCENT" lets codecs cost of the loss; None for every other rule."""
    kind, colon, percent = compression.partition(":")
    if kind != "adatopk":
        return None
    try:
        allowed = float(percent) / 100 if colon else MOST_LOSS
    except ValueError:
        allowed = math.nan
    if not 0 <= allowed <= 10:
        raise InputError(f"compression {compression!r} is none; write adatopk, or adatopk:8 to allow 8% of the loss")
    return allowed


def ladder_of(compression: str, measured: Ladder | None = None, tau: float = 0.25) -> Ladder:
    """The ladder that plans under `compression` choose from: "adatopk", "adatopk:PERCENT", "none", "topk:RATIO" or a
    codec's name.

    "adatopk-paper" plans with dense links; its ratios follow from the finished plan (`choose`).
    """
    allowed = allowed_loss(compression)
    if allowed is not None:
        return replace(within(measured or default_ladder(), allowed), tau=tau)
    if compression in ("none", "adatopk-paper"):
        return Ladder((DENSE,), tau)
    return Ladder((_uniform(compression),), tau)


def _uniform(compression: str) -> Rung:
    kind, _, arg = compression.partition(":")
    try:
        codec = parse(compression)
        if kind == "topk":
            return top_k(float(arg) if float(arg) > 1 else 1 / float(arg))
    except InputError as error:
        raise InputError(
            f"compression {compression!r} is unknown ({error}); use adatopk, adatopk:PERCENT, adatopk-paper, "
            "topk:RATIO, none or a codec"
        ) from None
    return Rung(codec.name, byte_share(codec, (1024, 1024)))


def byte_share(codec: Codec, shape: tuple[int, ...]) -> float:
    """Expected bytes over dense float32 bytes, of the larger direction: links are full duplex."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    return max(codec.bytes_estimate(shape, torch.float32, d) for d in directions) / (4 * math.prod(shape))


def choose(
    compression: str,
    links: Sequence[LinkLoad],
    stage_s: Sequence[float],
    ladder: Ladder | None = None,
    paper_ratio: float = 100.0,
) -> tuple[Choice, ...]:
    """A codec for every link of a plan whose stages take `stage_s` seconds a micro-batch (forward and backward).

    adatopk: a link takes the rung of least loss whose transfer is at most `tau` of the bottleneck, else the most
    compressing of those in the loss allowed; but none that costs as much of the loss as another that is through sooner,
    its own time at both ends counted. Codec time may itself become the bottleneck.
    """
    if compression == "adatopk-paper":
        return _paper(links, paper_ratio)
    ladder = ladder or ladder_of(compression)
    bottleneck_s = max(stage_s, default=0.0)
    while True:
        choices = tuple(_pick(link, ladder, bottleneck_s) for link in links)
        busy = list(stage_s)
        for c in choices:
            busy[c.src] += c.codec_s
            busy[c.dst] += c.codec_s
        slowest = max([*busy, *(c.transfer_s for c in choices)], default=0.0)
        if slowest <= bottleneck_s * (1 + 1e-9) or len(ladder.rungs) == 1:
            return choices
        bottleneck_s = slowest


def _pick(link: LinkLoad, ladder: Ladder, bottleneck_s: float) -> Choice:
    limit_s = ladder.tau * bottleneck_s
    fit = [r for r in ladder.rungs if r.byte_share * link.dense_s <= limit_s * (1 + 1e-12)]
    asked = min(fit, key=lambda r: (r.loss_cost, -r.byte_share)) if fit else ladder.rungs[-1]
    rung = min((r for r in ladder.rungs if r.loss_cost <= asked.loss_cost), key=lambda r: _through_s(link, r))
    if _through_s(link, rung) >= _through_s(link, asked):
        rung = asked
    transfer_s = rung.byte_share * link.dense_s
    if len(ladder.rungs) == 1:
        why = "the same codec everywhere"
    elif rung is not asked:
        why = f"{asked.codec} would send less and take {_through_s(link, asked):.3g} s, its own time counted"
    elif rung is ladder.rungs[0]:
        why = f"dense fits {limit_s:.3g} s ({ladder.tau:g} of the bottleneck)"
    elif fit:
        why = f"dense would take {link.dense_s:.3g} s, {limit_s:.3g} s allowed ({ladder.tau:g} of the bottleneck)"
    else:
        more = beyond(ladder, link.dense_s, limit_s)
        among = "in the loss allowed fits" if more else "fits"
        why = f"no codec {among} {limit_s:.3g} s ({ladder.tau:g} of the bottleneck)" + (f"; {more}" if more else "")
    return _choice(link, rung, f"{transfer_s:.3g} s; {why}")


def _through_s(link: LinkLoad, rung: Rung) -> float:
    """From one stage to the other: encoded, sent, decoded."""
    return rung.byte_share * link.dense_s + _codec_s(link, rung)


def _codec_s(link: LinkLoad, rung: Rung) -> float:
    """At either end, which encodes in one direction and decodes in the other."""
    return (rung.encode_s_per_element + rung.decode_s_per_element) * link.elements


def _paper(links: Sequence[LinkLoad], ratio: float) -> tuple[Choice, ...]:
    """The published rule: plain Top-K, ratio 3 r x (link's time over the slowest link's), dense below ratio 1."""
    slowest_s = max((link.dense_s for link in links), default=1.0)
    out = []
    for link in links:
        r = PAPER_FACTOR * ratio * link.dense_s / slowest_s
        rung = top_k(r) if r > PAPER_FACTOR else DENSE
        out.append(_choice(link, rung, f"{link.dense_s / slowest_s:.3g} of the slowest link's time"))
    return tuple(out)


def _choice(link: LinkLoad, rung: Rung, why: str) -> Choice:
    return Choice(
        src=link.src,
        dst=link.dst,
        rung=rung,
        dense_s=link.dense_s,
        transfer_s=rung.byte_share * link.dense_s,
        codec_s=_codec_s(link, rung),
        reason=f"link {link.src}-{link.dst}: {rung.codec}, {why}",
    )


# --- the stability gate

Pair = tuple[int, int]  # stages src < dst


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step as the stages report it: the loss; per pair of stages the largest root mean square of an
    activation, and the gradient's bias `<g, decoded> / <g, g> - 1` (logged; it triggers nothing)."""

    step: int
    loss: float
    norms: dict[Pair, float] = {}
    biases: dict[Pair, float] = {}


class GateRules(msgspec.Struct, frozen=True, kw_only=True):
    """`window` steps must agree before the gate acts, so one odd batch does nothing. Before step `settle` norms grow in
    any run (threefold in 50 steps from scratch, measured), so none is compared with what it was then."""

    growth: float = 2.0  # of a norm over its dense reference
    loss_jump: float = 1.2  # of the window's median loss over the median of the `memory` steps before it
    window: int = 5
    memory: int = 50
    settle: int = 100


class Finding(msgspec.Struct, frozen=True):
    """`link` None: the loss, so every compressed link."""

    step: int
    link: Pair | None
    reason: str


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Numerics that ought to hold from the next complete set after `step` on, and why."""

    step: int
    numerics: Numerics
    reason: str


def observe(step: int, loss: float, reports: Mapping[int, TickReport]) -> Observation:
    """A training tick's reports, by stage, as the gate sees them; each figure from the end that knows it."""
    norms = {(c.src, c.dst): c.rms for stage, r in reports.items() for c in r.cuts if c.src == stage}
    biases = {(c.src, c.dst): c.bias for stage, r in reports.items() for c in r.cuts if c.dst == stage}
    return Observation(step=step, loss=loss, norms=norms, biases=biases)


def gate(
    observations: Sequence[Observation],
    since_step: int,
    compressed: Collection[Pair],
    dense_norms: Mapping[Pair, float],
    rules: GateRules | None = None,
) -> tuple[Finding, ...]:
    """What is wrong at the last of `observations` (ascending steps); a pure function of step-numbered figures.

    `since_step`: the first step of the log entry in force; steps before it do not count. `dense_norms`: a pair's norm
    without compression, as the last dense steps saw it; where there were none, its own norm `memory` steps before
    stands for it: growth without bound shows, the slow growth of any training does not.
    """
    rules = rules or GateRules()
    seen = [o for o in observations if o.step >= since_step]
    if len(seen) < rules.window:
        return ()
    recent, before = seen[-rules.window :], seen[: -rules.window][-rules.memory :]
    last, found = recent[-1].step, []
    for pair in sorted(compressed):
        settled = len(before) == rules.memory and before[0].step >= rules.settle
        own = _least(before[: rules.window], pair) if settled else 0.0
        reference, what = (dense_norms[pair], "the dense one") if pair in dense_norms else (own, "that before")
        least = _least(recent, pair)
        if reference > 0 and not least <= rules.growth * reference:  # NaN counts as growth
            times = f"{least / reference:.1f} times {what}, {reference:.3g}"
            found.append(Finding(last, pair, f"activation norm of {pair[0]}-{pair[1]} is {least:.3g}, {times}"))
    if compressed and len(before) >= rules.window:
        now, then = (statistics.median(o.loss for o in part) for part in (recent, before))
        if not now <= then * rules.loss_jump:
            found.append(Finding(last, None, f"loss jumped from {then:.4g} to {now:.4g}"))
    return tuple(found)


def _least(observations: Sequence[Observation], pair: Pair) -> float:
    """The smallest norm of a pair; 0 if one step does not tell, NaN if none is a number."""
    norms = [o.norms.get(pair, 0.0) for o in observations]
    return min((n for n in norms if n == n), default=math.nan)


def step_back(ladder: Ladder, codec: str) -> str:
    """The rung before `codec` on the ladder; dense before the first and for a codec that is not on it."""
    names = [r.codec for r in ladder.rungs]
    return names[max(names.index(codec) - 1, 0)] if codec in names else DENSE.codec


def respond(numerics: Numerics, findings: Sequence[Finding], ladder: Ladder) -> Proposal | None:
    """The proposal that steps the named links back by one rung; None when there is nothing to do."""
    everywhere = any(f.link is None for f in findings)
    hit = {f.link for f in findings}
    codecs = tuple(
        msgspec.structs.replace(c, codec=step_back(ladder, c.codec)) if everywhere or (c.src, c.dst) in hit else c
        for c in numerics.codecs
    )
    if codecs == numerics.codecs:
        return None
    changed = ", ".join(
        f"link {a.src}-{a.dst} {a.codec} to {b.codec}" for a, b in zip(numerics.codecs, codecs, strict=True) if a != b
    )
    kept = tuple(c for c in codecs if c.codec != DENSE.codec)  # dense is not said
    why = "; ".join(f.reason for f in findings)
    step = max(f.step for f in findings)
    return Proposal(step=step, numerics=msgspec.structs.replace(numerics, codecs=kept), reason=f"{changed}: {why}")

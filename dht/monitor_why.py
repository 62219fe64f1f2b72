"""Why is this run slow? Names the stage or link that bounds the step, by the owner's published figures.

A pipeline's step is as long as its busiest part: the stage that computes longest, or the link whose sender is held up
longest. Whatever the others do meanwhile is waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from dht.monitor_views import LinkInfo, StageInfo


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` "balanced": nothing stands out; "unknown": the run publishes too little to say. `share` of the step."""

    kind: Literal["stage", "link", "balanced", "unknown"]
    text: str
    advice: str
    stage: int | None = None
    src: int | None = None
    dst: int | None = None
    share: float | None = None


def bottleneck(
    stages: Sequence[StageInfo], links: Sequence[LinkInfo], step_s: float | None, flops: Mapping[str, float]
) -> Why:
    """The bound of a training run. `flops`: FLOP/s by peer."""
    timed = [s for s in stages if s.compute_s is not None]
    if not timed or not step_s:
        return _by_waits(stages)
    slowest = max(timed, key=lambda s: s.compute_s or 0.0)
    held = max(timed, key=lambda s: s.send_s or 0.0)
    compute, send = slowest.compute_s or 0.0, held.send_s or 0.0
    if send > compute:
        return _slow_link(held.stage, send, step_s, links)
    typical = statistics.median([s.compute_s or 0.0 for s in timed])
    share = min(1.0, compute / step_s)
    if len(timed) > 1 and compute > 1.25 * typical:
        own = flops.get(slowest.peer)
        best = max((f for peer, f in flops.items() if peer not in {s.peer for s in stages}), default=0.0)
        advice = "move work from it to its neighbours"
        if own and best > 1.2 * own:
            advice = f"a free peer is {best / own:.1f} times as fast: move the stage there"
        text = (
            f"stage {slowest.stage} computes {compute:.3g} s of a {step_s:.3g} s step, "
            f"{compute / max(typical, 1e-9):.1f} times as long as the middle stage"
        )
        return Why(kind="stage", text=text, advice=advice, stage=slowest.stage, share=share)
    if share < 0.4:
        return Why(
            kind="balanced", share=share, stage=slowest.stage,
            text=f"no stage computes longer than {share:.0%} of the step: micro-batches wait for each other",
            advice="more micro-batches a step, or fewer stages, fill the pipeline",
        )  # fmt: skip
    return Why(
        kind="balanced", share=share, stage=slowest.stage,
        text=f"the stages are even; the busiest, {slowest.stage}, computes {share:.0%} of the step",
        advice="faster or more peers; nothing single holds the run up",
    )  # fmt: skip


def _slow_link(src: int, send_s: float, step_s: float, links: Sequence[LinkInfo]) -> Why:
    out = [k for k in links if k.src == src and k.bytes_per_step]
    widest = max(out, key=lambda k: k.bytes_per_step or 0) if out else None
    if widest is None:
        text = f"stage {src} is held up {send_s:.3g} s of a {step_s:.3g} s step while it sends"
        return Why(kind="link", text=text, advice="compress its links more", src=src, share=min(1.0, send_s / step_s))
    codec = widest.codec or "dense"
    advice = (
        f"its codec is {codec}: a smaller one would help most"
        if codec != "dense"
        else 'it is not compressed: compression = "adatopk" would help most'
    )
    text = f"link {widest.src} to {widest.dst} holds stage {src} up {send_s:.3g} s of a {step_s:.3g} s step"
    return Why(kind="link", text=text, advice=advice, src=src, dst=widest.dst, share=min(1.0, send_s / step_s))


def _by_waits(stages: Sequence[StageInfo]) -> Why:
    """Without times: the one stage that waits for nobody while the others do."""
    busy = [s for s in stages if s.waiting_for is None]
    if len(stages) > 2 and len(busy) == 1:
        text = (
            f"every stage waits but stage {busy[0].stage} (a guess from one moment; the run publishes no stage times)"
        )
        return Why(kind="stage", text=text, advice="see what its peer does", stage=busy[0].stage)
    return Why(kind="unknown", text="the run publishes no stage times yet", advice="wait for a few steps")

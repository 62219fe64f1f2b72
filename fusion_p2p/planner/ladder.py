"""The codecs a plan may choose between: true bytes, time at both ends, cost in loss. Constants until AdaTopK measures.

FusionLLM section 5 (AdaTopK) with DESIGN section 6: a hop is compressed only as far as `tau` of the bottleneck asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion_p2p.errors import InputError


@dataclass(frozen=True)
class Rung:
    """One codec. `byte_share` is its bytes over dense bytes; times are per element of the dense tensor."""

    codec: str  # as in fusion_p2p.codec.parse
    byte_share: float
    encode_s_per_element: float = 0.0  # at the sender
    decode_s_per_element: float = 0.0  # at the receiver
    loss_cost: float = 0.0  # relative increase of the loss, measured or prior


DENSE = Rung("dense", 1.0)


@dataclass(frozen=True)
class Ladder:
    """`rungs` from the least to the most compressing. A hop takes the first whose transfer is at most `tau` of the
    bottleneck, else the last. One rung: every hop is compressed alike (`tau` is then without effect). `dearer`: what
    would send fewer bytes still, but costs more of the loss than the run allows; it is told, never taken. `in_use`: the
    times are of a run's own devices at work."""

    rungs: tuple[Rung, ...]
    tau: float = 0.25
    dearer: tuple[Rung, ...] = ()
    in_use: bool = False

    def __post_init__(self) -> None:
        shares = [r.byte_share for r in self.rungs]
        if not self.rungs or shares != sorted(shares, reverse=True) or shares[-1] <= 0:
            raise InputError(f"a ladder needs rungs with falling, positive byte shares, not {shares}")
        if not 0 < self.tau <= 1:
            raise InputError(f"tau = {self.tau} must lie in (0, 1]")


def top_k(ratio: float) -> Rung:
    """Top-K of the shipped time model: keeps 1/ratio, fp16 value and int32 index, 0.3 ns per element to select."""
    return Rung(f"topk:{1 / ratio:.6g}", 3.0 / ratio, 0.3e-9)


def uniform_top_k(ratio: float = 100.0) -> Ladder:
    return Ladder((top_k(ratio),))


def top_k_ladder(max_ratio: float = 100.0, tau: float = 0.25) -> Ladder:
    """Dense, then Top-K at ratios 4 to `max_ratio` in steps of a quarter octave."""
    ratios = [4.0]
    while ratios[-1] * 2**0.25 < max_ratio:
        ratios.append(ratios[-1] * 2**0.25)
    return Ladder((DENSE, *(top_k(r) for r in ratios), top_k(max_ratio)), tau)


# What compression may cost of the loss, all cuts together, unless a run says otherwise. A codec pays if the steps it
# saves are worth more: half the steps cost the small GPT-2 4 to 12% from scratch (codec/README.md). The next rung costs
# 8% for 1.7 times fewer bytes.
MOST_LOSS = 0.02


def within(ladder: Ladder, most_loss: float) -> Ladder:
    """The rungs that cost at most `most_loss`; the others become `dearer`."""
    rungs = (*ladder.rungs, *ladder.dearer)
    kept = tuple(r for r in rungs if r.loss_cost <= most_loss)
    return replace(ladder, rungs=kept, dearer=tuple(r for r in rungs if r.loss_cost > most_loss))


def slowed(ladder: Ladder, factor: float) -> Ladder:
    """The ladder on devices that take `factor` times as long."""
    return _each(
        ladder,
        lambda r: replace(
            r,
            encode_s_per_element=r.encode_s_per_element * factor,
            decode_s_per_element=r.decode_s_per_element * factor,
        ),
    )


def carried(ladder: Ladder, s_per_byte: float, bytes_per_element: float) -> Ladder:
    """The ladder with what frames' bytes cost the processors that carry them, as in `carrying`."""
    return _each(ladder, lambda r: carrying(r, s_per_byte, bytes_per_element))


def carrying(rung: Rung, s_per_byte: float, bytes_per_element: float) -> Rung:
    """The rung where a frame's bytes keep the stage's own processor busy too, `s_per_byte` at either end: dense frames
    of `bytes_per_element` the most."""
    each = rung.byte_share * bytes_per_element * s_per_byte
    return replace(
        rung,
        encode_s_per_element=rung.encode_s_per_element + each,
        decode_s_per_element=rung.decode_s_per_element + each,
    )


def _each(ladder: Ladder, change: Callable[[Rung], Rung]) -> Ladder:
    return replace(ladder, rungs=tuple(map(change, ladder.rungs)), dearer=tuple(map(change, ladder.dearer)))


def beyond(ladder: Ladder, dense_s: float, limit_s: float) -> str:
    """For a link whose last rung takes longer than `limit_s`: which dearer one would fit, or come nearest, and how to
    allow it; "" where there is none."""
    if not ladder.dearer:
        return ""
    rung = next((r for r in ladder.dearer if r.byte_share * dense_s <= limit_s), ladder.dearer[-1])
    cost = 100 * rung.loss_cost
    return (
        f"{rung.codec} would take {rung.byte_share * dense_s:.3g} s and cost {cost:.3g}% of the loss "
        f"(compression adatopk:{math.ceil(cost)} allows it)"
    )


def default_ladder(tau: float = 0.25, wire_bytes_per_element: float = 4.0, most_loss: float = MOST_LOSS) -> Ladder:
    """The constant ladder of a live run, relative to dense frames of `wire_bytes_per_element`, up to `most_loss`. A
    link too slow for the last of them is slow; a plan goes round it, or waits for it.

    Measured by `tests.bench.adatopk`: one core at width 128, the larger direction's bytes, held-out loss of the
    fine-tuned byte GPT-2 (fusion_p2p/codec/README.md; below 0.01% it is lost in the noise). `fusion_p2p.probe` measures
    the model at hand.
    """
    e = wire_bytes_per_element
    rungs = (
        Rung("dense:bf16", 2.0 / e, 0.5e-9, 0.5e-9, 0.00001),
        Rung("int8", 1.03 / e, 1.0e-9, 1.0e-9, 0.0001),
        Rung("transform:4/4", 0.55 / e, 8.0e-9, 6.0e-9, 0.0002),
        Rung("transform:3/2", 0.42 / e, 8.0e-9, 6.0e-9, 0.001),
        Rung("transform:2/1", 0.28 / e, 8.0e-9, 6.0e-9, 0.006),
        Rung("transform:1/1", 0.145 / e, 8.0e-9, 6.0e-9, 0.0144),
        Rung("transform:0.5/0.5", 0.085 / e, 8.0e-9, 6.0e-9, 0.082),
        Rung("topk-masked:0.01", 0.016 / e, 1.5e-9, 0.7e-9, 0.57),
    )
    return within(Ladder((DENSE, *(r for r in rungs if r.byte_share < 1.0)), tau), most_loss)

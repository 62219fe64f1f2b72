"""The bytes/loss ladder of the model at hand, by a short paired probe at the start of a run (DESIGN section 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fusion_p2p.adatopk import pareto
from fusion_p2p.capture import Captured
from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.errors import InputError
from fusion_p2p.frame import Frame, Kind
from fusion_p2p.opset import dtype_of
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec
from fusion_p2p.planner.ladder import DENSE, Ladder, Rung, default_ladder
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.workload import Atom, atoms

PRIOR_STEPS = 20.0  # a probe of as many steps counts as much as the ladder measured on the small GPT-2
ROUNDS = 5  # in which a codec is timed
CODED = 1.3  # of a dense step's time that a step with a codec takes, about
_KEY = FrameKey(seed=0, step=0, micro_batch=0, value=0)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One codec on this model. Bytes are per micro-batch over all cuts, as sent, axes and bases included; times are
    per dense element, encode and decode of both directions over two; `error`: relative squared error of the
    activations; `loss_cost`: relative increase of the loss, prior included."""

    codec: str
    forward_bytes: float
    backward_bytes: float
    dense_bytes: float
    encode_s_per_element: float
    decode_s_per_element: float
    error: float
    loss_cost: float

    @property
    def ratio(self) -> float:
        """Dense over true bytes, both directions."""
        return 2 * self.dense_bytes / (self.forward_bytes + self.backward_bytes)

    @property
    def break_even_bytes_per_s(self) -> float:
        """On a slower link the codec saves time; infinite if it takes none."""
        saved = 2 - (self.forward_bytes + self.backward_bytes) / self.dense_bytes  # of two dense directions
        spent_s = 2 * (self.encode_s_per_element + self.decode_s_per_element) / 4
        return saved / spent_s if spent_s > 0 else math.inf

    @property
    def rung(self) -> Rung:
        """The larger direction counts, since links are full duplex."""
        share = max(self.forward_bytes, self.backward_bytes) / self.dense_bytes
        return Rung(self.codec, share, self.encode_s_per_element, self.decode_s_per_element, self.loss_cost)


@dataclass
class _Traffic:
    forward: int = 0
    backward: int = 0
    last: dict[tuple[Kind, int], bytes] | None = None

    def __call__(self, frame: Frame) -> None:
        if frame.kind is Kind.ACT:
            self.forward += len(frame.payload)
        elif frame.kind is Kind.GRAD:
            self.backward += len(frame.payload)
        if self.last is not None and frame.kind in (Kind.ACT, Kind.GRAD):
            self.last[frame.kind, frame.value] = frame.payload


def even_cuts(parts: Sequence[Atom], stages: int) -> tuple[int, ...]:
    """Cut positions for about equal work, at the cheapest place within a tenth of the whole around each."""
    work = [a.forward_flops + a.backward_flops for a in parts]
    before = [sum(work[:i]) for i in range(len(work) + 1)]
    cuts: list[int] = []
    for s in range(1, stages):
        target, slack = before[-1] * s / stages, before[-1] / 10
        near = [i for i in range((cuts or [0])[-1] + 1, len(parts)) if abs(before[i] - target) <= slack]
        if not near:
            raise InputError(f"the model has no {stages} parts of about equal work; ask for fewer stages")
        cuts.append(min(near, key=lambda i: (parts[i].cut_bytes + parts[i].cut_weight_bytes, abs(before[i] - target))))
    return tuple(cuts)


def probe(
    captured: Captured,
    batches: Sequence[Any],
    *,
    optimizer: OptimizerSpec,
    micro_batches: int,
    micro_batch_size: int,
    clock: Callable[[], float],
    cuts: Sequence[int] | None = None,
    codecs: Sequence[str] | None = None,
    seed: int = 0,
    limit_s: float = math.inf,
) -> tuple[Measured, ...]:
    """Trains a copy for one step per batch, dense and then with each codec at every cut, on the same batches.

    `cuts` None: three stages of equal work. `codecs` None: all that the default ladder knows. `clock` gives seconds.
    Nothing is measured if, from what the dense steps took, all codecs would take longer than `limit_s`.
    """
    if not batches:
        raise InputError("a probe got no batches; pass at least one")
    where = tuple(cuts) if cuts is not None else even_cuts(atoms(captured.opdag, micro_batch_size), 3)
    priors = {r.codec: r.loss_cost for r in default_ladder(most_loss=math.inf).rungs}
    names = list(codecs) if codecs is not None else [c for c in priors if c != DENSE.codec]

    def run(name: str, keep: bool = False) -> tuple[list[float], _Traffic]:
        traffic = _Traffic(last={} if keep else None)
        pairs = tuple(LinkCodec(a, b, name) for b in range(len(where) + 1) for a in range(b))
        pipeline = LocalPipeline(
            captured,
            optimizer=optimizer,
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            cuts=where,
            codecs=pairs,
            seed=seed,
            on_frame=traffic,
        )
        return [pipeline.train_step(b) for b in batches], traffic

    begun = clock()
    dense_losses, dense = run(DENSE.codec, keep=True)
    if (clock() - begun) * (1 + CODED * len(names)) > limit_s:
        return ()
    tensors = _tensors(captured, dense, micro_batch_size)
    frames = len(batches) * micro_batches
    out = []
    for name in names:
        losses, traffic = run(name)
        seen = sum(a / b - 1 for a, b in zip(losses, dense_losses, strict=True)) / len(losses)
        prior, weight = priors.get(name, max(seen, 0.0)), len(losses) / (len(losses) + PRIOR_STEPS)
        encode_s, decode_s, error = _timed(name, tensors, clock)
        out.append(
            Measured(
                codec=name,
                forward_bytes=traffic.forward / frames,
                backward_bytes=traffic.backward / frames,
                dense_bytes=dense.forward / frames,
                encode_s_per_element=encode_s,
                decode_s_per_element=decode_s,
                error=error,
                loss_cost=max(0.0, weight * seen + (1 - weight) * prior),
            )
        )
    return tuple(out)


def ladder(measured: Sequence[Measured], tau: float = 0.25) -> Ladder:
    """The rungs worth having of a probe."""
    return pareto([m.rung for m in measured if m.forward_bytes < m.dense_bytes], tau)


def _tensors(captured: Captured, dense: _Traffic, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(activation, gradient) of every cut's last micro-batch."""
    codec, found = parse("dense"), []
    for (kind, value), payload in (dense.last or {}).items():
        back = (dense.last or {}).get((Kind.GRAD, value))
        if kind is Kind.ACT and back:
            spec = captured.opdag.values[value]
            shape, dtype = spec.at(size), dtype_of(spec.dtype)
            if len(payload) != codec.bound(shape, dtype, "forward"):
                continue  # the last, smaller micro-batch
            x, aux = codec.decode_forward(payload, shape, dtype, _KEY)
            found.append((x, codec.decode_backward(back, shape, dtype, aux, _KEY)))
    if not found:
        raise InputError("the probe's last micro-batch is not a full one; pass batches of micro_batches x size samples")
    return found


def _timed(
    name: str, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], clock: Callable[[], float]
) -> tuple[float, float, float]:
    """(encode, decode seconds per element and direction, relative squared error), the best of ROUNDS rounds: the first
    also finds axes and warms up."""
    encode_s = decode_s = error = power = 0.0
    elements = 0
    for x, g in tensors:
        sender, receiver = parse(name), parse(name)
        shape, dtype, best = tuple(x.shape), x.dtype, [math.inf, math.inf]
        for m in range(ROUNDS):
            key = msgspec.structs.replace(_KEY, micro_batch=m)
            t0 = clock()
            payload, sent = sender.encode_forward(x, key)
            t1 = clock()
            y, got = receiver.decode_forward(payload, shape, dtype, key)
            t2 = clock()
            back = receiver.encode_backward(g, got, key)
            t3 = clock()
            sender.decode_backward(back, shape, dtype, sent, key)
            t4 = clock()
            best = [min(best[0], t1 - t0 + t3 - t2), min(best[1], t2 - t1 + t4 - t3)]
        encode_s, decode_s, elements = encode_s + best[0], decode_s + best[1], elements + 2 * x.numel()
        error += float((y.to(torch.float64) - x).square().sum())
        power += float(x.to(torch.float64).square().sum())
    return encode_s / elements, decode_s / elements, error / max(power, 1e-300)

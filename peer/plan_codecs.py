"""Which codec each pair of stages of a plan uses: AdaTopK's rule on what they exchange and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fusion_p2p.adatopk import Choice, LinkLoad, choose, ladder_of
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import dtype_of
from fusion_p2p.plan import LinkCodec
from fusion_p2p.planner import DENSE, Constraints, Ladder, Proposal, Rung, default_ladder
from fusion_p2p.planner.ladder import carried, carrying
from fusion_p2p.planner.opfence import Best, Searched
from fusion_p2p.planner.proposal import finish
from fusion_p2p.split import split
from fusion_p2p.workload import Atom

FRAME_BYTES = 4  # of a float on the wire, dense
# Of one end's processor, for a byte of a frame sent or received, p2pd's part included, on a core of those that the
# trainer's measurements are of: 3.1 ns in `tests.bench.netlab`'s data plane, 2.3 ns by stages of 0.2 core in its N3.
CARRY_S_PER_BYTE = 3e-9


@dataclass(frozen=True, slots=True)
class Channel:
    """Floating-point values that a micro-batch sends from stage `src` to `dst`; as many gradients come back."""

    src: int
    dst: int
    elements: int


def channels_of(dag: OpDag, cuts: tuple[int, ...], micro_batch_size: int) -> tuple[Channel, ...]:
    """Every pair of stages that exchanges floating-point frames, edges that pass over stages included."""
    elements: dict[tuple[int, int], int] = {}
    for program in split(dag, cuts):
        for e in program.edges_out:
            value = dag.values[e.value]
            if dtype_of(value.dtype).is_floating_point:
                key = e.src, e.dst
                elements[key] = elements.get(key, 0) + math.prod(value.at(micro_batch_size))
    return tuple(Channel(*pair, n) for pair, n in sorted(elements.items()))


def neighbours(atoms: Sequence[Atom], cuts: tuple[int, ...]) -> tuple[Channel, ...]:
    """The channels of a model without edges that pass over stages, from its atoms alone."""
    return tuple(Channel(k, k + 1, atoms[cut].cut_bytes // FRAME_BYTES) for k, cut in enumerate(cuts))


def choices(
    p: Proposal,
    channels: Sequence[Channel],
    compression: str,
    measured: Ladder | None = None,
    carry_s_per_byte: float = 0.0,
) -> tuple[Choice, ...]:
    """A codec for every channel of the proposal. `measured`: the ladder of "adatopk", None for the default."""
    hosts, rates = p.chain.hosts, p.network.bandwidth_bytes_per_s
    loads = [
        LinkLoad(
            src=c.src,
            dst=c.dst,
            elements=c.elements,
            dense_bytes=FRAME_BYTES * c.elements,
            forward_bytes_per_s=float(rates[hosts[c.src], hosts[c.dst]]),
            backward_bytes_per_s=float(rates[hosts[c.dst], hosts[c.src]]),
        )
        for c in channels
        if c.elements
    ]
    work, bounds = p.costs.work_s, p.chain.bounds(p.workload.atoms)
    seconds = [float(work[h, b] - work[h, a]) for h, (a, b) in zip(hosts, pairwise(bounds), strict=True)]
    return choose(compression, loads, seconds, carried(ladder_of(compression, measured), carry_s_per_byte, FRAME_BYTES))


def link_codecs(chosen: Sequence[Choice]) -> tuple[LinkCodec, ...]:
    """What the numerics say of them; dense is not said."""
    return tuple(c.link_codec for c in chosen if c.rung.codec != DENSE.codec)


def rungs_of(
    codecs: Sequence[LinkCodec], measured: Ladder | None = None, carry_s_per_byte: float = 0.0
) -> dict[tuple[int, int], Rung]:
    """What the planner counts for codecs that are given: figures as measured, the default ladder's, or bytes alone."""
    default = default_ladder(most_loss=math.inf).rungs
    known = {r.codec: r for r in (*default, *((*measured.rungs, *measured.dearer) if measured else ()))}
    return {
        (c.src, c.dst): carrying(known.get(c.codec) or ladder_of(c.codec).rungs[0], carry_s_per_byte, FRAME_BYTES)
        for c in codecs
    }


def with_rungs(p: Proposal, rungs: dict[tuple[int, int], Rung], carry_s_per_byte: float = 0.0) -> Proposal:
    """The same chain with these codecs between neighbours, dense where none is given, simulated again if they are
    others."""
    dense = carrying(DENSE, carry_s_per_byte, FRAME_BYTES)
    wanted = tuple(rungs.get((k, k + 1), dense) for k in range(len(p.chain.cuts)))
    if wanted == p.chain.rungs:
        return p
    chain = replace(p.chain, rungs=wanted)
    score = p.costs.score(chain)
    best = Best(chain, score, chain.hosts, score.bottleneck_s)
    return finish(p.costs, Searched([best], p.lower_bound_s, p.fences), Constraints())


def ladder_for(
    compression: str, given: Sequence[LinkCodec], measured: Ladder | None = None, carry_s_per_byte: float = 0.0
) -> Ladder:
    """What hosts are chosen under: `compression`'s ladder, or the one codec that the numerics fix for all links."""
    names = {c.codec for c in given}
    ladder = ladder_of(names.pop() if len(names) == 1 else compression, measured)
    return carried(ladder, carry_s_per_byte, FRAME_BYTES)

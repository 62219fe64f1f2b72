"""Who hosts what: the one door through which the trainer asks for a plan.

`make_plan` plans with OP-Fence (fusion_p2p.planner; DESIGN section 5) on what the swarm offers and measured, `revise`
until what trial steps took promises no better one; `rehost` has what becomes of a plan when peers are lost. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics, Plan, Prediction, StagePlacement
from fusion_p2p.planner import AtomTimes, Constraints, Ladder, Proposal, Workload, default_ladder, from_atoms
from fusion_p2p.planner.explain import choices as choices_of
from fusion_p2p.planner.ladder import slowed
from fusion_p2p.planner.opfence import Best, Searched
from fusion_p2p.planner.proposal import finish, make_costs
from fusion_p2p.settings import ADAMW_BYTES, StateBytes
from peer.offers import DeviceOffer, SwarmLinks, network_of, sources
from peer.plan_codecs import (
    CARRY_S_PER_BYTE,
    Channel,
    choices,
    ladder_for,
    link_codecs,
    neighbours,
    rungs_of,
    with_rungs,
)
from peer.plan_durability import interval, keepers
from peer.plan_hosts import OPFENCE, device_of, propose, propose_by
from peer.plan_rates import corrected, corrections, within
from peer.stage_load import Load, mib, stage_bytes

if TYPE_CHECKING:
    from fusion_p2p.workload import Atom


WRONG = 1.5  # measured over predicted stage time, either way, from which a device's rates are corrected
WORTH = 0.9  # of the predicted step time that another plan must reach to be worth placing again
MAX_TRIED = 3  # plans of which trial steps are run before a start
WORTH_S = 0.02  # of a step that it must save besides: the trial steps of tiny models tell no better


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """`state`: what the optimizer makes of each parameter.

    `stages` None: as many as pay, or one for `every_device`. `base` holds the numerics that the run fixes; its cuts
    and codecs are replaced unless `pinned`, in which case they stand and only hosts are chosen. Its device class may be
    "auto": the kind of devices that together compute fastest. `compression`: as in `adatopk.ladder_of`.
    `channels`: what stages exchange under given cuts; None: neighbours only.
    """

    base: Numerics
    stages: int | None = None
    every_device: bool = False
    pinned: bool = False
    compression: str = "adatopk"
    planner: str = "opfence"
    links: SwarmLinks = field(default_factory=SwarmLinks)
    channels: Callable[[tuple[int, ...]], Sequence[Channel]] | None = None
    state: StateBytes = ADAMW_BYTES
    number: int = 1
    epoch: int = 1
    mark_interval: int = 0  # steps between complete sets; 0: none is promised, so nothing is logged
    ladder: Ladder | None = None  # of "adatopk", as measured on the model; None: the default
    canary: bool = True  # devices without a trial step may be in the plan, for it is tried before it is in force
    shape: AtomTimes | None = None  # of the atoms on some one CPU: their proportions count; None: those of their FLOPs
    carry_s_per_byte: float = 0.0  # of a stage's own processor, for each byte of a frame that it sends or receives


def make_plan(atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest) -> Plan:
    """The plan of least predicted step time, on devices of the run's class. `atoms`: of one micro-batch.

    InputError, with figures, if there is no such device or memory does not suffice.
    """
    if not request.canary:
        offers = [o for o in offers if o.confirmed]
    if not offers:
        raise InputError("no volunteer offers a device; start one with: fusion-peer join ADDRESS")
    there = {o.device_class: 0.0 for o in offers}
    for o in offers:
        there[o.device_class] += o.flops_per_s
    wanted = request.base.device_class
    if wanted == "auto":
        wanted = max(sorted(there), key=lambda kind: there[kind])
        request = replace(request, base=msgspec.structs.replace(request.base, device_class=wanted))
    offers = [o for o in offers if o.device_class == wanted]
    if not offers:
        raise InputError(
            f"the run computes on {wanted}, the volunteers offer {', '.join(sorted(there))}; "
            f"set numerics.device_class, or start one with: fusion-peer join ADDRESS --device {wanted}"
        )
    if not atoms:
        raise InputError("the model has no operator to place")
    if request.stages is not None and not request.pinned and not 1 <= request.stages <= len(atoms):
        raise InputError(
            f"stages = {request.stages} is out of range; this model can be cut into 1 to {len(atoms)} stages"
        )
    base, request = request.base, _on_their_devices(atoms, offers, request)
    found = _propose(atoms, offers, request)
    if found is None:
        raise InputError(_shortage(atoms, offers, request))
    proposal, slots = found
    cuts, carry = proposal.chain.cuts, request.carry_s_per_byte
    if request.pinned:
        numerics, why = base, [f"link {c.src}-{c.dst}: {c.codec}, as the numeric log has it" for c in base.codecs]
        proposal = with_rungs(proposal, rungs_of(base.codecs, request.ladder, carry), carry)
    else:
        channels = request.channels(cuts) if request.channels is not None else neighbours(atoms, cuts)
        chosen = choices(proposal, channels, request.compression, request.ladder, carry)
        numerics = msgspec.structs.replace(base, cuts=cuts, codecs=link_codecs(chosen))
        why = [c.reason for c in chosen if c.link_codec in numerics.codecs]
        proposal = with_rungs(proposal, {(c.src, c.dst): c.rung for c in chosen}, carry)
    hosts = [slots[h] for h in proposal.chain.hosts]
    return _plan(atoms, offers, request, proposal, numerics, hosts, why)


def _on_their_devices(atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest) -> PlanRequest:
    """Codecs were timed where `shape` was, on the trainer's CPU, or the default's on one like it: they take as much
    longer here as the model does on the median device. So do frames' bytes, which a CPU carries beside its work."""
    if request.shape is None:
        return request
    here_s = float(request.shape.forward_s.sum() + request.shape.backward_s.sum())
    w = _workload(atoms, request)
    times = [d.atom_times(w) for d in network_of(offers, request.links).devices]
    factor = statistics.median(float(t.forward_s.sum() + t.backward_s.sum()) for t in times) / here_s
    ladder = request.ladder or default_ladder(most_loss=math.inf)
    return replace(
        request,
        ladder=ladder if ladder.in_use else slowed(ladder, factor),
        carry_s_per_byte=0.0 if request.base.device_class == "cuda" else CARRY_S_PER_BYTE * factor,
    )


def _propose(
    atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest
) -> tuple[Proposal, list[DeviceOffer]] | None:
    base, workload = request.base, _workload(atoms, request)
    if request.planner != OPFENCE and not request.pinned:
        return propose_by(request.planner, workload, offers, request.links, micro_batches=base.micro_batches)
    given = base.codecs if request.pinned else ()
    return propose(
        workload,
        offers,
        request.links,
        micro_batches=base.micro_batches,
        ladder=ladder_for(request.compression, given, request.ladder, request.carry_s_per_byte),
        stages=request.stages,
        every_device=request.every_device,
        canary=request.canary,
        pinned=base.cuts if request.pinned else None,
    )


def _plan(
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
    request: PlanRequest,
    p: Proposal,
    numerics: Numerics,
    hosts: Sequence[DeviceOffer],
    why: Sequence[str],
) -> Plan:
    load = _load(atoms, request)
    spans = list(pairwise((0, *numerics.cuts, len(atoms))))
    windows = [load.window(a, b, h.memory_bytes, w) for (a, b), h, w in zip(spans, hosts, p.windows, strict=True)]
    sizes = [load.bytes(a, b, w) for (a, b), w in zip(spans, windows, strict=True)]
    held = Counter[tuple[str, str]]()
    for h, size in zip(hosts, sizes, strict=True):
        held[h.peer, device_of(h.device)] += size
    kept, upload_s = keepers([load.set_bytes(a, b) for a, b in spans], hosts, offers, request.links)
    mark_interval = interval(request.mark_interval, upload_s, p.step_s)
    placement = tuple(
        StagePlacement(
            stage=k,
            peer=h.peer,
            device=device_of(h.device),
            incarnation=request.number,
            window=windows[k],
            buddies=kept[k],
            logged=load.may_log(a, b, mark_interval, h.memory_bytes, held[h.peer, device_of(h.device)]),
        )
        for k, (h, (a, b)) in enumerate(zip(hosts, spans, strict=True))
    )
    used = {h.peer for h in hosts}
    return Plan(
        number=request.number,
        epoch=request.epoch,
        numerics=numerics,
        placement=placement,
        spares=tuple(dict.fromkeys(o.peer for o in offers if o.peer not in used)),
        mark_interval=mark_interval,
        prediction=_prediction(p),
        reasons=_reasons(p, sizes, offers, request, why),
    )


def _reasons(
    p: Proposal,
    stage_bytes: Sequence[int],
    offers: Sequence[DeviceOffer],
    request: PlanRequest,
    why: Sequence[str],
) -> tuple[str, ...]:
    """`why`: of the codecs. Peers are named by the end of their id, as everywhere."""
    devices, lines = [p.network.devices[h] for h in p.chain.hosts], []
    for k, (a, b) in enumerate(pairwise(p.chain.bounds(p.workload.atoms))):
        lines.append(
            f"stage {k}: operators' atoms {a}..{b - 1}, {p.score.stage_s[k] * 1e3:.3g} ms a micro-batch, "
            f"{mib(stage_bytes[k])} of {mib(devices[k].memory_bytes)}"
        )
    lines += [*choices_of(p), *why, *sources(offers, request.links)]
    lines += [
        f"{o.peer}: its steps take {o.correction:.2g} times what its record promises"
        for o in offers
        if o.correction != 1.0
    ]
    peers = {o.peer: o.peer[-8:] for o in offers}
    for peer, short in peers.items():
        lines = [line.replace(peer, short) for line in lines]
    return tuple(lines)


def _prediction(p: Proposal) -> Prediction:
    s = p.score
    parts = {
        "compute": s.compute_s,
        "transfer": s.transfer_s,
        "latency": s.latency_s,
        "coding and carrying": s.codec_s,
        "shared weights": s.shared_s,
        "waiting for the slowest": (p.costs.m - 1) * s.bottleneck_s,
    }
    shown = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return Prediction(p.step_s, shown, min(p.lower_bound_s, p.step_s))  # the bound is of the formula


def _workload(atoms: Sequence[Atom], request: PlanRequest) -> Workload:
    w = from_atoms(
        "model",
        atoms,
        samples=request.base.micro_batch_size,
        recompute=request.base.recompute,
        state=request.state,
    )
    shape = request.shape
    if shape is None or len(shape.forward_s) != w.atoms or request.base.device_class == "cuda":
        return w
    each = (w.forward_flops.sum() + w.backward_flops.sum()) / (shape.forward_s.sum() + shape.backward_s.sum())
    nothing = 0 * w.kernels
    return replace(
        w,
        forward_flops=shape.forward_s * each,
        backward_flops=shape.backward_s * each,
        forward_bytes=nothing,
        kernels=nothing,
    )


# --- the trial steps' word


class Revised(NamedTuple):
    """`plan` with its prediction corrected, `other` that is worth placing instead, the offers corrected."""

    plan: Plan
    other: Plan | None
    offers: list[DeviceOffer]


def revise(
    plan: Plan,
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
    request: PlanRequest,
    measured_s: Mapping[int, float],
) -> Revised:
    """What the stages' trial steps say of `plan` (seconds a micro-batch, forward and backward).

    There is no other where none would be `WORTH` it, or every device is within `WRONG` of what was promised and none
    has told its own operators' times. A device that had no trial step is taken to be off by as much as the median of
    those that had; so is one within `WRONG` of that median, whose stage's pieces are then taken to be what differs,
    wherever they go.
    """
    now = proposal_of(plan, atoms, offers, request, alone=True)
    placed = {p.stage: (p.peer, p.device) for p in plan.placement}
    ratio = corrections(placed, measured_s, dict(enumerate(now.score.stage_s)))
    if not ratio:
        return Revised(plan, None, list(offers))
    wrong = any(not within(r, 1.0, WRONG) for r in ratio.values()) or any(o.shape is not None for o in offers)
    offers = corrected(plan, len(atoms), offers, request.shape, ratio, WRONG)
    other = make_plan(atoms, offers, replace(request, number=plan.number + 1))
    now = proposal_of(plan, atoms, offers, request)
    then_s = other.prediction.step_time_s if other.prediction is not None else 0.0
    pays = wrong and then_s < WORTH * now.step_s and then_s < now.step_s - WORTH_S
    sizes = [stage_bytes(plan, k, atoms, request.state) for k in range(plan.numerics.stages)]
    why = [r for r in plan.reasons if r.startswith("link ")]
    bound_s = other.prediction.lower_bound_s if other.prediction is not None else 0.0
    now = replace(now, lower_bound_s=bound_s)
    seen = msgspec.structs.replace(
        plan, prediction=_prediction(now), reasons=_reasons(now, sizes, offers, request, why)
    )
    return Revised(seen, other if pays else None, offers)


def next_of(tried: Sequence[Plan], other: Plan | None) -> Plan | None:
    """The plan to place after `tried`, each as its trial steps saw it, or None: the last of them stays. What promises
    more than the last, MAX_TRIED plans at most; then the best of those tried, if the last is clearly worse. (A device's
    correction is of the stage that it had: with another stage it is another one, and the most wrong promises win.)"""
    last = tried[-1]
    if other is not None and len(tried) < MAX_TRIED:
        return other
    best = min(tried, key=_step_s)
    return best if len(tried) <= MAX_TRIED and _step_s(best) < WORTH * _step_s(last) else None


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_time_s if plan.prediction is not None else math.inf


def proposal_of(
    plan: Plan, atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest, *, alone: bool = False
) -> Proposal:
    """The proposal that this plan is, with what is known of its devices now. `alone`: its stages as trial steps see
    them, whose frames nobody carries."""
    request = _on_their_devices(atoms, offers, request)
    carry = 0.0 if alone else request.carry_s_per_byte
    place = {(o.peer, o.device): i for i, o in enumerate(offers)}
    rungs = rungs_of(plan.numerics.codecs, request.ladder, carry)
    costs = make_costs(
        _workload(atoms, request),
        network_of(offers, request.links),
        micro_batches=plan.numerics.micro_batches,
        ladder=ladder_for("none", ()),
    )
    chain, score = costs.fit(tuple(place[p.peer, p.device] for p in plan.placement), plan.numerics.cuts)
    best = Best(chain, score, chain.hosts, score.bottleneck_s)
    return with_rungs(finish(costs, Searched([best], 0.0, ()), Constraints()), rungs, carry)


def wanted_bytes(atoms: Sequence[Atom], request: PlanRequest, peers: int) -> int:
    """Device memory that each of `peers` volunteers should offer for the whole model to fit, one micro-batch each."""
    need, largest = _least_bytes(atoms, request)
    return max(largest, math.ceil(need / peers))


def _load(atoms: Sequence[Atom], request: PlanRequest) -> Load:
    return Load(atoms, request.base.micro_batches, request.state, recompute=request.base.recompute)


def _least_bytes(atoms: Sequence[Atom], request: PlanRequest) -> tuple[int, int]:
    """(of the whole model, of its largest piece), one micro-batch in flight."""
    load = _load(atoms, request)
    return load.bytes(0, load.n, 1), max(load.bytes(a, a + 1, 1) for a in range(load.n))


def _shortage(atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest) -> str:
    need, largest = _least_bytes(atoms, request)
    have = sum(o.memory_bytes for o in offers)
    return (
        f"too little memory in the swarm: the model needs about {mib(need)} (its largest piece {mib(largest)}), "
        f"{len(offers)} device(s) offer {mib(have)}; ask for more volunteers, raise their --memory, "
        f"or use a smaller micro-batch"
    )

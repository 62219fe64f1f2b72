"""Who hosts what, first version: contiguous stages in proportion to measured speed, within memory.

`make_plan` is the one door through which the trainer asks for a plan; the OP-Fence planner (DESIGN section 5)
takes this place. Pure: no sockets, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics, Plan, Prediction, StagePlacement

if TYPE_CHECKING:  # the planner loads no torch
    from fusion_p2p.workload import Atom


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOffer:
    """One device of one peer, as its signed record (or a measured stage time) says."""

    peer: str
    device: str = "cpu"
    flops_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """`state_factor`: resident bytes per weight byte (AdamW: weight, gradient, two moments, snapshot copy = 5 to 7).

    `stages` None: as many as there are devices. `base` holds the numerics that the run fixes; its cuts are
    replaced unless `pinned`, in which case the cuts stand and only hosts are chosen.
    """

    base: Numerics
    stages: int | None = None
    pinned: bool = False
    state_factor: float = 7.0
    number: int = 1
    epoch: int = 1
    mark_interval: int = 0  # steps between complete sets; 0: none is promised, so nothing is logged
    log_bytes: int = 256 << 20  # most that a stage may keep of what it sent between two sets


def make_plan(atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest) -> Plan:
    """A plan that minimises the slowest stage's compute time. `atoms`: of one micro-batch of `base.micro_batch_size`.

    InputError, with figures, if memory does not suffice.
    """
    if not offers:
        raise InputError("no volunteer offers a device; start one with: fusion-peer join ADDRESS")
    if not atoms:
        raise InputError("the model has no operator to place")
    if request.pinned:
        cuts = request.base.cuts
        stages = request.base.stages
    else:
        stages = request.stages if request.stages is not None else min(len(offers), len(atoms))
        if not 1 <= stages <= len(atoms):
            raise InputError(f"stages = {stages} is out of range; this model can be cut into 1 to {len(atoms)} stages")
        cuts = ()
    load = _Load(atoms, request, stages)
    hosts: list[DeviceOffer] | None = None
    if request.pinned:
        hosts = _place(load, cuts, offers)
    else:
        for order in _orders(offers, stages):
            found = _cut(load, order)
            if found is not None:
                cuts, hosts = found, order
                break
    if hosts is None:
        raise InputError(_shortage(load, offers))
    numerics = replace_cuts(request.base, cuts)
    bounds = (0, *cuts, len(atoms))
    count = request.base.micro_batches
    times = [load.flops(bounds[k], bounds[k + 1]) * count / h.flops_per_s for k, h in enumerate(hosts)]
    per_host: dict[tuple[str, str], float] = {}
    for h, t in zip(hosts, times, strict=True):
        per_host[h.peer, h.device] = per_host.get((h.peer, h.device), 0.0) + t
    slowest = max(per_host.values())
    fill = sum(times) / count
    used = {h.peer for h in hosts}
    return Plan(
        number=request.number,
        epoch=request.epoch,
        numerics=numerics,
        placement=tuple(
            StagePlacement(
                stage=k,
                peer=h.peer,
                device=h.device,
                incarnation=request.number,
                window=load.window(k),
                logged=0 < request.mark_interval * load.sent_bytes(bounds[k], bounds[k + 1]) <= request.log_bytes,
            )
            for k, h in enumerate(hosts)
        ),
        spares=tuple(dict.fromkeys(o.peer for o in offers if o.peer not in used)),
        mark_interval=request.mark_interval,
        prediction=Prediction(
            step_time_s=slowest + fill - slowest / count,
            parts={"slowest stage": slowest, "fill": fill},
            lower_bound_s=load.flops(0, len(atoms)) * count / sum(o.flops_per_s for o in offers),
        ),
        reasons=tuple(
            f"stage {k}: operators' atoms {bounds[k]}..{bounds[k + 1] - 1}, "
            f"{load.flops(bounds[k], bounds[k + 1]) / max(load.flops(0, len(atoms)), 1.0):.0%} of the work, "
            f"{_mib(load.bytes(bounds[k], bounds[k + 1], k))} of {_mib(h.memory_bytes)}"
            for k, h in enumerate(hosts)
        ),
    )


def recovery_group(plan: Plan, lost: Iterable[int], edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The stages that roll back when those of `lost` are rebuilt; `edges`: pairs of stages that exchange frames."""
    logged = {p.stage for p in plan.placement if p.logged}
    joined = [pair for pair in edges if not logged.issuperset(pair)]
    group, grows = set(lost), True
    while grows:
        reached = {stage for pair in joined if group.intersection(pair) for stage in pair}
        grows = not reached <= group
        group |= reached
    return tuple(sorted(group))


def rehost(
    plan: Plan,
    lost: frozenset[str],
    group: Sequence[int],
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
    factor: float,
) -> Plan:
    """The plan with every stage of the peers `lost` on another device: a spare if one has room, else beside others.

    The numerics and all other hosts stay; the stages of `group` get the next incarnation, wherever they are.
    InputError if no device has room.
    """
    load = _Load(atoms, PlanRequest(base=plan.numerics, state_factor=factor), plan.numerics.stages)
    bounds = (0, *plan.numerics.cuts, load.n)
    left = [o for o in offers if o.peer not in lost]
    placed: dict[int, DeviceOffer] = {}
    moved = []
    for p in plan.placement:
        host = next((o for o in left if (o.peer, o.device) == (p.peer, p.device)), None)
        if p.peer in lost:
            moved.append(p)
        elif host is not None:
            placed[p.stage] = host
    new = {}
    for p in sorted(moved, key=lambda p: -load.flops(bounds[p.stage], bounds[p.stage + 1])):
        need = load.bytes(bounds[p.stage], bounds[p.stage + 1], p.stage)
        work = load.flops(bounds[p.stage], bounds[p.stage + 1])
        ready = []
        for i, o in enumerate(left):
            here = [k for k, h in placed.items() if (h.peer, h.device) == (o.peer, o.device)]
            used = sum(load.bytes(bounds[k], bounds[k + 1], k) for k in here)
            busy = sum(load.flops(bounds[k], bounds[k + 1]) for k in here)
            if used + need <= o.memory_bytes:
                ready.append(((busy + work) / o.flops_per_s, i))
        if not ready:
            raise InputError(
                f"no volunteer has {_mib(need)} free for stage {p.stage}; it waits for one: fusion-peer join ADDRESS"
            )
        placed[p.stage] = left[min(ready)[1]]
        new[p.stage] = placed[p.stage]
    names = ", ".join(sorted(peer[-8:] for peer in lost))
    used_peers = {p.peer for p in plan.placement if p.peer not in lost} | {h.peer for h in new.values()}
    return msgspec.structs.replace(
        plan,
        number=plan.number + 1,
        placement=tuple(
            msgspec.structs.replace(
                p, peer=placed[p.stage].peer, device=placed[p.stage].device, incarnation=plan.number + 1, buddies=()
            )
            if p.stage in group or p.stage in new
            else p
            for p in plan.placement
        ),
        spares=tuple(dict.fromkeys(o.peer for o in left if o.peer not in used_peers)),
        reasons=(
            *plan.reasons,
            *(f"stage {k} moved to {h.peer[-8:]}: {names} was lost" for k, h in sorted(new.items())),
        ),
    )


def stage_bytes(plan: Plan, stage: int, atoms: Sequence[Atom], state_factor: float) -> int:
    """What this planner thinks that a stage needs; a volunteer's trial step knows better."""
    load = _Load(atoms, PlanRequest(base=plan.numerics, state_factor=state_factor), plan.numerics.stages)
    bounds = (0, *plan.numerics.cuts, load.n)
    return load.bytes(bounds[stage], bounds[stage + 1], stage)


def replace_cuts(numerics: Numerics, cuts: tuple[int, ...]) -> Numerics:
    """The same numerics with these cuts; codecs of links that no longer exist are dropped."""
    kept = tuple(c for c in numerics.codecs if c.dst <= len(cuts))
    return msgspec.structs.replace(numerics, cuts=cuts, codecs=kept)


class _Load:
    """Prefix sums over the atoms."""

    def __init__(self, atoms: Sequence[Atom], request: PlanRequest, stages: int) -> None:
        self.n = len(atoms)
        self.stages = stages
        self._factor = request.state_factor
        self._micro_batches = request.base.micro_batches
        self._cuts = [*((a.cut_bytes, a.cut_weight_bytes) for a in atoms), (0, 0)]
        self._flops, self._weights, self._activations = [0.0], [0], [0]
        for a in atoms:
            self._flops.append(self._flops[-1] + a.forward_flops + a.backward_flops)
            self._weights.append(self._weights[-1] + a.weight_bytes)
            self._activations.append(self._activations[-1] + a.stash_bytes)

    def window(self, stage: int) -> int:
        """Micro-batches in flight: enough to fill the stages after this one, one more to hide the network."""
        return max(1, min(self._micro_batches, self.stages - stage + (1 if self.stages > 1 else 0)))

    def flops(self, a: int, b: int) -> float:
        return self._flops[b] - self._flops[a]

    def sent_bytes(self, a: int, b: int) -> int:
        """What atoms a..b-1 send in a step, dense: activations up, gradients down, shared weights either way."""
        ends = [self._cuts[at] for at in (a, b) if 0 < at < self.n]
        return 1 + sum(self._micro_batches * activations + shared for activations, shared in ends)

    def bytes(self, a: int, b: int, stage: int) -> int:
        state = (self._weights[b] - self._weights[a]) * self._factor
        stash = (self._activations[b] - self._activations[a]) * self.window(stage)
        return math.ceil(state) + stash


def _orders(offers: Sequence[DeviceOffer], stages: int) -> list[list[DeviceOffer]]:
    """The fastest `stages` devices in the order given, then by memory; repeats where there are fewer than stages."""
    pool = list(offers)
    while len(pool) < stages:  # several stages beside each other on one device share its speed and memory
        copies = math.ceil(stages / len(offers))
        shared = [replace(o, flops_per_s=o.flops_per_s / copies, memory_bytes=o.memory_bytes // copies) for o in offers]
        pool = [o for o in shared for _ in range(copies)]
    fastest = sorted(range(len(pool)), key=lambda i: (-pool[i].flops_per_s, i))[:stages]
    largest = sorted(range(len(pool)), key=lambda i: (-pool[i].memory_bytes, i))[:stages]
    orders = [[pool[i] for i in sorted(fastest)], [pool[i] for i in sorted(largest)]]
    orders.append([pool[i] for i in largest])
    orders.append([pool[i] for i in reversed(largest)])
    return orders


def _cut(load: _Load, order: Sequence[DeviceOffer]) -> tuple[int, ...] | None:
    """Exact min-max contiguous partition over devices in this order, each at least one atom; None if none fits."""
    n, stages = load.n, len(order)
    total = max(load.flops(0, n), 1.0)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, -1)}]
    for k, host in enumerate(order):
        row: dict[int, tuple[float, float, int]] = {}
        for start, (worst, spread, _) in best[k].items():
            ends = range(start + 1, n - (stages - k - 1) + 1) if k < stages - 1 else range(n, n + 1)
            for end in ends:
                if load.bytes(start, end, k) > host.memory_bytes:
                    break  # bytes only grow with `end`
                time = load.flops(start, end) / total / host.flops_per_s
                key = (max(worst, time), spread + time * time, start)
                if start < end and (end not in row or key < row[end]):
                    row[end] = key
        best.append(row)
    if n not in best[stages]:
        return None
    cuts: list[int] = []
    end = n
    for k in range(stages, 0, -1):
        end = best[k][end][2]
        cuts.append(end)
    return tuple(reversed(cuts[:-1]))


def _place(load: _Load, cuts: tuple[int, ...], offers: Sequence[DeviceOffer]) -> list[DeviceOffer] | None:
    """Hosts for fixed cuts: the heaviest stage first, each to the device that would finish it soonest and has room."""
    bounds = (0, *cuts, load.n)
    free = [o.memory_bytes for o in offers]
    busy = [0.0] * len(offers)
    hosts: list[DeviceOffer | None] = [None] * (len(cuts) + 1)
    for k in sorted(range(len(hosts)), key=lambda k: (-load.flops(bounds[k], bounds[k + 1]), k)):
        need, work = load.bytes(bounds[k], bounds[k + 1], k), load.flops(bounds[k], bounds[k + 1])
        ready = [(busy[i] + work / o.flops_per_s, abs(i - k), i) for i, o in enumerate(offers) if free[i] >= need]
        if not ready:
            return None
        finish, _, i = min(ready)
        busy[i], free[i], hosts[k] = finish, free[i] - need, offers[i]
    return [h for h in hosts if h is not None]


def _shortage(load: _Load, offers: Sequence[DeviceOffer]) -> str:
    need = load.bytes(0, load.n, load.stages - 1)
    have = sum(o.memory_bytes for o in offers)
    largest = max(load.bytes(a, a + 1, load.stages - 1) for a in range(load.n))
    return (
        f"too little memory in the swarm: the model needs about {_mib(need)} (its largest piece {_mib(largest)}), "
        f"{len(offers)} device(s) offer {_mib(have)}; ask for more volunteers, raise their --memory, "
        f"or use a smaller micro-batch"
    )


def _mib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

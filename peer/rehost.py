"""A plan after a loss or a move: who takes the stages over, and which others roll back with them (DESIGN 2). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Plan
from fusion_p2p.settings import StateBytes
from peer.offers import DeviceOffer
from peer.stage_load import Load, load_of, mib

if TYPE_CHECKING:
    from fusion_p2p.workload import Atom


class NoRoomError(InputError):
    """No volunteer has `need_bytes` of device memory free for stage `stage`."""

    def __init__(self, stage: int, need_bytes: int) -> None:
        super().__init__(
            f"no volunteer has {mib(need_bytes)} free for stage {stage}; it waits for one: fusion-peer join ADDRESS"
        )
        self.stage, self.need_bytes = stage, need_bytes


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


def computed_apart(plan: Plan) -> bool:
    """Whether a stage was made without the others, so that it may have computed again what they had of it before."""
    return len({p.incarnation for p in plan.placement}) > 1


def rehost(
    plan: Plan,
    lost: frozenset[str],
    group: Sequence[int],
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
    state: StateBytes,
    nominees: Sequence[str] = (),
) -> Plan:
    """The plan with every stage of the peers `lost` on another device: a spare if one has room, else beside others.

    `nominees`: who is proposed, the best first: the first one that is free and has room is taken.

    The numerics and all other hosts stay; the stages of `group` get the next incarnation, wherever they are.
    NoRoomError if no device has room.
    """
    load = load_of(plan, atoms, state)
    bounds = (0, *plan.numerics.cuts, load.n)
    left = [o for o in offers if o.peer not in lost and o.device_class == plan.numerics.device_class]
    new = _take_over(plan, lost, load, left, nominees)
    here = {(o.peer, o.device): o for o in left}
    placed = new | {p.stage: here[p.peer, p.device] for p in plan.placement if (p.peer, p.device) in here}

    held = Counter[tuple[str, str]]()
    for p in plan.placement:
        if p.stage in placed:
            at = placed[p.stage]
            held[at.peer, at.device] += load.bytes(bounds[p.stage], bounds[p.stage + 1], p.window)

    def may_log(stage: int) -> bool:
        a, b, at = bounds[stage], bounds[stage + 1], placed[stage]
        return load.may_log(a, b, plan.mark_interval, at.memory_bytes, held[at.peer, at.device])

    names = ", ".join(sorted(peer[-8:] for peer in lost))
    used_peers = {p.peer for p in plan.placement if p.peer not in lost} | {h.peer for h in new.values()}
    return msgspec.structs.replace(
        plan,
        number=plan.number + 1,
        placement=tuple(
            msgspec.structs.replace(
                p,
                peer=placed[p.stage].peer,
                device=placed[p.stage].device,
                incarnation=plan.number + 1,
                buddies=(),
                logged=p.logged and may_log(p.stage),
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


def _take_over(
    plan: Plan, lost: frozenset[str], load: Load, left: Sequence[DeviceOffer], nominees: Sequence[str]
) -> dict[int, DeviceOffer]:
    """For each stage of the peers `lost`, the heaviest first: the first free nominee, else the device that is soonest
    through with its work."""
    bounds, window = (0, *plan.numerics.cuts, load.n), {p.stage: p.window for p in plan.placement}
    rank = {peer: n for n, peer in enumerate(nominees)}
    at = {(o.peer, o.device): i for i, o in enumerate(left)}
    held: dict[int, list[int]] = {i: [] for i in range(len(left))}
    for p in plan.placement:
        if (p.peer, p.device) in at:
            held[at[p.peer, p.device]].append(p.stage)

    def flops(stage: int) -> float:
        return load.flops(bounds[stage], bounds[stage + 1])

    def room(stage: int) -> int:
        return load.bytes(bounds[stage], bounds[stage + 1], window[stage])

    new = {}
    for stage in sorted((p.stage for p in plan.placement if p.peer in lost), key=lambda k: -flops(k)):
        ready = [
            (
                len(nominees) if held[i] else rank.get(o.peer, len(nominees)),
                sum(map(flops, (*held[i], stage))) * o.correction / o.flops_per_s,
                i,
            )
            for i, o in enumerate(left)
            if sum(map(room, (*held[i], stage))) <= o.memory_bytes
        ]
        if not ready:
            raise NoRoomError(stage, room(stage))
        i = min(ready)[2]
        held[i].append(stage)
        new[stage] = left[i]
    return new


def relocated(plan: Plan, target: Plan, group: Sequence[int], *, number: int, reason: str) -> Plan:
    """`plan` with the stages of `group` where `target`, of the same numerics, has them, each a new incarnation."""
    placement = tuple(
        msgspec.structs.replace(target.host(p.stage), incarnation=number, buddies=()) if p.stage in group else p
        for p in plan.placement
    )
    return msgspec.structs.replace(
        target, number=number, placement=placement, reasons=(*target.reasons, *([reason] if reason else []))
    )

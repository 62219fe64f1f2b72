"""After the first plan: absorb a loss at once, weigh a better plan against moving, ignore noise (DESIGN 2, 5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner.bound import lower_bound_s
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.durability import durability
from fusion_p2p.planner.network import Network
from fusion_p2p.planner.proposal import Proposal
from fusion_p2p.planner.simulate import Options, simulate

HYSTERESIS = 0.15  # share of the step time that a new plan must save: noise of +-10% never reaches it
MOVING_AVERAGE = 0.3  # weight of a new measurement


@dataclass(frozen=True, kw_only=True)
class Move:
    """Stage `stage` goes from one device (-1: its host is lost, the set comes from `source`) to another."""

    stage: int
    old: int
    new: int
    source: int
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Repair:
    """A plan after a loss: cuts and codecs unchanged, `moves` name who takes what, `restore_s` until it runs again."""

    proposal: Proposal
    moves: tuple[Move, ...]
    restore_s: float


def absorb(current: Proposal, lost: Collection[str], *, horizon_steps: int = 100) -> Repair:
    """Host every stage of the lost peers unchanged on the device that makes restoring and `horizon_steps` cheapest.

    That may be a spare or a peer with a stage of its own. InputError if no remaining device has the memory.
    """
    devices = current.network.devices
    gone = {i for i, d in enumerate(devices) if d.peer in lost}
    alive = [i for i, d in enumerate(devices) if i not in gone and d.accepts and d.confirmed]
    costs, chain = current.costs, current.chain
    moves: list[Move] = []
    for k, host in enumerate(chain.hosts):
        if host not in gone:
            continue
        source = current.durability.buddies[k]
        if source in gone or source < 0:
            source = -1  # the older set, or the trainer's folder
        held = current.durability.set_bytes[k]
        best: tuple[float, Chain, int] | None = None
        for d in alive:
            trial = replace(chain, hosts=(*chain.hosts[:k], d, *chain.hosts[k + 1 :]))
            score = costs.score(trial)
            value = score.step_s * horizon_steps + _copy_s(costs, source, d, held)
            if score.fits and (best is None or value < best[0]):
                best = (value, trial, d)
        if best is None:
            names = ", ".join(sorted(lost))
            raise InputError(
                f"no remaining peer has {costs.w.stage_bytes(*_span(current, k), 1).total / 2**30:.2f} GiB for "
                f"stage {k} after losing {names}; add a peer or raise a memory cap"
            )
        chain = best[1]
        moves.append(Move(stage=k, old=-1, new=best[2], source=source, moved_bytes=held))
    restore = max((_copy_s(costs, m.source, m.new, m.moved_bytes) for m in moves), default=0.0)
    score = costs.score(chain)
    lines = [
        f"stage {m.stage} moved from {devices[current.chain.hosts[m.stage]].name} to {devices[m.new].name} because "
        f"its host was lost; the set comes from {devices[m.source].name if m.source >= 0 else 'the run folder'}"
        for m in moves
    ]
    proposal = _with_chain(current, chain, score, tuple(lines))
    return Repair(proposal=proposal, moves=tuple(moves), restore_s=restore)


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """`switch`: adopt `proposal`. Seconds: a step under the current plan and the new one, and the moving time."""

    switch: bool
    proposal: Proposal
    current_step_s: float
    new_step_s: float
    migration_s: float
    reason: str
    horizon_s: float = 0.0


def weigh(
    current: Proposal,
    new: Proposal,
    *,
    horizon_s: float = 600.0,
    hysteresis: float = HYSTERESIS,
    setup_s: float = 0.0,
    forced: bool = False,
) -> Decision:
    """Whether to move from `current` to `new`, both judged on `new`'s network (the latest measurements).

    Moves pay only if the step time falls by more than `hysteresis` and the seconds saved over `horizon_s` exceed
    those of moving state and of `setup_s`. `forced`: the current plan cannot go on (a lost peer that nobody absorbed).
    """
    chain = _translate(current, new.network)
    if chain is None or forced:
        moving = migration_s(new, None)
        return Decision(
            switch=True,
            proposal=new,
            current_step_s=float("inf"),
            new_step_s=new.step_s,
            migration_s=moving,
            reason="the current plan names a peer that is gone",
        )
    now = simulate(new.costs, chain).step_s
    moving = setup_s + migration_s(new, chain)
    gain = now - new.step_s
    steps = horizon_s / now
    worth = gain > hysteresis * now and gain * steps > moving
    why = (
        f"step {now:.3f} s -> {new.step_s:.3f} s ({gain / now:.0%}); moving state takes {moving:.0f} s, "
        f"saves {gain * steps:.0f} s in {horizon_s:.0f} s"
    )
    reasons = (*_moved_lines(chain, new, why), *new.reasons) if worth else new.reasons
    return Decision(
        switch=worth,
        proposal=replace(new, reasons=reasons),
        current_step_s=now,
        new_step_s=new.step_s,
        migration_s=moving,
        reason=("switch: " if worth else "stay: ") + why,
        horizon_s=horizon_s,
    )


def migration_s(new: Proposal, old: Chain | None) -> float:
    """Seconds to move state to `new`'s hosts: transfers run in parallel, each device's up- and downlink in series."""
    costs = new.costs
    count = len(costs.net)
    owner = np.full(costs.w.atoms, -1)
    if old is not None:
        owner = _owners(costs, old)
    target = _owners(costs, new.chain)
    size = costs.w.atom_bytes()[1]
    out, into = np.zeros(count), np.zeros(count)
    for a, b, s in zip(owner.tolist(), target.tolist(), size.tolist(), strict=True):
        if a != b and s > 0:
            seconds = _copy_s(costs, a, b, s)
            into[b] += seconds
            if a >= 0:
                out[a] += seconds
    return float(max(out.max(), into.max()))


def corrected(network: Network, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> Network:
    """Each device's `correction` moved towards measured over predicted stage seconds, keyed by device name.

    Measured times override claims; the moving average keeps one slow step from moving a plan.
    """
    devices = []
    for d in network.devices:
        seen, claimed = measured_s.get(d.name), predicted_s.get(d.name)
        if seen is not None and claimed is not None and seen > 0 and claimed > 0:
            target = d.correction * seen / claimed
            d = replace(d, correction=(1 - MOVING_AVERAGE) * d.correction + MOVING_AVERAGE * target)
        devices.append(d)
    return replace(network, devices=tuple(devices))


def _with_chain(current: Proposal, chain: Chain, score: Score, lines: Sequence[str]) -> Proposal:
    costs = current.costs
    options = Options(windows=current.windows)
    return replace(
        current,
        chain=chain,
        score=score,
        timing=simulate(costs, chain, options, spans=False),
        options=options,
        durability=durability(costs, chain, score),
        lower_bound_s=lower_bound_s(costs) if current.lower_bound_s <= 0 else current.lower_bound_s,
        reasons=(*lines, *current.reasons),
    )


def _span(p: Proposal, k: int) -> tuple[int, int]:
    bounds = p.chain.bounds(p.workload.atoms)
    return bounds[k], bounds[k + 1]


def _copy_s(costs: Costs, source: int, target: int, size_bytes: float) -> float:
    """Seconds to bring bytes to `target`; without a source, over the target's median link."""
    if source == target:
        return 0.0
    if source >= 0:
        return size_bytes * float(costs.forward_s_per_byte[source, target])
    others = np.delete(costs.forward_s_per_byte[:, target], target)
    return size_bytes * float(np.median(others)) if len(others) else 0.0


def _owners(costs: Costs, chain: Chain) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    bounds = chain.bounds(costs.w.atoms)
    return np.repeat(np.array(chain.hosts, dtype=np.int64), np.diff(bounds))


def _translate(current: Proposal, network: Network) -> Chain | None:
    """The current chain in the indices of a newer network; None if one of its devices is gone."""
    where = {d.name: i for i, d in enumerate(network.devices) if d.accepts}
    names = [current.network.devices[h].name for h in current.chain.hosts]
    if any(n not in where for n in names):
        return None
    return replace(current.chain, hosts=tuple(where[n] for n in names))


def _moved_lines(old: Chain, new: Proposal, why: str) -> list[str]:
    devices = new.network.devices
    before, after = _owners(new.costs, old), _owners(new.costs, new.chain)
    lines = []
    for k, h in enumerate(new.chain.hosts):
        a, b = _span(new, k)
        sources = {int(o) for o in before[a:b]} - {h}
        if sources and not (after[a:b] == before[a:b]).all():
            names = ", ".join(sorted(devices[o].name for o in sources)[:3])
            lines.append(f"stage {k} moved from {names} to {devices[h].name} because {why}")
    return lines

"""The planner's door: `plan(workload, network, micro_batches=...)` gives a Proposal, `to_plan` makes it a Plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.inbox import MICRO_BATCHES
from fusion_p2p.plan import LinkCodec, Numerics, Plan, Prediction, StagePlacement
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.durability import Durability, durability
from fusion_p2p.planner.fences import Fences
from fusion_p2p.planner.ladder import DENSE, Ladder, default_ladder
from fusion_p2p.planner.network import Network
from fusion_p2p.planner.opfence import Best, Searched, regret_s, search
from fusion_p2p.planner.simulate import Options, Pool, Schedule, simulate
from fusion_p2p.planner.windows import choose_windows
from fusion_p2p.planner.workload import Workload

LOCAL_ROUNDS = 40  # of local search, at most


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the plan must respect besides memory and upload caps, which devices carry.

    `exclude`: peers not to use. `pinned_cuts`: cuts that the numeric log fixes; only hosts are chosen, and a peer may
    host several neighbouring stages. `in_flight`: micro-batches a stage may hold, for the memory check (default all).
    """

    exclude: frozenset[str] = frozenset()
    pinned_cuts: tuple[int, ...] | None = None
    in_flight: int | None = None
    shared_nic: bool = False
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """The best chain found, what it costs by formula (`score`) and by simulation (`timing`), and what bounds it."""

    workload: Workload
    network: Network
    costs: Costs
    chain: Chain
    score: Score
    timing: Schedule  # without spans
    options: Options  # of the simulation, windows included
    windows: tuple[int, ...]
    lower_bound_s: float
    fences: Fences
    durability: Durability
    reasons: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Simulated seconds of one step."""
        return self.timing.step_s

    @cached_property
    def schedule(self) -> Schedule:
        """One step as simulated, with its spans."""
        return simulate(self.costs, self.chain, self.options)

    @property
    def spares(self) -> tuple[int, ...]:
        """Devices that accept stages and got none."""
        used = set(self.chain.hosts)
        return tuple(i for i, d in enumerate(self.network.devices) if i not in used and d.accepts)

    @property
    def gap(self) -> float:
        """This plan is within `gap` (a share, 0.1 = 10%) of what any plan could do."""
        return self.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else float("inf")

    def numerics(self, base: Numerics | None = None, channels: Iterable[tuple[int, int]] | None = None) -> Numerics:
        """Cuts, codecs and micro-batches of this proposal in `base`'s other settings.

        `channels`: pairs of stages that exchange floating-point frames (default: neighbours); an edge that passes
        over stages takes the strongest codec of the hops it spans.
        """
        base = base or Numerics(cuts=(), micro_batches=self.costs.m, micro_batch_size=self.workload.samples)
        count = len(self.chain.hosts)
        codecs = []
        for a, b in channels if channels is not None else ((k, k + 1) for k in range(count - 1)):
            rung = min(self.chain.rungs[min(a, b) : max(a, b)], key=lambda r: r.byte_share)
            if rung.codec != DENSE.codec:
                codecs.append(LinkCodec(min(a, b), max(a, b), rung.codec))
        return msgspec.structs.replace(base, cuts=self.chain.cuts, codecs=tuple(codecs), micro_batches=self.costs.m)

    def to_plan(
        self,
        *,
        number: int,
        epoch: int,
        base: Numerics | None = None,
        channels: Iterable[tuple[int, int]] | None = None,
        incarnations: tuple[int, ...] | None = None,
    ) -> Plan:
        """The signed part's data. `incarnations` per stage (default 0)."""
        devices = self.network.devices
        placement = tuple(
            StagePlacement(
                stage=k,
                peer=devices[h].peer,
                device=devices[h].device,
                incarnation=incarnations[k] if incarnations else 0,
                window=self.windows[k],
                buddies=tuple(devices[b].peer for b in (self.durability.buddies[k],) if b >= 0),
                logged=all(self.durability.logged[max(0, k - 1) : k + 1]),
            )
            for k, h in enumerate(self.chain.hosts)
        )
        s = self.score
        parts = {
            "compute_s": s.compute_s,
            "transfer_s": s.transfer_s,
            "latency_s": s.latency_s,
            "codec_s": s.codec_s,
            "shared_weights_s": s.shared_s,
            "waiting_for_slowest_s": (self.costs.m - 1) * s.bottleneck_s,
        }
        return Plan(
            number=number,
            epoch=epoch,
            numerics=self.numerics(base, channels),
            placement=placement,
            spares=tuple(dict.fromkeys(devices[i].peer for i in self.spares)),
            mark_interval=self.durability.mark_interval,
            prediction=Prediction(self.step_s, parts, self.lower_bound_s),
            reasons=self.reasons,
        )


def plan(
    workload: Workload,
    network: Network,
    *,
    micro_batches: int,
    ladder: Ladder | None = None,
    tau: float = 0.25,
    constraints: Constraints | None = None,
    allow_skip: bool = True,
    local_search: bool = True,
) -> Proposal:
    """The plan of least predicted step time. InputError, one line, for impossible input or too little memory.

    `ladder` None: the default codecs; a hop takes the first whose transfer is at most `tau` of the bottleneck.
    `allow_skip` False forces every accepting device into the chain.
    """
    costs = make_costs(workload, network, micro_batches=micro_batches, ladder=ladder, tau=tau, constraints=constraints)
    limits = constraints or Constraints()
    pinned = limits.pinned_cuts
    found = search(costs, skip=allow_skip, local_rounds=LOCAL_ROUNDS if local_search else 0, pinned=pinned)
    if pinned is not None:
        found = replace(found, finalists=[_spread(costs, b, pinned) for b in found.finalists])
    return finish(costs, found, limits)


def make_costs(
    workload: Workload,
    network: Network,
    *,
    micro_batches: int,
    ladder: Ladder | None = None,
    tau: float = 0.25,
    constraints: Constraints | None = None,
) -> Costs:
    """Checked costs of a planning problem; see `plan`."""
    workload.check()
    network.check()
    if not 1 <= micro_batches <= MICRO_BATCHES:  # more fit no frame, and the schedule is simulated one by one
        raise InputError(f"micro_batches = {micro_batches} must lie within 1..{MICRO_BATCHES}")
    limits = constraints or Constraints()
    if limits.exclude:
        devices = tuple(replace(d, accepts=d.accepts and d.peer not in limits.exclude) for d in network.devices)
        network = replace(network, devices=devices)
    ladder = ladder or default_ladder(tau, workload.wire_bytes_per_element)
    return Costs(workload, network, micro_batches, ladder, limits.in_flight)


def finish(costs: Costs, searched: Searched, limits: Constraints) -> Proposal:
    """Simulate the finalists, keep the fastest, choose windows, marks and buddies, and explain."""
    from fusion_p2p.planner.explain import reasons

    options = Options(shared_nic=limits.shared_nic, pools=limits.pools)
    # Finalists that differ by equal devices swapped have one score: simulate one of them.
    different = {round(b.score.step_s, 6): b for b in reversed(searched.finalists)}
    free = [(simulate(costs, b.chain, options, spans=False), b) for b in different.values()]
    timing, b = min(free, key=lambda x: x[0].step_s + regret_s(costs, x[1].chain, x[1].score) - x[1].score.step_s)
    windows, timing = choose_windows(costs, b.chain, b.score, timing, options)
    proposal = Proposal(
        workload=costs.w,
        network=costs.net,
        costs=costs,
        chain=b.chain,
        score=b.score,
        timing=timing,
        options=replace(options, windows=windows),
        windows=windows,
        lower_bound_s=searched.lower_bound_s,
        fences=searched.fences,
        durability=durability(costs, b.chain, b.score),
    )
    return replace(proposal, reasons=reasons(proposal))


def _spread(costs: Costs, best: Best, pinned: tuple[int, ...]) -> Best:
    """Write a chain over merged stages as one entry per pinned stage, hosts repeated."""
    bounds = best.chain.bounds(costs.w.atoms)
    hosts = []
    k = 0
    for start in (0, *pinned):
        while bounds[k + 1] <= start:
            k += 1
        hosts.append(best.chain.hosts[k])
    chain, score = costs.fit(tuple(hosts), pinned)
    return Best(chain, score, best.order, best.threshold_s)

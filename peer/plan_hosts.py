"""OP-Fence asked for a number of stages: which devices take part, and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner import DENSE, Constraints, Ladder, Network, Proposal, Workload, baselines, plan
from fusion_p2p.planner.opfence import Best, Searched
from fusion_p2p.planner.proposal import finish, make_costs
from peer.offers import DeviceOffer, SwarmLinks, network_of

OPFENCE = "opfence"
RULES = {
    "equal-layers": baselines.random_equal_layers,
    "equal-compute": baselines.random_equal_compute,
    "published": baselines.published,
}
SEEDS = 4  # fastest devices around which a neighbourhood is tried


def propose(
    workload: Workload,
    offers: Sequence[DeviceOffer],
    known: SwarmLinks,
    *,
    micro_batches: int,
    ladder: Ladder,
    stages: int | None = None,
    every_device: bool = False,
    canary: bool = True,
    pinned: tuple[int, ...] | None = None,
) -> tuple[Proposal, list[DeviceOffer]] | None:
    """The best proposal and the offer behind each of its network's devices; None if nothing fits in memory.

    `stages` None: as many as pay, or with `every_device` one for each device if they all fit. More stages than
    devices share them evenly. `pinned`: the cuts; neighbouring stages may share a device. `canary`: as in `network_of`.
    """
    if stages is not None and pinned is None and stages > len(offers):
        offers = _shared(offers, stages)
    network = network_of(offers, known, canary=canary)
    limits = Constraints(pinned_cuts=pinned, in_flight=(stages or len(offers)) + 1)

    def attempt(keep: Sequence[int] | None, *, skip: bool) -> Proposal | None:
        part = network if keep is None else network.subset(keep)
        try:
            return plan(
                workload,
                part,
                micro_batches=micro_batches,
                ladder=ladder,
                constraints=limits,
                allow_skip=skip,
            )
        except InputError:  # offers and atoms were checked: what is left is memory
            return None

    tried: list[tuple[Proposal | None, Sequence[int] | None]] = []
    if pinned is None and (stages is not None or every_device):
        count = stages if stages is not None else min(len(offers), workload.atoms)
        tried = [(attempt(keep, skip=False), keep) for keep in _subsets(network, workload, count)]
    if pinned is not None or stages is None:
        fits = any(p is not None for p, _ in tried)
        tried += [] if fits else [(attempt(None, skip=True), None)]
    found = [(p.step_s, i) for i, (p, _) in enumerate(tried) if p is not None]
    if not found:
        return None
    best, keep = tried[min(found)[1]]
    assert best is not None
    return best, [offers[i] for i in keep] if keep is not None else list(offers)


def check_planner(planner: str) -> tuple[str, int]:
    """The rule's name and its seed (0 where none is given). InputError."""
    kind, _, seed = planner.partition(":")
    if planner == OPFENCE or (kind in RULES and (seed.isdecimal() or not seed) and len(seed) < 10):
        return kind, int(seed or 0)
    raise InputError(f"planner {planner!r} is unknown; use {OPFENCE}, or {', '.join(f'{r}:SEED' for r in RULES)}")


def propose_by(
    planner: str, workload: Workload, offers: Sequence[DeviceOffer], known: SwarmLinks, *, micro_batches: int
) -> tuple[Proposal, list[DeviceOffer]]:
    """What a rule of `RULES` makes of the same offers, links dense: baselines to measure OP-Fence against."""
    kind, seed = check_planner(planner)
    dense = Ladder((DENSE,))
    costs = make_costs(workload, network_of(offers, known), micro_batches=micro_batches, ladder=dense)
    chain, score = RULES[kind](costs, seed)
    best = Best(chain, score, chain.hosts, score.bottleneck_s)
    return finish(costs, Searched([best], 0.0, ()), Constraints()), list(offers)


def _shared(offers: Sequence[DeviceOffer], stages: int) -> list[DeviceOffer]:
    """`stages` slots: each device as often as needed, its speed and memory divided."""
    copies = math.ceil(stages / len(offers))
    parts = [
        replace(
            o,
            flops_per_s=o.flops_per_s / copies,
            memory_bytes_per_s=o.memory_bytes_per_s / copies,
            memory_bytes=o.memory_bytes // copies,
        )
        for o in offers
    ]
    slots = [replace(o, device=slot_name(o.device, k)) for o in parts for k in range(copies)]
    fastest = sorted(range(len(slots)), key=lambda i: (-slots[i].flops_per_s, i))[:stages]
    return [slots[i] for i in sorted(fastest)]


def slot_name(device: str, copy: int) -> str:
    return f"{device}#{copy}" if copy else device


def device_of(slot: str) -> str:
    """The device of a slot's name."""
    return slot.partition("#")[0]


def _subsets(network: Network, workload: Workload, count: int) -> list[tuple[int, ...]]:
    """Sets of `count` devices worth planning: the fastest, the roomiest, and those around fast ones on short links."""
    every = range(len(network))
    if count >= len(network):
        return [tuple(every)]
    fast = sorted(every, key=lambda i: (-network.devices[i].flops_per_s / network.devices[i].correction, i))
    roomy = sorted(every, key=lambda i: (-network.devices[i].memory_bytes, i))
    sets = [fast[:count], roomy[:count]]
    size = workload.typical_cut_bytes()
    hop_s = size / network.bandwidth_bytes_per_s + network.latency_s
    hop_s = hop_s + hop_s.T
    if np.ptp(hop_s[~np.eye(len(network), dtype=bool)]) > 0:
        rank = {d: n for n, d in enumerate(fast)}
        for seed in fast[:SEEDS]:
            others = [d for d in every if d != seed]
            sets.append([seed, *sorted(others, key=lambda d: (float(hop_s[seed, d]), rank[d]))[: count - 1]])
        for fence in network.fences or ():
            sets.append([d for d in fast if d in fence][:count])
    return list(dict.fromkeys(tuple(sorted(s)) for s in sets if len(s) == count))

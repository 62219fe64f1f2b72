"""A peer that has become slow loses its stages when that pays (DESIGN sections 2 and 5).

Each stage's measured seconds are compared with what the plan expects of its device; what all devices have in common
(a loaded machine, a wrong prior) is taken out by the median. Only a clear, lasting difference counts, and only if the
step would be shorter by more than the planner's hysteresis: noise moves nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Plan
from fusion_p2p.planner.replan import HYSTERESIS, MOVING_AVERAGE
from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer
from peer.placement import PlanRequest, rehost
from peer.trainer_live import Live
from peer.trainer_ticks import TickResult

EVERY = 5  # ticks between looks
SLOW = 1.75  # times slower than the others, against what was expected of each, at several looks in a row
LOOKS = 2
EXCLUDED_S = 300.0  # before a peer that was slow may have a stage again


class Balance:
    """Hears every tick; hands a slow peer's stages over with `Live.hand_over`."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._hosts: dict[int, tuple[str, int]] = {}  # stage -> (peer, incarnation) that the average is of
        self._seconds: dict[int, float] = {}
        self._ticks = 0
        self._slow: dict[str, int] = {}  # peer -> looks in a row

    def tick(self, result: TickResult) -> None:
        """One more tick's reports."""
        for stage, report in result.reports.items():
            p = self._live.now.plan.host(stage)
            seconds = report.forward_s + report.backward_s
            if self._hosts.get(stage) != (p.peer, p.incarnation):  # its first tick here warms up
                self._hosts[stage] = p.peer, p.incarnation
                self._seconds.pop(stage, None)
            elif stage not in self._seconds:
                self._seconds[stage] = seconds
            else:
                self._seconds[stage] += MOVING_AVERAGE * (seconds - self._seconds[stage])
        self._ticks += 1
        if self._ticks % EVERY == 0 and len(self._seconds) == self._live.now.plan.numerics.stages:
            self._look()

    def _look(self) -> None:
        live = self._live
        devices = live.devices()
        ratios = slowness(self._seconds, expected_s(live.now.plan, live.atoms, devices))
        by_peer: dict[str, float] = {}
        for stage, ratio in ratios.items():
            peer = live.now.plan.host(stage).peer
            by_peer[peer] = max(ratio, by_peer.get(peer, 0.0))
        slow = {peer: r for peer, r in by_peer.items() if r >= SLOW}
        self._slow = {peer: self._slow.get(peer, 0) + 1 for peer in slow}
        if live.lost or live.leaving or not self._slow:
            return
        peer = max(slow, key=lambda p: slow[p])
        if self._slow[peer] < LOOKS:
            return
        now_s, then_s = without(live.now.plan, peer, slow[peer], live.atoms, devices)
        if then_s < (1 - HYSTERESIS) * now_s:
            live.exclude(peer, EXCLUDED_S)
            why = f"it is {slow[peer]:.1f} times slower than the others; without it a step takes {then_s / now_s:.0%}"
            live.hand_over(peer, why, may_stay=True)
            self._slow.clear()


def _flops(plan: Plan, stage: int, atoms: Sequence[Atom]) -> float:
    bounds = (0, *plan.numerics.cuts, len(atoms))
    return sum(a.forward_flops + a.backward_flops for a in atoms[bounds[stage] : bounds[stage + 1]])


def expected_s(plan: Plan, atoms: Sequence[Atom], offers: Sequence[DeviceOffer]) -> dict[int, float]:
    """Compute seconds of each stage in a step, by its device's measured rate; of stages whose device is on offer."""
    rate = {(o.peer, o.device): o.flops_per_s / o.correction for o in offers}
    work = {p.stage: plan.numerics.micro_batches * _flops(plan, p.stage, atoms) for p in plan.placement}
    return {p.stage: work[p.stage] / rate[p.peer, p.device] for p in plan.placement if (p.peer, p.device) in rate}


def without(
    plan: Plan, peer: str, slower: float, atoms: Sequence[Atom], offers: Sequence[DeviceOffer]
) -> tuple[float, float]:
    """Seconds of a step's slowest device as it is, `peer` being `slower` times slower than its rate, and with its
    stages elsewhere; infinite if nobody has room."""
    now = [o if o.peer != peer else replace(o, correction=o.correction * slower) for o in offers]
    factor = PlanRequest(base=plan.numerics).state_factor
    try:
        moved = rehost(plan, frozenset({peer}), (), atoms, offers, factor)
    except InputError:
        return _slowest_s(plan, atoms, now), math.inf
    return _slowest_s(plan, atoms, now), _slowest_s(moved, atoms, now)


def _slowest_s(plan: Plan, atoms: Sequence[Atom], offers: Sequence[DeviceOffer]) -> float:
    busy: dict[tuple[str, str], float] = {}
    for stage, seconds in expected_s(plan, atoms, offers).items():
        p = plan.host(stage)
        busy[p.peer, p.device] = busy.get((p.peer, p.device), 0.0) + seconds
    return max(busy.values(), default=0.0)


def slowness(measured_s: Mapping[int, float], expected_s: Mapping[int, float]) -> dict[int, float]:
    """Per stage, measured over expected seconds, relative to the median of all stages."""
    ratio = {k: measured_s[k] / expected_s[k] for k in measured_s if expected_s.get(k, 0.0) > 0}
    middle = statistics.median_low(ratio.values()) if ratio else 0.0
    return {k: r / middle if middle > 0 else 1.0 for k, r in ratio.items()}

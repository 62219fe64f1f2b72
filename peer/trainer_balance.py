"""A peer that has become slow loses its stages when that pays (DESIGN sections 2 and 5).

Each stage's measured seconds are compared with those of its trial step on the same device; what all stages have in
common (a loaded machine) is taken out by the median. Only a clear, lasting difference counts, and only if the step
would be shorter by more than the planner's hysteresis: noise moves nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Plan
from fusion_p2p.planner.replan import HYSTERESIS, MOVING_AVERAGE
from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer
from peer.placement import PlanRequest, rehost
from peer.trainer_live import Live
from peer.trainer_ticks import TickResult

EVERY = 5  # ticks between looks
SLOW = 2.5  # times slower than in its trial step, beyond what the others are, at several looks in a row
LOOKS = 2
EXCLUDED_S = 300.0  # before a peer that was slow may have a stage again


class Balance:
    """Hears every tick; hands a slow peer's stages over with `Live.hand_over`."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._hosts: dict[int, tuple[str, int]] = {}  # stage -> (peer, incarnation) that the average is of
        self._seconds: dict[int, float] = {}
        self._ticks = 0
        self._step_s = 0.0
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
        self._step_s += (MOVING_AVERAGE if self._step_s else 1.0) * (result.time_s - self._step_s)
        self._ticks += 1
        if self._ticks % EVERY == 0 and len(self._seconds) == self._live.now.plan.numerics.stages:
            self._look()

    def _look(self) -> None:
        live = self._live
        ratios = slowness(self._seconds, live.assembly.trial_s())
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
        now_s, then_s = without(live.now.plan, peer, slow[peer], self._seconds, live.atoms, live.devices())
        if now_s - then_s > HYSTERESIS * self._step_s:  # of the step, so that what others wait for counts alone
            live.exclude(peer, EXCLUDED_S)
            saved_s = now_s - then_s
            why = f"it is {slow[peer]:.1f} times slower than the others; without it a step is {saved_s:.2g} s shorter"
            live.hand_over(peer, why, may_stay=True)
            self._slow.clear()


def without(
    plan: Plan,
    peer: str,
    slower: float,
    measured_s: Mapping[int, float],
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
) -> tuple[float, float]:
    """Seconds of a step's busiest device as measured, and with the stages of `peer`, which is `slower` times slower
    than it was, elsewhere; infinite if nobody has room."""
    rate = {(o.peer, o.device): o.flops_per_s / o.correction for o in offers}
    factor = PlanRequest(base=plan.numerics).state_factor
    try:
        moved = rehost(plan, frozenset({peer}), (), atoms, offers, factor)
    except InputError:
        return _busiest_s(plan, measured_s), math.inf
    then = dict(measured_s)
    for p in plan.placement:
        to = moved.host(p.stage)
        if p.peer == peer:
            before = rate.get((p.peer, p.device), rate[to.peer, to.device])
            then[p.stage] *= before / (slower * rate[to.peer, to.device])
    return _busiest_s(plan, measured_s), _busiest_s(moved, then)


def _busiest_s(plan: Plan, seconds: Mapping[int, float]) -> float:
    busy: dict[tuple[str, str], float] = {}
    for p in plan.placement:
        busy[p.peer, p.device] = busy.get((p.peer, p.device), 0.0) + seconds[p.stage]
    return max(busy.values(), default=0.0)


def slowness(measured_s: Mapping[int, float], expected_s: Mapping[int, float]) -> dict[int, float]:
    """Per stage, measured over expected seconds, relative to the median of all stages."""
    ratio = {k: measured_s[k] / expected_s[k] for k in measured_s if expected_s.get(k, 0.0) > 0}
    middle = statistics.median_low(ratio.values()) if ratio else 0.0
    return {k: r / middle if middle > 0 else 1.0 for k, r in ratio.items()}

"""When a plan changes while the run goes on: only if it pays, and not because of noise (DESIGN sections 2 and 5). Pure.

`consider` plans again with what is known now and weighs the best other plan against moving to it. `Adviser` says when
to consider and whether to believe the answer. With pinned numerics only hosts change; else cuts and codecs may too.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Plan
from fusion_p2p.planner.replan import HYSTERESIS, Decision, weigh
from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer
from peer.placement import PlanRequest, make_plan, proposal_of
from peer.plan_rates import Key, Rates, corrections, names, within

EVERY = 4  # ticks between looks
WINDOW = 6  # ticks whose mean counts, the lowest and the highest left out
LOOKS = 2  # in a row that must ask for a change
NEWCOMER = 0.1  # of a step, that a device without a trial step must promise to save beyond those with one
MIN_GAIN_S = 0.02  # of a step: less is not worth a set and new streams
SETUP_S = 2.0  # that a change costs beside moving state: trial steps, streams
REST_TICKS = 12  # between changes; doubled whenever one did not bring half of what was predicted
LOUD = 2.0  # of a device's rate, either way: a change that no rest puts off, unless the last one disappointed
MOST_RESTS = 6  # times it is doubled
BATCH_S = 20.0  # between looks at who has joined or left: a join by itself never makes a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`plan` None: stay. Seconds: of a step now and then, as predicted; 0: the step's time is not the reason.
    `reason` says why in a line."""

    plan: Plan | None
    now_s: float = 0.0
    then_s: float = 0.0
    reason: str = ""


def consider(
    plan: Plan,
    atoms: Sequence[Atom],
    offers: Sequence[DeviceOffer],
    request: PlanRequest,
    *,
    adaptive: bool,
    recut_s: float = 2 * SETUP_S,
) -> Advice:
    """The change that saves most over the horizon, moving included, if any is worth it. `offers` as they are now;
    `recut_s`: what a change of cuts or codecs costs.

    A device that had no trial step is in a plan only where its claim would save NEWCOMER beyond what others can."""
    now = proposal_of(plan, atoms, offers, request)
    found: list[tuple[float, Plan, Decision]] = []
    reason, proven_s = "no other plan fits", now.step_s
    newcomers = any(not o.confirmed for o in offers)
    for canary, pinned in product((False, True) if newcomers else (False,), (True, False) if adaptive else (True,)):
        base = replace(
            request, base=plan.numerics, pinned=pinned, every_device=False, number=plan.number + 1, canary=canary
        )
        try:
            other = make_plan(atoms, offers, base)
        except InputError:
            continue
        if hosts(other) == hosts(plan) and other.numerics == plan.numerics:
            reason = "the plan is the best that is known"
            continue
        setup_s = SETUP_S if other.numerics == plan.numerics else max(recut_s, SETUP_S)
        d = weigh(now, proposal_of(other, atoms, offers, request), setup_s=setup_s)
        gain_s = d.current_step_s - d.new_step_s
        if canary and d.new_step_s > (1 - NEWCOMER) * proven_s:
            continue
        proven_s = proven_s if canary else min(proven_s, d.new_step_s)
        if d.switch and gain_s >= MIN_GAIN_S:
            found.append((gain_s * d.horizon_s / d.current_step_s - d.migration_s, other, d))
        reason = d.reason
    if not found:
        return Advice(plan=None, reason=reason)
    _, other, d = max(found, key=lambda f: f[0])
    return Advice(plan=other, now_s=d.current_step_s, then_s=d.new_step_s, reason=d.reason.removeprefix("switch: "))


def still_pays(advice: Advice, then_s: float) -> str:
    """Why the advice is not worth following now that its plan's steps are expected to take `then_s`, or ""."""
    if advice.now_s <= 0 or then_s <= (1 - HYSTERESIS / 2) * advice.now_s:
        return ""
    return f"trial steps predict {then_s:.3g} s a step instead of {advice.then_s:.3g} s"


def prior_s(plan: Plan, atoms: Sequence[Atom], offers: Sequence[DeviceOffer], request: PlanRequest) -> dict[int, float]:
    """Seconds of a micro-batch that each stage's device promises by its record."""
    plain = [replace(o, correction=1.0) for o in offers]
    return dict(enumerate(proposal_of(plan, atoms, plain, request).score.stage_s))


def hosts(plan: Plan) -> tuple[Key, ...]:
    """(peer, device) of every stage, in order."""
    return tuple((p.peer, p.device) for p in sorted(plan.placement, key=lambda p: p.stage))


def _middle(window: Iterable[float]) -> float:
    """A mean that one odd tick does not move. (The median would not see who is slow every other tick.)"""
    ordered = sorted(window)
    return statistics.fmean(ordered[1:-1] if len(ordered) > 2 else ordered)


class Adviser:
    """Fed with every tick; asked between. Holds no clock: time is what the steps took."""

    def __init__(self, rates: Rates, atoms: int) -> None:
        self.rates, self._atoms = rates, atoms
        self._shaped: tuple[int, ...] | None = None  # cuts whose first look is over
        self._hosts: dict[int, tuple[str, int]] = {}  # stage -> (peer, incarnation) that its window is of
        self._seconds: dict[int, deque[float]] = {}
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._ticks = 0
        self._elapsed_s = 0.0
        self._asked_s = 0.0
        self._seen: frozenset[Key] = frozenset()
        self._links: object = None
        self._news = False  # something is known now that the plan was not made with
        self._wanted = 0  # looks in a row that asked for a change
        self._rests, self._quiet_until = 0, 0
        self._promise: tuple[int, float] | None = None  # tick of the last change, step time that half its gain gives

    def tick(self, plan: Plan, seconds: Mapping[int, float], step_s: float) -> bool:
        """One tick: each stage's seconds of a micro-batch, and the step's. Whether it is time to look."""
        for stage, s in seconds.items():
            p = plan.host(stage)
            if self._hosts.get(stage) != (p.peer, p.incarnation):  # its first tick there warms up
                self._hosts[stage] = p.peer, p.incarnation
                self._seconds[stage] = deque(maxlen=WINDOW)
            else:
                self._seconds[stage].append(s)
        self._step_s.append(step_s)
        self._ticks += 1
        self._elapsed_s += step_s
        full = all(len(self._seconds.get(k, ())) >= EVERY for k in range(plan.numerics.stages))
        return full and self._ticks % EVERY == 0

    def should_plan(
        self, plan: Plan, prior_s: Mapping[int, float], offers: Sequence[DeviceOffer], links: object
    ) -> bool:
        """Take in what the stages' windows say; whether there is a reason to plan again now. `prior_s`: of the atoms as
        `rates.scaled` has them."""
        placed = dict(enumerate(hosts(plan)))
        measured = {k: _middle(window) for k, window in self._seconds.items() if k in placed and window}
        if plan.numerics.cuts != self._shaped:
            self._shaped = plan.numerics.cuts
            if self.rates.shape((0, *plan.numerics.cuts, self._atoms), placed, measured, prior_s):
                return False  # `prior_s` is another now
        told = corrections(placed, measured, prior_s)
        loud = any(not within(c, self.rates.of(key), LOUD) for key, c in told.items())
        news = self.rates.hear(told)
        news = self.rates.use(set(placed.values()), self._elapsed_s) or news
        self._settle()
        if loud and not self._rests:
            self._quiet_until = self._ticks  # somebody broke down: that has nothing to do with the last change
        if self._elapsed_s - self._asked_s >= BATCH_S:
            there = names(offers)
            news = news or there != self._seen or links is not self._links
            self._seen, self._links, self._asked_s = there, links, self._elapsed_s
        self._news = self._news or news or self._wanted > 0
        return self._news and self._ticks >= self._quiet_until

    def judge(self, advice: Advice) -> bool:
        """Whether to follow: the same wish, LOOKS times in a row."""
        self._news = False
        self._wanted = self._wanted + 1 if advice.plan is not None else 0
        return self._wanted >= LOOKS

    def changed(self, advice: Advice | None) -> None:
        """Another plan is in force, by this advice or (None) for another reason."""
        self._wanted = 0
        if advice is not None and advice.now_s > 0 and self._step_s:
            share = 1 - (1 - advice.then_s / advice.now_s) / 2
            self._promise = self._ticks, statistics.median(self._step_s) * share
            self._quiet_until = self._ticks + (REST_TICKS << self._rests)
        self._step_s.clear()

    def _settle(self) -> None:
        """Was the last change worth it? If not, the next one waits longer."""
        if self._promise is None or len(self._step_s) < WINDOW:
            return
        at, most_s = self._promise
        kept = statistics.median(self._step_s) <= most_s
        self._rests = 0 if kept else min(self._rests + 1, MOST_RESTS)
        self._quiet_until = max(self._quiet_until, at + (REST_TICKS << self._rests))
        self._promise = None

"""The stability gate of a run: hears every step's norms and losses, says what is wrong, proposes to step back.

What is wrong is `fusion_p2p.adatopk.gate`'s to say, a pure function of step-numbered figures. With numerics pinned the
answer is an event and nothing else; else other codecs are in force from the next complete set on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import msgspec

from fusion_p2p.adatopk import Finding, GateRules, Observation, Pair, allowed_loss, gate, observe, respond
from fusion_p2p.codec_stats import CodecStats, refreshed, short_of
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.planner.ladder import DENSE, Ladder, default_ladder
from peer.plan_change import Advice
from peer.trainer_live import Live
from peer.trainer_ticks import TickResult

RULES = GateRules()
REFRESH_TICKS = 16  # between looks at what codecs cost here


class GateMemory:
    """Pure: the observations that the gate looks at, each pair's norm under the last dense steps, what was said."""

    def __init__(self, rules: GateRules | None = None) -> None:
        self._rules = rules or GateRules()
        self._seen: deque[Observation] = deque(maxlen=self._rules.window + self._rules.memory)
        self._codecs: tuple[LinkCodec, ...] | None = None
        self._since = 0
        self._dense: dict[Pair, float] = {}
        self._told: dict[Pair | None, int] = {}

    def take(self, seen: Observation, numerics: Numerics) -> tuple[Finding, ...]:
        """What is wrong since this step and was not said in the last `memory` steps."""
        compressed = {(c.src, c.dst) for c in numerics.codecs if c.codec != DENSE.codec}
        if numerics.codecs != self._codecs:  # another entry of the log
            self._codecs, self._since = numerics.codecs, seen.step
            self._told.clear()
        self._seen.append(seen)
        recent = [o for o in list(self._seen)[-self._rules.window :] if o.step >= self._since]
        for pair, norm in seen.norms.items():
            if pair not in compressed and norm == norm and len(recent) == self._rules.window:
                self._dense[pair] = statistics.median(o.norms.get(pair, norm) for o in recent)
        found = gate(list(self._seen), self._since, compressed, self._dense, self._rules)
        fresh = tuple(f for f in found if f.step - self._told.get(f.link, -self._rules.memory) >= self._rules.memory)
        self._told.update((f.link, f.step) for f in fresh)
        return fresh


class Gate:
    """`GateMemory` on a live run. Where AdaTopK chooses and numerics may change, it also keeps the ladder that plans
    choose from: codecs as this run measures them, and none beyond what the gate stepped back from."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._memory, self._stats = GateMemory(RULES), CodecStats()
        self._ladder: Ladder | None = None  # the run's first, less what was stepped back from
        self._answered: Numerics | None = None
        self._ticks = 0

    def tick(self, result: TickResult) -> None:
        """One more training tick's reports."""
        live, numerics = self._live, self._live.now.plan.numerics
        self._ladder = self._ladder or live.ladder or default_ladder(most_loss=math.inf)
        adaptive = live.options.adaptive and allowed_loss(live.options.compression) is not None
        found = self._memory.take(observe(result.header.step, result.loss, result.reports), numerics)
        if found:
            self._ladder = self._step_back(found, numerics, self._ladder, adaptive)
        self._stats.take(result.reports, numerics.codecs)
        self._ticks += 1
        if adaptive and (found or self._ticks % REFRESH_TICKS == 0):
            live.ladder = refreshed(self._ladder, self._stats.figures())

    def _step_back(self, found: tuple[Finding, ...], numerics: Numerics, ladder: Ladder, adaptive: bool) -> Ladder:
        """Says what was found and what follows; the ladder that is left."""
        live = self._live
        proposal = respond(numerics, found, ladder)
        if proposal is None:
            reasons = "; ".join(f.reason for f in found)
            live.say("gate", f"step {found[-1].step}: {reasons}; no codec is left to step back to")
        elif not adaptive:
            kept = "numerics are pinned" if not live.options.adaptive else "the codec was asked for by name"
            live.say("gate", f"step {proposal.step}: {proposal.reason} ({kept}: nothing changes)")
        elif numerics != self._answered:  # once, until the codecs have changed
            self._answered = numerics
            live.say("gate", f"step {proposal.step}: {proposal.reason} (from the next complete set)")
            for old in set(numerics.codecs) - set(proposal.numerics.codecs):
                ladder = short_of(ladder, old.codec)
            plan = msgspec.structs.replace(live.now.plan, numerics=proposal.numerics)
            live.advice = Advice(plan=plan, reason=proposal.reason)
        return ladder

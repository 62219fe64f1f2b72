"""Whether another plan would pay is asked while the run goes on; the answer waits for the next complete set.

Every tick's stage times go to `plan_change.Adviser`, which is pure; planning happens beside the loop. What is advised
is carried out by `trainer_switch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from peer.plan_change import Advice, Adviser, consider, prior_s
from peer.plan_hosts import OPFENCE
from peer.trainer_live import Live
from peer.trainer_ticks import TickResult


class Balance:
    """Hears every training tick; leaves what it advises in `live.advice`."""

    def __init__(self, live: Live, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._live, self._spawn = live, spawn
        self._adviser = Adviser(live.rates)
        self._looking = False
        self._prior: tuple[int, dict[int, float]] = (0, {})  # of plan number, by stage

    def tick(self, result: TickResult) -> None:
        """One more tick's reports."""
        live, count = self._live, len(result.header.sizes)
        if live.options.planner != OPFENCE:
            return  # a baseline's plan stands, so that it can be measured
        seconds = {k: (r.forward_s + r.backward_s) / count for k, r in result.reports.items()}
        look = self._adviser.tick(live.now.plan, seconds, result.time_s)
        undisturbed = not (live.lost or live.leaving or live.advice or live.script or live.placing.locked())
        if look and undisturbed and not self._looking:
            self._looking = True
            self._spawn(self._look())

    def changed(self, advice: Advice | None) -> None:
        """Another plan is in force."""
        self._adviser.changed(advice)

    async def _look(self) -> None:
        live = self._live
        plan, request, offers = live.now.plan, live.request, live.devices()
        try:
            if self._prior[0] != plan.number:
                found = await asyncio.to_thread(prior_s, plan, live.atoms, offers, request)
                self._prior = plan.number, found
            if plan is not live.now.plan or not self._adviser.should_plan(plan, self._prior[1], offers, live.links):
                return
            offers = live.devices()  # with the rates that were just learned
            advice = await asyncio.to_thread(
                consider, plan, live.atoms, offers, request, adaptive=live.options.adaptive, recut_s=live.recut_s
            )
            free = plan is live.now.plan and not live.lost and live.advice is None  # the gate may have spoken meanwhile
            if free and self._adviser.judge(advice):
                live.advice = advice
                live.say("plan", f"another plan is wanted at the next set: {advice.reason}")
        finally:
            self._looking = False

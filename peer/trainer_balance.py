"""Whether another plan would pay is asked while the run goes on; the answer waits for the next complete set.

Every tick's stage times go to `plan_change.Adviser`, which is pure; planning happens beside the loop. What is advised
is carried out by `trainer_switch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fusion_p2p.errors import InputError
from peer.plan_change import Advice, Adviser, consider, hosts, prior_s
from peer.plan_hosts import OPFENCE
from peer.plan_rates import names
from peer.trainer_live import Live
from peer.trainer_ticks import TickResult

log = logging.getLogger(__name__)


class Balance:
    """Hears every training tick; leaves what it advises in `live.advice`."""

    def __init__(self, live: Live, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._live, self._spawn = live, spawn
        self._adviser = Adviser(live.rates, len(live.atoms))
        self.idle = asyncio.Event()  # no look is under way
        self.idle.set()

    def tick(self, result: TickResult) -> None:
        """One more tick's reports."""
        live, count = self._live, len(result.header.sizes)
        if live.options.planner != OPFENCE:
            return  # a baseline's plan stands, so that it can be measured
        seconds = {k: (r.forward_s + r.backward_s) / count for k, r in result.reports.items()}
        look = self._adviser.tick(live.now.plan, seconds, result.time_s)
        undisturbed = not (live.lost or live.leaving or live.advice or live.script or live.placing.locked())
        if look and undisturbed and self.idle.is_set():
            self.idle.clear()
            self._spawn(self._look())

    def changed(self, advice: Advice | None) -> None:
        """Another plan is in force."""
        self._adviser.changed(advice)

    async def _look(self) -> None:
        live = self._live
        plan, request, offers = live.now.plan, live.request, live.devices()
        try:
            if not set(hosts(plan)) <= names(offers):
                return  # of a host that is not on the board, nothing is known to plan with
            prior = await asyncio.to_thread(prior_s, plan, live.rates.scaled(live.atoms), offers, request)
            if plan is not live.now.plan or not self._adviser.should_plan(plan, prior, offers, live.links):
                return
            offers, atoms = live.devices(), live.rates.scaled(live.atoms)  # with what was just learned
            advice = await asyncio.to_thread(
                consider, plan, atoms, offers, request, adaptive=live.options.adaptive, recut_s=live.recut_s
            )
            free = plan is live.now.plan and not live.lost and live.advice is None  # the gate may have spoken meanwhile
            if free and self._adviser.judge(advice):
                live.advice = advice
                live.say("plan", f"another plan is wanted at the next set: {advice.reason}")
        except InputError as error:  # of what others measured: the plan stays
            log.info("no other plan: %s", error)
        finally:
            self.idle.set()

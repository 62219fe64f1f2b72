"""Wild frames: not finite, or far larger than a stream's frames were. Another host computes them again (DESIGN 2).

The stage that received one waits, named. Its sender's stage is rebuilt elsewhere from the newest set, the receiver's
where it is, and what comes then decides: the same bytes, or as wild ones, and the model did it - the verdict of the
step says what follows; something tame, and the first host is not trusted again. A frame that is not named again in time
passes, so that nobody holds the run up with what never comes. Whose suspicions led to nothing is asked ever more
rarely. That a frame was wild is the receiver's word alone: `accusations` says how far it goes.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fusion_p2p.suspicion import FrameId, Suspicion, Watched
from peer.accusations import Accusations
from peer.protocol import Pass, Suspect
from peer.trainer_host import HostLost
from peer.trainer_live import Live

OWN_TICKS = 4  # around a frame that was found to be the model's own, as many ticks' wild ones pass unasked
MOST_DOUBLED = 20  # times: for so many steps, doubled, a reporter's frames pass whose last suspicion led to nothing
JUDGE_S = 600.0  # for the frame to come again once another host computes it
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Case:
    """A frame into `stage`, hosted by `reporter`, that the stage of `sender`, a peer too, made wild."""

    stage: int
    incarnation: int
    reporter: str
    sender: str
    what: Suspicion


class _Found(enum.Enum):
    """What a case ends with: the model made the frame, or its first host did, or it never came again."""

    OWN = enum.auto()
    LIE = enum.auto()
    NOTHING = enum.auto()


class Guardian:
    """On the session's loop. One case at a time: the others wait for its outcome, one for each stage."""

    def __init__(
        self,
        live: Live,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        accusations: Accusations,
        judge_s: float = JUDGE_S,
    ) -> None:
        self._live, self._spawn, self._accusations, self._judge_s = live, spawn, accusations, judge_s
        self._case: _Case | None = None
        self._later: dict[int, _Case] = {}
        self._own_tick: int | None = None  # of the last frame that was found to be the model's own
        self._fruitless: Counter[str] = Counter()  # by reporter
        self._quiet: dict[str, int] = {}  # reporter -> the step before which what it holds passes
        self._passing: dict[int, FrameId | None] = {}  # stage -> the frame it may use, while a task says so

    def hear(self, reporter: str, said: Suspect) -> None:
        """The plan's host of stage `said.stage` holds a frame back."""
        live, frame = self._live, said.what.frame
        senders = range(live.now.plan.numerics.stages)
        if frame.src not in senders or frame.src == said.stage or len(said.what.digest) != DIGEST_BYTES:
            live.exclude(reporter)
            return live.lose(reporter, f"stage {said.stage} suspects what no stage sends: {frame}")
        case = _Case(said.stage, said.incarnation, reporter, live.now.plan.host(frame.src).peer, said.what)
        open_case = self._case
        if open_case is not None and (open_case.stage, open_case.what.frame) == (case.stage, frame):
            if open_case.sender != case.sender:
                self._spawn(self._judge(open_case, said.what))
        elif self._passes(reporter, frame):
            said_before = case.stage in self._passing
            self._passing[case.stage] = frame  # a stage holds one back at a time: no need for a task each
            if not said_before:
                self._spawn(self._pass_on(case.stage))
        elif open_case is not None:
            self._later[case.stage] = case
        else:
            self._case = case
            self._spawn(self._recompute(case))

    def forget(self) -> None:
        """Every stage begins anew: no frame is held any more."""
        self._case, self._later = None, {}
        self._live.assembly.watched.clear()

    def _passes(self, reporter: str, frame: FrameId) -> bool:
        """Whether it is not worth asking."""
        near_own = self._own_tick is not None and abs(frame.tick - self._own_tick) <= OWN_TICKS
        return near_own or self._live.step < self._quiet.get(reporter, 0)

    async def _recompute(self, case: _Case) -> None:
        live, frame = self._live, case.what.frame
        text = f"{case.sender[-8:]} sent {frame} with norm {case.what.norm:.3g}: another host computes it again"
        live.say("suspect", text, peer=case.sender, stage=frame.src)
        live.assembly.watched[case.stage] = (Watched(frame, case.what.bound),)
        live.again.add(case.stage)
        live.may_stay.add(case.sender)
        live.lose(case.sender, f"it sent {frame} with norm {case.what.norm:.3g}", moving=True)
        await live.whole.wait()
        if self._case is not case:
            return
        plan = live.now.plan
        unmoved = plan.host(frame.src).peer == case.sender or plan.host(case.stage).incarnation == case.incarnation
        if unmoved:
            live.again.discard(case.stage)
            live.say("notice", f"{frame} passes: nobody else could compute it again", stage=frame.src)
            return await self._close(case, _Found.OWN)
        await asyncio.sleep(self._judge_s)
        if self._case is case:
            live.say("notice", f"{frame} was not named again within {self._judge_s:g} s", stage=frame.src)
            await self._close(case, _Found.NOTHING)

    async def _judge(self, case: _Case, again: Suspicion) -> None:
        """Another host has computed the frame."""
        live, frame = self._live, case.what.frame
        if self._case is not case:
            return
        if again.digest == case.what.digest or again.wild:
            text = f"{frame} is wild at two hosts: the model made it, and the step decides"
            live.say("notice", text, stage=frame.src)
            return await self._close(case, _Found.OWN)
        judgement = self._accusations.hear(case.reporter, case.sender)
        live.judged(judgement)
        if judgement.out == case.sender:
            how_long = "is not trusted again" if judgement.for_good else f"gets no stage for {judgement.for_s:.0f} s"
            text = f"{case.sender[-8:]} {how_long}: {frame} came with norm {again.norm:.3g} from another host"
            live.say("quarantined", text, peer=case.sender, stage=frame.src)
            return await self._close(case, _Found.LIE)
        reason = f"it alone says of {len(judgement.cleared)} peers that they sent what they must not"
        live.say("quarantined", f"{case.reporter[-8:]} is not trusted again: {reason}", peer=case.reporter)
        live.lose(case.reporter, reason)
        await self._close(case, _Found.NOTHING)

    async def _close(self, case: _Case, found: _Found) -> None:
        live, frame = self._live, case.what.frame
        if found is _Found.OWN:
            self._own_tick = frame.tick
        if found is not _Found.LIE:
            self._fruitless[case.reporter] += 1
            doubled = min(self._fruitless[case.reporter] - 1, MOST_DOUBLED)
            self._quiet[case.reporter] = live.step + OWN_TICKS * 2**doubled
        live.assembly.watched.pop(case.stage, None)
        self._case, later, self._later = None, self._later, {}
        await self._pass(case.stage, frame)
        for other in later.values():
            if found is _Found.OWN:
                await self._pass(other.stage, other.what.frame)
            elif found is _Found.LIE and other.sender == case.sender:  # what the quarantined host sent is made anew
                holder = live.now.plan.host(other.stage).peer
                live.may_stay.add(holder)
                live.lose(holder, f"stage {other.stage} holds a frame of {case.sender[-8:]}", moving=True)
            elif self._case is None:
                self._case = other
                self._spawn(self._recompute(other))
            else:
                self._later[other.stage] = other

    async def _pass_on(self, stage: int) -> None:
        while (frame := self._passing[stage]) is not None:
            self._passing[stage] = None
            await self._pass(stage, frame)
        del self._passing[stage]

    async def _pass(self, stage: int, frame: FrameId) -> None:
        live = self._live
        if stage >= live.now.plan.numerics.stages:
            return  # the cuts are others by now
        host = live.now.plan.host(stage).peer
        try:
            await live.assembly.host(host).send(Pass(run=live.run, stage=stage, frame=frame))
        except HostLost as lost:
            live.lose(lost.peer, lost.reason)

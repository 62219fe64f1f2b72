"""Whom the trainer believes about wild frames, with a stage's host that lies about them. No network, no time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from fusion_p2p.suspicion import FrameId, Suspicion
from peer.accusations import Accusations, Judgement
from peer.protocol import Suspect
from peer.trainer_guard import OWN_TICKS, Guardian

LIAR = "liar"


class FakeLive:
    """Two stages: 0 at one honest peer after another, 1 at the liar. A peer that is lost is replaced at once."""

    def __init__(self) -> None:
        self.run, self.step, self.moves = "0" * 32, 0, 0
        self.again: set[int] = set()
        self.may_stay: set[str] = set()
        self.judgements: list[Judgement] = []
        self.gone: list[str] = []
        self.passed: list[FrameId] = []
        self.whole = asyncio.Event()
        self.whole.set()
        self.assembly = SimpleNamespace(watched={}, host=lambda peer: self)
        plan = SimpleNamespace(numerics=SimpleNamespace(stages=2), host=self._host)
        self.now = SimpleNamespace(plan=plan)

    def _host(self, stage: int) -> SimpleNamespace:
        return SimpleNamespace(peer=LIAR if stage else f"honest{self.moves}", incarnation=self.moves)

    def lose(self, peer: str, reason: str, *, moving: bool = False) -> None:
        self.moves += moving
        self.gone += [] if moving else [peer]

    def judged(self, found: Judgement) -> None:
        self.judgements.append(found)

    def say(self, *words: object, **more: object) -> None:
        pass

    async def send(self, message: Any) -> None:
        self.passed.append(message.frame)


def suspect(live: FakeLive, tick: int, digest: bytes, norm: float) -> Suspect:
    what = Suspicion(FrameId(1, 0, 1, tick, 0), digest * 16, norm, 1.0)
    return Suspect(run=live.run, stage=1, incarnation=live.moves, what=what)


def lying(live: FakeLive, said: list[tuple[int, list[Suspect | None]]]) -> int:
    """`said`: (step, what the liar says then, one after another). How many tasks it took."""
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        guardian = Guardian(cast(Any, live), lambda c: tasks.append(asyncio.ensure_future(c)), Accusations(), 0.0)
        for step, messages in said:
            live.step = step
            for message in messages:
                if message is not None:
                    guardian.hear(LIAR, message)
                for _ in range(10 if message is None else 0):
                    await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    return len(tasks)


def test_who_names_frames_in_vain_moves_nobody_for_ever_longer() -> None:
    live = FakeLive()
    steps = 2000
    lying(live, [(k, [suspect(live, k << 20, b"x", 9.0), None, None]) for k in range(steps)])
    assert 2 <= live.moves <= 1 + (steps // OWN_TICKS).bit_length()
    assert len(set(live.passed)) == steps and not live.judgements


def test_who_has_a_second_peer_found_out_is_the_cause() -> None:
    live = FakeLive()

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        guardian = Guardian(cast(Any, live), lambda c: tasks.append(asyncio.ensure_future(c)), Accusations(), 60.0)
        for tick in (100, 200, 300):
            for digest, norm in ((b"x", 9.0), (b"y", 0.1)):
                guardian.hear(LIAR, suspect(live, tick, digest, norm))
                for _ in range(5):
                    await asyncio.sleep(0)
            if LIAR in live.gone:
                break
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert [j.out for j in live.judgements] == ["honest0", LIAR] and live.gone == [LIAR]
    assert live.judgements[1].cleared == ("honest0", "honest1") and not live.judgements[0].for_good


def test_a_flood_of_names_takes_one_task_a_stage() -> None:
    live = FakeLive()
    first = [suspect(live, 0, b"x", 9.0), None, None]
    flood: list[Suspect | None] = [suspect(live, 1 + k, b"x", 9.0) for k in range(1000)]
    assert lying(live, [(0, first), (1, [*flood, None])]) <= 3
    assert live.passed[-1].tick == 1000 and len(live.passed) <= 3

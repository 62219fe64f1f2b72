"""Spares are greeted beside each other: whoever does not answer holds up nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer import trainer_spares
from peer.trainer_host import HostLost
from peer.trainer_spares import GREETED, Spares


class _Assembly:
    """Who is asleep never answers."""

    def __init__(self) -> None:
        self.linked: list[str] = []
        self.asked: list[str] = []
        self.awake = asyncio.Event()
        self.moved, self.told = False, 0

    async def connect(self, plan: object) -> list[HostLost]:
        self.moved, self.told = False, self.told + 1
        return [HostLost("deaf", "it does not read")]

    def endpoints(self) -> tuple[()]:
        return ()

    def hosts_stage(self, peer: str) -> bool:
        return False

    def part(self, peer: str) -> None:
        self.linked.remove(peer)

    async def greet(self, peer: str) -> None:
        self.asked.append(peer)
        if peer.startswith("asleep"):
            await asyncio.Event().wait()
        self.linked.append(peer)
        self.awake.set()


class _Swarm:
    def __init__(self, looks: list[list[str]]) -> None:
        self._looks, self.known = looks, list[Any]()

    async def offers(self) -> list[Any]:
        names = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        self.known = [SimpleNamespace(peer=name) for name in names]
        return self.known

    async def links(self) -> object:
        return None


def _live(looks: list[list[str]]) -> Any:
    return SimpleNamespace(
        swarm=_Swarm(looks), assembly=_Assembly(), placed=None, links=None, may_host=lambda peer: True,
        placing=asyncio.Lock(), lost={}, anew=None, noted=[], gone=[],
    )  # fmt: skip


async def _note(live: Any, plan: Any) -> None:
    live.noted.append(plan.number)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_spares, "LOOK_S", 0.0)
    monkeypatch.setattr(trainer_spares, "steady", lambda known, measured: measured)
    monkeypatch.setattr(trainer_spares, "note_hosts", _note)


def test_one_that_is_asleep_holds_up_neither_the_look_nor_another() -> None:
    async def run() -> None:
        live = _live([["asleep"], ["asleep", "newcomer"]])
        serving = asyncio.create_task(Spares(live).serve())
        async with asyncio.timeout(30):
            await live.assembly.awake.wait()
        assert live.assembly.linked == ["newcomer"]
        assert live.assembly.asked == ["asleep", "newcomer"], "nobody is asked twice at once"
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(run())


def test_those_that_do_not_answer_count_as_asked() -> None:
    async def run() -> None:
        live = _live([[f"asleep{k}" for k in range(3 * GREETED)]])
        serving = asyncio.create_task(Spares(live).serve())
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(live.assembly.asked) == GREETED
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(run())


def test_who_is_reached_elsewhere_is_told_to_the_others_once_and_not_while_a_plan_changes() -> None:
    async def run() -> None:
        live = _live([[]])
        heard: list[int] = []
        plan = SimpleNamespace(number=7, placement=())
        live.placed = live.now = SimpleNamespace(
            plan=plan, links=SimpleNamespace(update=lambda ends, number: heard.append(number))
        )
        live.lose = lambda peer, reason: live.gone.append(peer)
        live.assembly.moved = True
        await live.placing.acquire()
        serving = asyncio.create_task(Spares(live).serve())
        for _ in range(20):
            await asyncio.sleep(0)
        assert live.assembly.told == 0
        live.lost["somebody"] = "dead"  # whoever mends that tells the new plan
        live.placing.release()
        for _ in range(20):
            await asyncio.sleep(0)
        assert live.assembly.told == 0
        live.lost.clear()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (live.assembly.told, heard, live.noted, live.gone) == (1, [7], [7], ["deaf"])
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(run())

"""Spares are greeted beside each other: whoever does not answer holds up nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer import trainer_spares
from peer.trainer_spares import GREETED, Spares


class _Assembly:
    """Who is asleep never answers."""

    def __init__(self) -> None:
        self.linked: list[str] = []
        self.asked: list[str] = []
        self.awake = asyncio.Event()

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
        swarm=_Swarm(looks), assembly=_Assembly(), placed=None, links=None, may_host=lambda peer: True
    )


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_spares, "LOOK_S", 0.0)
    monkeypatch.setattr(trainer_spares, "steady", lambda known, measured: measured)


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

"""How a trainer learns whether it can be dialled."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from dht.errors import TransportError
from peer import api_session
from peer.api_session import NO_PIPE, _find_pipes
from peer.pipe_service import REACH_S
from tests.simulated_time import simulate


class _Service:
    """`pipes` rests once it is known that nobody can dial."""

    def __init__(self) -> None:
        self.pipes = SimpleNamespace(resting=False, until_rested=self._rested)
        self.heard: list[str] = []
        self.closed = False

    async def _rested(self, timeout_s: float) -> bool:
        return False

    def found(self, reach: str, own: tuple[str, ...]) -> None:
        self.heard.append(reach)
        self.pipes.resting = reach == "none"

    def addresses(self, own: tuple[str, ...]) -> tuple[str, ...]:
        return (*own, *["/by/pipe"] * self.pipes.resting)

    async def close(self) -> None:
        self.closed = True


def test_a_trainer_that_nobody_could_try_is_tried_again_until_somebody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    service, answers = _Service(), ["", "", TransportError("p2pd is busy"), "none"]

    async def start(*_: object) -> _Service:
        return service

    async def reach_of(_: object) -> tuple[str, tuple[str, ...]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, (f"/listens/{len(answers)}",)

    monkeypatch.setattr(api_session, "PipeService", SimpleNamespace(start=start))
    monkeypatch.setattr(api_session, "reach_of", reach_of)

    said: list[Any] = []

    async def main() -> None:
        none: Any = None
        async with contextlib.AsyncExitStack() as stack:
            where = await _find_pipes(none, none, none, stack, said.append)
            assert (where(), service.heard) == (("/listens/3",), [""])
            assert not said
            await asyncio.sleep(3.5 * REACH_S)
            assert [h.text for h in said] == [NO_PIPE]  # it rests nowhere yet
            assert (where(), service.heard) == (("/listens/0", "/by/pipe"), ["", "", "none"])
            await asyncio.sleep(10 * REACH_S)
            assert not answers
        assert service.closed
        answers.extend([""] * 9)
        async with contextlib.AsyncExitStack() as stack:
            await _find_pipes(none, none, none, stack, said.append)
            await asyncio.sleep(2.5 * REACH_S)
        left = len(answers)
        assert left == 9 - 3
        await asyncio.sleep(10 * REACH_S)
        assert len(answers) == left  # who has ended asks no more

    simulate(main())

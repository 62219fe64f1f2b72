"""When a hole is tried for again, and by whom; what a direct connection does to the pipe between two peers."""

from __future__ import annotations

import asyncio

import pytest

from peer.punching import QUIET_S, TRIES, Punching, is_direct, is_due

ONE, TWO = "12D3KooWA", "12D3KooWB"
RELAYED = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWRelay/p2p-circuit"


class World:
    """What `Punching` sees of p2pd, with `me` as this peer, and of its pipes."""

    def __init__(self, me: str) -> None:
        self.peer_id, self.client = me, self
        self.where: dict[str, tuple[str, ...]] = {}
        self.talking: frozenset[str] = frozenset()
        self.done: list[tuple[str, ...]] = []

    async def connected(self) -> dict[str, tuple[str, ...]]:
        return self.where

    async def disconnect(self, peer: str) -> None:
        self.done.append(("disconnect", peer))

    async def connect(self, peer: str, addresses: tuple[str, ...], *, timeout_s: float) -> None:
        self.done.append(("connect", peer, *addresses))

    def end_calls(self, peer: str) -> int:
        self.done.append(("end", peer))
        return 1

    async def find(self, peer: str) -> tuple[str, ...]:
        return (RELAYED,)

    def looked_at(self, *times: float) -> list[tuple[str, ...]]:
        async def main() -> None:
            for now in times:
                await punching._look(now)

        punching = Punching(self, self, find=self.find)  # type: ignore[arg-type]
        asyncio.run(main())
        return self.done


def test_it_is_tried_after_a_silence_and_ever_more_rarely() -> None:
    assert QUIET_S > 120  # what Linux remembers a dial for that nobody answered
    tries = 0
    at: list[int] = []
    for second in range(24 * 3600):
        if is_due(second, tries):
            tries, at = tries + 1, [*at, second]
    assert at == [QUIET_S, 3 * QUIET_S, 7 * QUIET_S, 15 * QUIET_S] and len(at) == TRIES


@pytest.mark.parametrize(("me", "other", "tries"), [(ONE, TWO, 1), (TWO, ONE, 0)])
def test_one_of_the_two_tries(me: str, other: str, tries: int) -> None:
    world = World(me)
    world.talking = frozenset({other})
    world.where = {other: (RELAYED,)}
    assert world.looked_at(0.0, QUIET_S - 1, QUIET_S + 1, QUIET_S + 6) == [
        ("disconnect", other), ("connect", other, RELAYED),
    ][: 2 * tries]  # fmt: skip


def test_who_is_connected_directly_leaves_the_pipe_and_others_stay() -> None:
    world = World(ONE)
    world.talking = frozenset({TWO, "12D3KooWC"})
    world.where = {TWO: (RELAYED, "/ip4/203.0.113.5/tcp/4001"), "12D3KooWC": (RELAYED,)}
    assert world.looked_at(0.0) == [("end", TWO)]
    assert is_direct(world.where[TWO]) and not is_direct(()) and not is_direct((RELAYED,))


def test_a_silence_begins_anew_for_who_comes_again() -> None:
    world = World(ONE)
    punching = Punching(world, world, find=world.find)  # type: ignore[arg-type]

    async def main() -> None:
        for now, talking in ((0.0, {TWO}), (QUIET_S - 5, set()), (QUIET_S + 5, {TWO}), (2 * QUIET_S, {TWO})):
            world.talking = frozenset(talking)
            await punching._look(now)

    asyncio.run(main())
    assert world.done == []

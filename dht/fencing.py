"""The election in production: one task that drives `FenceMachine` over the board and the probes.

fencing = await Fencing.start(board, score=3, busy=lambda: bool(stages))
fencing.stand            # fence, leader, term, and why; None before the first round
fencing.observe(peer, sent_bytes, seconds)     # real traffic refines the link
await fencing.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dht import addresses
from dht.errors import DhtError, RecordError
from dht.fences import FenceMachine, Stand
from dht.node import Board
from dht.probe import Pong, Prober
from dht.rates import is_telling
from dht.records import Record

log = logging.getLogger("dht.fencing")

_AT_ONCE = 8  # pings
_ROUND_LIMIT_S = 40.0
_RETRY_S = 5.0


class Probes(Protocol):
    """What `Fencing` needs of `Prober`; tests emulate links here."""

    async def ping(self, peer: str) -> Pong: ...

    async def rates(self, peer: str) -> tuple[float, float]: ...


class Fencing:
    """Made by `start`. `busy`: the device works; then no bandwidth is probed, real traffic tells instead."""

    def __init__(
        self,
        board: Board,
        machine: FenceMachine,
        *,
        busy: Callable[[], bool],
        on_change: Callable[[Stand], None],
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self.board, self.machine = board, machine
        self.stand: Stand | None = None
        self._busy, self._on_change, self._pace = busy, on_change, 1.0
        self.prober = Prober(
            board.transport, machine.beat, seen_at=lambda peer: seen_at(board, peer), may_probe=lambda: not busy(),
            upload_bytes_per_s=upload_bytes_per_s,
        )  # fmt: skip
        self.probes: Probes = self.prober
        self._published: dict[str, Record] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        board: Board,
        *,
        score: int = 0,
        busy: Callable[[], bool] = lambda: False,
        on_change: Callable[[Stand], None] = lambda stand: None,
        emulate: Callable[[Prober], Probes] | None = None,
        pace: float = 1.0,
        upload_bytes_per_s: float | None = None,
    ) -> Fencing:
        """Serves probes, which send at most `upload_bytes_per_s`, and begins to look around.

        In emulated networks `emulate` wraps the prober, and `pace` is the share of the pauses between rounds that is
        waited for."""
        machine = FenceMachine(board.transport.peer_id, random.Random(), score=score)
        fencing = cls(board, machine, busy=busy, on_change=on_change, upload_bytes_per_s=upload_bytes_per_s)
        fencing._pace = pace
        if emulate is not None:
            fencing.probes = emulate(fencing.prober)
        await fencing.prober.start()
        fencing._task = asyncio.create_task(fencing._run(), name="fencing")
        return fencing

    def observe(self, peer: str, sent_bytes: int, seconds: float) -> None:
        """`sent_bytes` went to `peer` in `seconds` without a pause: a better figure than any probe, at no cost."""
        if is_telling(sent_bytes, seconds):
            self.machine.rated(peer, sent_bytes / seconds, 0.0, self.board.clock.now())

    async def close(self) -> None:
        """Ends the task; the records expire."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(DhtError):
            await self.prober.stop()
        for record in self._published.values():
            self.board.withdraw(record)

    async def _run(self) -> None:
        while True:
            pause_s = _RETRY_S
            try:
                async with asyncio.timeout(_ROUND_LIMIT_S):
                    pause_s = await self._round()
            except (DhtError, TimeoutError) as error:
                log.info("a round of the fence broke off: %s", error or f"not done in {_ROUND_LIMIT_S:g} s")
            except Exception:  # the top of this task: the peer must not lose its fence for ever
                log.exception("a round of the fence failed")
            await asyncio.sleep(pause_s * self._pace * random.uniform(0.9, 1.1))

    async def _round(self) -> float:
        m, now = self.machine, self.board.clock.now
        await self._read()
        relayed = await self._ping_all(m.pings(self.board.strangers(24)))
        target = None if self._busy() else m.probe(now())
        if target is not None and target not in relayed:  # a relay resets a stream of that many bytes
            with contextlib.suppress(DhtError):
                up, down = await self.probes.rates(target)
                m.rated(target, up, down, now())
        stand = m.decide(now())
        self._publish(stand)
        return stand.next_s

    async def _read(self) -> None:
        m, board = self.machine, self.board
        wants = m.reads()

        async def leader() -> None:
            if wants.leader_of is not None:
                m.saw_leaders(await board.leader(wants.leader_of), board.clock.now())

        async def index() -> None:
            if wants.index:
                m.saw_index(await board.fence_heads(), board.clock.now())

        async def members() -> None:
            if wants.shards and wants.leader_of is not None:
                m.saw_members(*await board.members(wants.leader_of, wants.shards), board.clock.now())

        await _all((leader(), index(), members()))

    async def _ping_all(self, peers: Sequence[str]) -> frozenset[str]:
        """Those that are reached through a relay only."""
        gate = asyncio.Semaphore(_AT_ONCE)
        relayed = await _relayed(self.board)

        async def one(peer: str) -> None:
            async with gate:
                try:
                    pong = await self.probes.ping(peer)
                except DhtError as error:
                    log.debug("%s", error)
                    self.machine.missed(peer)
                else:
                    beat, at = pong.beat, self.board.clock.now()
                    self.machine.heard(peer, pong.rtt_s, beat, at, relayed=peer in relayed)

        await _all(tuple(map(one, peers)))
        return relayed

    def _publish(self, stand: Stand) -> None:
        self.board.set_membership(stand.fence, stand.leader, stand.term)
        wanted: dict[str, Record] = {"links": stand.links}
        if stand.resigned is not None:
            wanted["resigned"] = stand.resigned
        if stand.record is not None and stand.head is not None:
            wanted |= {"record": stand.record, "head": stand.head}
        for name, old in self._published.items():
            if name not in wanted or _moved(old, wanted[name]):
                self.board.withdraw(old)
        self._published = wanted
        for record in wanted.values():
            try:
                self.board.publish(record)
            except RecordError as error:  # a peer told us something that nobody could publish
                log.warning("not published: %s", error)
        self.stand = stand
        if stand.reason:
            log.info("fence %s, leader %s: %s", stand.fence, stand.leader[-8:] or "none", stand.reason)
            self._on_change(stand)


def _moved(old: Record, new: Record) -> bool:
    return getattr(old, "fence", "") != getattr(new, "fence", "")


async def _all(tasks: Sequence[Awaitable[None]]) -> None:
    """All of them, then the first error."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _relayed(board: Board) -> frozenset[str]:
    """Connected peers that are reached through a relay only."""
    try:
        found = await board.transport.connected()
    except DhtError:
        return frozenset()
    return frozenset(p for p, where in found.items() if where and all(addresses.is_relayed(a) for a in where))


async def seen_at(board: Board, peer: str) -> str:
    """The IP address of a direct connection to `peer`, "" if there is none."""
    try:
        found = (await board.transport.connected()).get(peer, ())
    except DhtError:
        return ""
    return next((ip for a in found if not addresses.is_relayed(a) and (ip := addresses.ip_of(a))), "")

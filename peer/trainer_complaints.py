"""What hosts say of each other: a neighbour that cannot be reached, a frame that does not fit.

Each may be the truth, a lie, or a cut between just these two. The accused is replaced; `accusations` says for how
long, and when the accuser is taken for the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from peer.accusations import Accusations
from peer.protocol import StageFault
from peer.trainer_live import Live

PATIENCE = 1.5  # times `dead_s` that two hosts which we reach may fail to reach each other


class Complaints:
    """`hear` takes faults that name another peer. All on one loop."""

    def __init__(
        self, live: Live, spawn: Callable[[Coroutine[Any, Any, None]], None], accusations: Accusations
    ) -> None:
        self._live, self._spawn, self._accusations = live, spawn, accusations
        self._unreached: set[tuple[str, str]] = set()  # (who says so, of whom)

    def hear(self, reporter: str, fault: StageFault) -> None:
        """`reporter` hosts the stage that the fault is of; `fault.peer` is the one it concerns, if it is a host."""
        pair = reporter, fault.peer
        if all(p.peer != fault.peer for p in self._live.now.plan.placement):
            return
        match fault.code:
            case "peer-lost":
                if pair not in self._unreached:
                    self._unreached.add(pair)
                    self._spawn(self._wait(reporter, fault))
            case "back":
                self._unreached.discard(pair)
            case "peer-frame":
                found = self._accusations.hear(reporter, fault.peer)
                self._live.judged(found)
                self._live.lose(found.out, f"stage {fault.stage} says: {fault.reason}")

    def forget(self) -> None:
        """Every stage begins anew: what was said of streams that are no more counts for nothing."""
        self._unreached.clear()

    async def _wait(self, reporter: str, fault: StageFault) -> None:
        """Two hosts that both reach us but not each other: after a while one of them is replaced."""
        live = self._live
        await asyncio.sleep(PATIENCE * live.options.channels.dead_s)
        hosts = {p.peer for p in live.now.plan.placement}
        if (reporter, fault.peer) not in self._unreached or not hosts >= {reporter, fault.peer}:
            return self._unreached.discard((reporter, fault.peer))
        blamed = max(reporter, fault.peer, key=lambda peer: (sum(peer in pair for pair in self._unreached), peer))
        self._unreached = {pair for pair in self._unreached if blamed not in pair}
        live.gone(blamed, f"stage {fault.stage} cannot reach a neighbour: {fault.reason}")

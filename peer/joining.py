"""Joining a swarm whose addresses may all be dead just now: name each, back off, keep trying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from dht.errors import SwarmUnreachable
from dht.p2p import P2PTransport

FIRST_S, MOST_S = 1.0, 60.0
_LOOK_S = 1.0


def delay_s(attempt: int, spread: float) -> float:
    """Before try number `attempt` + 2, from 0; `spread` in 0..1 keeps peers that start at once apart."""
    return min(MOST_S, FIRST_S * 2.0 ** min(attempt, 10)) * (0.75 + 0.5 * spread)


async def join_patiently(transport: P2PTransport, *, give_up_s: float, say: Callable[[str], None]) -> bool:
    """Until an address of the swarm answers or another peer comes here: True. False: none does, but this peer is named
    among them itself, so the swarm begins here. SwarmUnreachable after `give_up_s` (0: never)."""
    loop = asyncio.get_running_loop()
    start, attempt = loop.time(), 0
    while True:
        try:
            await transport.join(timeout_s=10.0)
            return True
        except SwarmUnreachable as error:
            if any(a.endswith(f"/p2p/{transport.peer_id}") for a in transport.bootstrap):
                return False
            wait_s = delay_s(attempt, random.random())
            if give_up_s and loop.time() - start + wait_s > give_up_s:
                raise
            say(f"{error}; trying again in {wait_s:.0f} s (Ctrl-C ends)")
        until, attempt = loop.time() + wait_s, attempt + 1
        while loop.time() < until:
            await asyncio.sleep(min(_LOOK_S, until - loop.time()))
            if await transport.connected():
                return True

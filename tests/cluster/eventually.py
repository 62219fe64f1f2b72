"""What the board or another process says in its own time: asked again until it holds, however slow the machine is.

What must hold at once, or never, is no case for this: whatever waits here proves that a thing comes, not when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dht.errors import DhtError

T = TypeVar("T")
WITHIN_S = 240.0


async def comes(check: Callable[[], Awaitable[T]], what: str, timeout_s: float = WITHIN_S, every_s: float = 0.3) -> T:
    """The first true answer of `check`. A board that does not answer is asked again."""
    end, last = time.monotonic() + timeout_s, ""
    while True:
        try:
            if found := await check():
                return found
        except DhtError as error:
            last = f" (last: {error})"
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s{last}"
        await asyncio.sleep(every_s)


def until(check: Callable[[], T], what: str, timeout_s: float = WITHIN_S, every_s: float = 0.3) -> T:
    """As `comes`, for a check that is no coroutine."""
    end = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(every_s)
    return found

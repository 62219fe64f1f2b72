"""An event loop with a simulated clock, for tests of what waits, beats, gives up and tries again.

Each turn of the loop takes TURN_S of it, whatever it really took; while the loop waits for a thread time stands still,
and where nothing can run it jumps to the next timer. So limits and heartbeats come in the order of their times however
slow or often stopped the machine is, and an hour of waiting takes no time. What looks at other clocks is not simulated.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
TURN_S, LIMIT_S = 1e-4, 8 * 3600.0


class _Selector(selectors.DefaultSelector):
    """Asked once a turn. Where others sleep until the next timer, this one moves `now` there."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.working = 1000.0, 0  # seconds; calls on threads that are not back

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += TURN_S
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(None if self.working else 0)
        if not found:
            self.now += max(0.0, timeout - TURN_S)
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time` is simulated; see above."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now

    def freeze(self, seconds: float) -> None:
        """This process is stopped for so long: timers are due, and what came meanwhile is still to be read."""
        self._simulated.now += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._simulated.working += 1
        future.add_done_callback(self._back)
        return future

    def _back(self, future: asyncio.Future[Any]) -> None:
        self._simulated.working -= 1


def simulate(work: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
    """`asyncio.run` in simulated time; TimeoutError if `work` takes more of it than `limit_s`: it hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(bounded())

"""A thread with its own uvloop, for the blocking API: notebooks and plain scripts need no event loop of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from peer.interrupts import LOOP_S

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. Start with `start`, end with `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Wait for `work` to end on the loop. A KeyboardInterrupt (or the time running out) cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except (KeyboardInterrupt, concurrent.futures.TimeoutError):
            future.cancel()
            raise

    def stop(self, timeout_s: float = LOOP_S) -> None:
        """Cancel what still runs and join the thread, within about `timeout_s`."""
        if self._thread.is_alive():
            until = time.monotonic() + timeout_s
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self.call(_cancel_all(timeout_s * 0.8), timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(0.2, until - time.monotonic()))
        if not self._loop.is_running():
            self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_all(timeout_s: float) -> None:
    """Again and again: a part that takes long to close is cancelled in its turn."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=min(left, timeout_s / 4))

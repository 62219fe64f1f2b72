"""The tasks of a trainer session: whatever ends one ends the session, by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dht.errors import DhtError
from fusion_p2p.errors import FusionError
from peer.errors import is_disk_full

log = logging.getLogger(__name__)

T = TypeVar("T")


class SessionTasks:
    """On one loop, from `begin` on. `failed` hears the first failure, and those after it."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._on_failure = failed
        self._failed: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the session ends; its failure is the session's."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> list[asyncio.Task[None]]:
        """The session ends; the tasks to wait for."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def or_fail(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or the session's failure if that comes first."""
        assert self._failed is not None
        task = asyncio.ensure_future(work)
        try:
            either: list[asyncio.Future[Any]] = [task, self._failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failed.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """The top of each task of the session."""
        try:
            await work
        except (FusionError, DhtError) as error:
            self._fail(error)
        except Exception as error:
            if not is_disk_full(error):
                log.exception("a task of the trainer failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # told to `failed`, and to whoever comes to `or_fail`
        self._on_failure(error)

"""The executor's compute thread: everything that touches torch runs here, one unit of work at a time.

The loop thread keeps the streams and their heartbeats alive meanwhile. A stage that fails is taken out and reported;
the thread and the other stages go on.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from fusion_p2p.frame import Frame
from fusion_p2p.stage import Stage
from fusion_p2p.suspicion import Suspicion
from peer.executor_memory import let_go
from peer.links import Links
from peer.protocol import Accepted

log = logging.getLogger(__name__)

TICKS_TAKEN = 1  # beyond the present one; a replay of a hundred ticks waits in the links, which bound it
T = TypeVar("T")
Key = tuple[str, int]
Snapshot = dict[str, torch.Tensor]


class Hosted:
    """One stage, its links, and what the compute thread knows of its progress. Fields are read from the loop too."""

    def __init__(self, key: Key, stage: Stage, threads: int) -> None:
        self.key, self.stage, self.threads = key, stage, threads
        self.links: Links | None = None  # until they are there the stage only waits
        self.marks: dict[int, Callable[[Snapshot | Exception], None]] = {}  # tick -> who wants it; the loop adds
        self.waiting_for = ""
        self.waiting_since = 0.0
        self.held_up_s = 0.0  # in all: its outbox was full
        self.stage_flops: dict[int, float] = {}  # of a micro-batch, by stage
        self.accepted: Accepted | None = None  # what the trainer was told when the stage came
        self.on_suspicion: Callable[[Suspicion], None] = lambda suspicion: None  # on the compute thread
        self._named: Suspicion | None = None
        self._full_since: float | None = None

    def work(self, now: float) -> bool:
        """Take what has come and perform one unit; False if there was nothing to do."""
        links = self.links
        if links is None:
            return False
        while (frame := links.get_nowait(self.stage.tick + TICKS_TAKEN)) is not None:
            self.stage.offer(frame)
        self._snapshot()
        if not links.wait_room(0):
            self._full_since = now if self._full_since is None else self._full_since
            return self._wait("room in a full outbox", now)
        if self._full_since is not None:
            self.held_up_s, self._full_since = self.held_up_s + now - self._full_since, None
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        sent: list[Frame] | None = self.stage.advance()
        if sent is None:
            if self.stage.suspicion is not self._named:
                self._named = self.stage.suspicion
                if self._named is not None:
                    self.on_suspicion(self._named)
            return self._wait(self.stage.waiting_for(), now)
        self.waiting_for = ""
        for frame in sent:
            links.post(frame)
        return True

    def _wait(self, what: str, now: float) -> bool:
        if what != self.waiting_for:
            self.waiting_for, self.waiting_since = what, now
        return False

    def _snapshot(self) -> None:
        """Serve the mark at this boundary. A mark of a tick that has begun already cannot be served."""
        for tick in [t for t in tuple(self.marks) if t <= self.stage.tick]:
            deliver = self.marks.pop(tick)
            if tick < self.stage.tick:
                deliver(ValueError(f"the mark at tick {tick} came when the stage was at tick {self.stage.tick}"))
            else:
                deliver(self.stage.snapshot())


class ComputeThread:
    """`failed` is called, on this thread, with a stage that was taken out and why."""

    def __init__(
        self, failed: Callable[[Hosted, Exception], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failed, self._clock = failed, clock
        self._hosted: dict[Key, Hosted] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do. Any thread."""
        self._wake.set()

    def call(self, job: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `job` on the compute thread, between units of work."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except Exception as error:  # goes to whoever awaits the future
                future.set_exception(error)

        self._jobs.append(run)
        self._wake.set()
        return future

    def add(self, hosted: Hosted) -> None:
        self._hosted[hosted.key] = hosted

    def remove(self, hosted: Hosted) -> None:
        if self._hosted.get(hosted.key) is hosted:
            del self._hosted[hosted.key]

    def _run(self) -> None:
        while True:
            self._wake.clear()
            while self._jobs:
                self._jobs.popleft()()
            busy = [self._work(hosted) for hosted in list(self._hosted.values())]
            if not any(busy) and not self._jobs:
                self._wake.wait()

    def _work(self, hosted: Hosted) -> bool:
        try:
            return hosted.work(self._clock())
        except Exception as error:  # the top of this thread's work: the stage ends, the others go on
            self.remove(hosted)
            let_go(error)
            self._failed(hosted, error)
            return True

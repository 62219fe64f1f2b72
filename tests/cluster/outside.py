"""What a process takes, read from outside it: its resident memory while something goes on, its threads' time."""

from __future__ import annotations

import threading

import psutil

LOOK_S = 0.01


class Resident:
    """A context manager; `most_bytes` of resident memory that the kernel counted for `process` meanwhile."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._end = process, threading.Event()
        self.first_bytes = self.most_bytes = int(process.memory_info().rss)
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self.most_bytes = max(self.most_bytes, int(self._process.memory_info().rss))
            except psutil.Error:
                return

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def thread_seconds(process: psutil.Process) -> dict[int, float]:
    """CPU seconds that each thread has taken so far."""
    return {t.id: t.user_time + t.system_time for t in process.threads()}


def busy_threads(before: dict[int, float], after: dict[int, float], share: float = 0.2) -> int:
    """How many threads took at least `share` of what the busiest took: on a machine of any speed and load, those that
    the work was divided among."""
    took = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return sum(t >= share * max(took) for t in took) if max(took, default=0.0) > 0 else 0

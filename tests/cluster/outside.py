"""What a process takes, read from outside it: its resident memory while something goes on, its threads' time."""

from __future__ import annotations

import re
from pathlib import Path

import psutil


class Resident:
    """`most_bytes` of resident memory that `process` had, by the kernel's own high-water mark, which misses nothing
    however seldom this process gets a turn. An executor begins the mark anew with each trial step: look after each."""

    def __init__(self, process: psutil.Process) -> None:
        self._status = Path(f"/proc/{process.pid}/status")
        (self._status.parent / "clear_refs").write_text("5")
        self.first_bytes = self.most_bytes = int(process.memory_info().rss)

    def look(self) -> None:
        (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", self._status.read_text("ascii"))
        self.most_bytes = max(self.most_bytes, int(peak) << 10)


def thread_seconds(process: psutil.Process) -> dict[int, float]:
    """CPU seconds that each thread has taken so far."""
    return {t.id: t.user_time + t.system_time for t in process.threads()}


def busy_threads(before: dict[int, float], after: dict[int, float], share: float = 0.2) -> int:
    """How many threads took at least `share` of what the busiest took: on a machine of any speed and load, those that
    the work was divided among."""
    took = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return sum(t >= share * max(took) for t in took) if max(took, default=0.0) > 0 else 0

"""Caps on what a volunteer gives in the long run: traffic a month, disk. Read from outside the processes that use it.

Traffic is what p2pd read, as the kernel counts it: each byte of a stream passes it once, whichever way.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec

from fusion_p2p.outboxes import disk_shares

PAYLOAD = 0.95  # of a cap; the rest is the transport's own envelope, the board and control streams
BLOB_SHARE = 0.25  # of a cap, for snapshots


class Traffic(msgspec.Struct):
    """traffic.json: what passed in a month, "2026-11"; kept over restarts."""

    month: str = ""
    total_bytes: int = 0


def process_read_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """What the kernel counts as read by this process since its start; None where it does not tell."""
    try:
        for line in (proc / str(pid) / "io").read_text("ascii").splitlines():
            if line.startswith("rchar:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


class MonthlyCap:
    """`cap_bytes` None: no cap; it still counts. `look` now and then, with p2pd's process id."""

    def __init__(self, folder: Path, cap_bytes: int | None) -> None:
        self._file, self.cap_bytes = folder / "traffic.json", cap_bytes
        self._last: tuple[int, int] = (0, 0)  # (process, what it had read)
        try:
            self.traffic = msgspec.json.decode(self._file.read_bytes(), type=Traffic)
        except (OSError, msgspec.DecodeError, RecursionError):
            self.traffic = Traffic()

    def look(self, pid: int | None, month: str) -> None:
        read = None if pid is None else process_read_bytes(pid)
        if pid is None or read is None:
            return
        last_pid, last = self._last
        new = read - last if pid == last_pid else read
        self._last = (pid, read)
        if month != self.traffic.month:
            self.traffic = Traffic(month)
        if new <= 0:
            return
        self.traffic.total_bytes += new
        draft = self._file.with_name(".traffic.json")
        draft.write_bytes(msgspec.json.encode(self.traffic))
        draft.replace(self._file)

    def over(self) -> str:
        """Why no more may pass in this month; "" while it may."""
        if self.cap_bytes is None or self.traffic.total_bytes < self.cap_bytes:
            return ""
        return f"{self.traffic.total_bytes / 1e9:.1f} of {self.cap_bytes / 1e9:.1f} GB (--monthly-gb) passed this month"


def upload_shares(rate: float | None, relay: float | None, executors: int) -> tuple[float | None, float | None]:
    """(bytes per second for snapshots, for each executor's tensors) of an upload cap, None without one. What is offered
    to pipes is set aside."""
    if rate is None:
        return None, None
    own = (rate - (relay or 0.0)) * PAYLOAD
    return own * BLOB_SHARE, own * (1 - BLOB_SHARE) / executors


def download_shares(rate: float | None, relay: float | None, executors: int) -> tuple[float, float] | None:
    """(for the daemon, for each executor that attaches to its p2pd) of a download cap."""
    if rate is None:
        return None
    own = max(0.0, rate - (relay or 0.0)) * PAYLOAD
    return own * BLOB_SHARE + (relay or 0.0), own * (1 - BLOB_SHARE) / executors


def this_month() -> str:
    return time.strftime("%Y-%m")


def held_bytes(folder: Path) -> int:
    """What the files of a folder take; those that vanish meanwhile count nothing."""
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def over_disk(folder: Path, cap_bytes: int | None) -> str:
    """Why nothing more may be kept there; "" while it may."""
    if cap_bytes is None:
        return ""
    held = held_bytes(folder)
    if held <= cap_bytes:
        return ""
    return f"{held / 2**30:.2f} GiB are held for others, more than --disk {cap_bytes / 2**30:.2f} GiB"


def blob_bytes(cap_bytes: int | None) -> int | None:
    """How much of --disk snapshots may take."""
    return None if cap_bytes is None else int(disk_shares(cap_bytes)[0])


def spill_bytes(folder: Path, cap_bytes: int | None) -> int:
    """How much of the disk outboxes may take when memory is short: a part of --disk, or of what is free now."""
    return int(disk_shares(shutil.disk_usage(folder).free if cap_bytes is None else cap_bytes)[1])

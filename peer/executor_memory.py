"""The executor's memory: a limit that turns into a refusal with figures, and what is said when it is met.

On the CPU the limit is RLIMIT_DATA (private writable memory, which is what tensors are); RLIMIT_AS would also count
the libraries' address space. The daemon's watchdog on resident memory stands behind it. On CUDA it is the allocator's.
"""

from __future__ import annotations

import contextlib
import re
import resource
import traceback
from pathlib import Path

import msgspec
import torch

_ASKED = re.compile(r"(?:you tried to allocate|Tried to allocate) ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class MemoryLimit(msgspec.Struct, frozen=True):
    """`cap_bytes`: most that this process may hold on `device` (resident memory, or allocated on CUDA)."""

    device: str
    cap_bytes: int
    base_bytes: int  # held before any stage

    def held(self) -> int:
        if self.device == "cpu":
            return _status("VmRSS")
        return int(torch.cuda.memory_allocated(self.device))

    def peak(self) -> int:
        """Most held since `reset_peak`."""
        if self.device == "cpu":
            return _status("VmHWM")
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):  # some sandboxes forbid it: the peak is then that of the process's life
            Path("/proc/self/clear_refs").write_text("5")


def limit_memory(device: str, memory_bytes: int, vram_bytes: int) -> MemoryLimit:
    """Apply the caps to this process, from what it holds now on."""
    if device != "cpu":  # the driver maps far more host memory than it uses: there the daemon's watchdog stands alone
        total = int(torch.cuda.get_device_properties(device).total_memory)
        cap = min(total, vram_bytes) if vram_bytes else total
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
        return MemoryLimit(device, cap, int(torch.cuda.memory_allocated(device)))
    resident = _status("VmRSS")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = _status("VmData") + max(0, memory_bytes - resident)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    return MemoryLimit(device, memory_bytes, resident)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _ASKED.search(str(error)) is not None
    )


def asked_bytes(error: BaseException) -> int:
    """The allocation that failed, as far as the message tells; 0 otherwise."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def let_go(error: BaseException | None) -> None:
    """Free what the frames of a failure hold, a step's tensors among it: whoever is told of the error keeps it, often
    in a circle that only the collector finds, while the next stage needs the memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _status(field: str) -> int:
    """A memory figure of this process from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    return 0

"""A device's rates and memory, measured in the executor, which has torch; the daemon only reads sizes from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from fusion_p2p.errors import InputError

if TYPE_CHECKING:
    import torch

OPERATORS = "operators"  # in FUSION_HOME: how long operators take here
_MATRIX = 768
_COPY_FLOATS = 8 << 20
_MEASURE_S = 0.25


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`flops_per_s`: fp32 matrix products; `memory_bytes_per_s`: bytes read and written by a copy."""

    device: str
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int


def host_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def available_memory_bytes() -> int:
    return int(psutil.virtual_memory().available)


def device_names(wanted: str) -> tuple[str, ...]:
    """The devices that `--device` asks for, by name. Without torch only "cpu" and numbered ones can be told.

    auto: every CUDA device if the driver shows one, else the CPU. InputError for anything else than auto, cpu,
    cuda:N or cuda:all.
    """
    if wanted == "cpu":
        return ("cpu",)
    cards = cuda_count()
    if wanted == "auto":
        return tuple(f"cuda:{i}" for i in range(cards)) or ("cpu",)
    kind, _, which = wanted.partition(":")
    if kind != "cuda" or not (which == "all" or which.isdecimal()):
        raise InputError(f"--device {wanted!r} is unknown; use auto, cpu, cuda:0 or cuda:all")
    if not cards:
        raise InputError(f"--device {wanted}: this host shows no CUDA device; use --device cpu")
    if which == "all":
        return tuple(f"cuda:{i}" for i in range(cards))
    if int(which) >= cards:
        raise InputError(f"--device {wanted}: this host has {cards} CUDA devices, cuda:0 to cuda:{cards - 1}")
    return (f"cuda:{which}",)


def cuda_count() -> int:
    """CUDA devices that torch will see: those of the driver, within $CUDA_VISIBLE_DEVICES. Does not load torch."""
    cards = sum(p.name.removeprefix("nvidia").isdecimal() for p in Path("/dev").glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return cards if visible is None else min(cards, sum(v.strip() not in ("", "-1") for v in visible.split(",")))


def measure(device: str) -> DeviceFigures:
    """About a second of matrix products and copies on the device, with the threads that torch may use."""
    import torch

    where = torch.device(device)
    cuda = where.type == "cuda"
    memory = torch.cuda.get_device_properties(where).total_memory if cuda else host_memory_bytes()
    size = _MATRIX if where.type == "cpu" else 4096
    a = torch.randn(size, size, device=where)
    b = torch.randn(size, size, device=where)
    source = torch.zeros(_COPY_FLOATS, device=where)
    target = torch.empty_like(source)
    product = torch.empty_like(a)
    flops = 2.0 * size**3 / _best_s(lambda: torch.mm(a, b, out=product), where)
    rate = 2.0 * source.numel() * 4 / _best_s(lambda: target.copy_(source), where)
    return DeviceFigures(
        device=device,
        name=device_name(where),
        flops_per_s=flops,
        memory_bytes_per_s=rate,
        memory_bytes=int(memory),
    )


def device_name(where: torch.device) -> str:
    """What the maker calls it."""
    import torch

    return torch.cuda.get_device_name(where) if where.type == "cuda" else _cpu_name()


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of many runs: what the device can do when nobody disturbs it."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    best, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, timed())
    return best


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()[:60]
    except OSError:
        pass
    return "cpu"

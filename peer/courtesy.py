"""A volunteer's machine is its owner's first: what tells that it runs on battery, or that its user is at it.

`why_pause` decides, on what `look` reads: psutil for the battery; logind's graphical sessions and the terminals that
people are logged in at for the user. Where a system tells neither, `idle_s` is None and the preflight says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

_LOGIND_S = 3.0


class Courtesy(msgspec.Struct, frozen=True, kw_only=True):
    """What `fusion-peer join` was told. `idle_s` 0: the user's activity does not matter."""

    on_battery: bool = False  # pause on battery
    idle_s: float = 0.0  # compute once the user has been away this long

    @property
    def asked(self) -> bool:
        return self.on_battery or self.idle_s > 0


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """`on_battery` None: no battery. `idle_s`: since the user's last input; None: the system does not tell."""

    on_battery: bool | None = None
    idle_s: float | None = None


def why_pause(courtesy: Courtesy, now: Surroundings) -> str:
    """Why nothing is computed now; "" if it is. What is not known holds nothing up."""
    if courtesy.on_battery and now.on_battery:
        return "on battery (--pause-on-battery)"
    if courtesy.idle_s > 0 and now.idle_s is not None and now.idle_s < courtesy.idle_s:
        return f"its user is active (--pause-while-active {courtesy.idle_s / 60:g})"
    return ""


def untold(courtesy: Courtesy, now: Surroundings) -> str:
    """What was asked for and this system does not tell; "" if it tells."""
    missing = []
    if courtesy.on_battery and now.on_battery is None:
        missing.append("no battery is found: --pause-on-battery has no effect")
    if courtesy.idle_s > 0 and now.idle_s is None:
        missing.append("this system does not tell when its user is active: --pause-while-active has no effect")
    return "; ".join(missing)


def look() -> Surroundings:
    """As it is now. May take a moment: call it on a thread."""
    return Surroundings(on_battery=_on_battery(), idle_s=_least(_graphical_idle_s(), _terminal_idle_s()))


def _on_battery() -> bool | None:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _least(*known: float | None) -> float | None:
    return min((k for k in known if k is not None), default=None)


def _terminal_idle_s() -> float | None:
    """By the terminals of those who are logged in: reading from one moves its access time."""
    idle = []
    for user in psutil.users():
        with contextlib.suppress(OSError):
            idle.append(max(0.0, time.time() - os.stat(f"/dev/{user.terminal}").st_atime))
    return min(idle, default=None)


def _graphical_idle_s() -> float | None:
    if shutil.which("loginctl") is None:
        return None
    listed = _loginctl("list-sessions", "--no-legend")
    names = [line.split()[0] for line in listed.splitlines() if line.split()]
    shown = [_loginctl("show-session", n, "-p", "Type", "-p", "IdleHint", "-p", "IdleSinceHint") for n in names[:16]]
    return idle_of(shown, time.time())


def _loginctl(*argv: str) -> str:
    try:
        done = subprocess.run(["loginctl", *argv], capture_output=True, text=True, timeout=_LOGIND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def idle_of(sessions: Sequence[str], now: float) -> float | None:
    """Seconds since the last input in any graphical session, by logind's own lines; None where there is none."""
    idle = []
    for text in sessions:
        found: Mapping[str, str] = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if found.get("Type") not in ("x11", "wayland", "mir"):
            continue
        since = found.get("IdleSinceHint", "0")
        hinted = found.get("IdleHint") == "yes" and since.isdigit()
        idle.append(max(0.0, now - int(since) / 1e6) if hinted else 0.0)
    return min(idle, default=None)


class Watch:
    """Looks every `every_s`, on a thread of the caller's; remembers the last reason."""

    def __init__(self, courtesy: Courtesy, *, every_s: float = 10.0, look: Callable[[], Surroundings] = look) -> None:
        self.courtesy, self._every_s, self._look = courtesy, every_s, look
        self._at = float("-inf")
        self.reason = ""

    def due(self, now: float) -> bool:
        return self.courtesy.asked and now - self._at >= self._every_s

    def update(self, now: float) -> str:
        self._at = now
        self.reason = why_pause(self.courtesy, self._look())
        return self.reason

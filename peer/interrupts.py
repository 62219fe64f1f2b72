"""Ctrl-C and SIGTERM: one budget for all that ends, and an end also where something hangs.

`undisturbed` lets what cleans up finish: each such part is bounded, together below END_S. `end_in_time` stands behind
it for programs of ours: END_S after the first signal, or at the second, what this process started is killed and its
temporary folders go, and the process with them, whatever its main thread does. `leave` is how they end otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SESSION_S, LOOP_S, KILL_AFTER_S = 3.0, 1.5, 3.0  # freeing the volunteers; ending our tasks; SIGTERM to SIGKILL
END_S = 9.0
_OURS = (
    "peer.lab.local_swarm",
    "dht.p2pd",
    "peer.lab.netns",
)  # each with an `end_all`; in this order: volunteers leave folders too


# prctl's option 1 is PR_SET_PDEATHSIG; it outlives the exec.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[2])); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.executable, [sys.executable, '-m', *sys.argv[3:]])"
)


def bound_command(number: signal.Signals, module: str, *arguments: str) -> list[str]:
    """`python -m module arguments` as a child of this process that gets signal `number` when this process dies, however
    it dies. (Linux ties it to the thread that starts the child.)"""
    return [sys.executable, "-c", _BOUND, str(os.getpid()), str(int(number)), module, *arguments]


def leave(code: int) -> NoReturn:
    """End this process now, after what was registered to run at its end.

    The interpreter's own end walks every object that torch and a capture made: seconds where the machine is loaded, in
    which no thread runs that could end it in time.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Further signals to end do not interrupt the body; on the main thread, which alone hears them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _heard(number: int, frame: FrameType | None) -> None:
    """No SIG_IGN, which children would inherit and `end_in_time` not see."""


def end_in_time(program: str) -> None:
    """From now on this process ends within END_S of its first SIGINT (code 130) or handled SIGTERM (143)."""
    watched, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(watched, program), name="end in time", daemon=True).start()


def _watch(watched: socket.socket, program: str) -> None:
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143}
    until, code = 0.0, 0
    while True:
        watched.settimeout(max(0.01, until - time.monotonic()) if code else None)
        try:
            heard = [ends[signal.Signals(n)] for n in watched.recv(16) if n in ends]
        except TimeoutError:
            break
        again = len(heard) > 1 or bool(heard and code)
        if heard and not code:
            until, code = time.monotonic() + END_S, heard[0]
        if again:
            break
    for name in _OURS:
        end_all = getattr(sys.modules.get(name), "end_all", None)
        if end_all is not None:
            end_all()
    word = "Ctrl-C" if code == 130 else "SIGTERM"
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{program}: ended by {word}, at once\n".encode())
    os._exit(code)

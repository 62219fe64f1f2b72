"""Speaking to a trainer that runs: a private unix socket and a lock in its run folder.

One request a connection, one JSON line each way. `status` answers only; `pause` and `stop` are noted, and the training
loop obeys at the next step boundary.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from fusion_p2p.errors import InputError

SOCKET, LOCK, SESSION_LOCK = "control.sock", "trainer.lock", "session.lock"
_MAX_LINE = 4096
_ANSWER_S = 30.0  # the end of a trainer is seen at once; one on a busy machine answers late
_END_S = 5.0


class Request(msgspec.Struct, frozen=True):
    command: Literal["status", "pause", "stop"]


class Answer(msgspec.Struct, frozen=True):
    pid: int
    text: str


class TrainerLock:
    """Held while a trainer works on the folder; the system lets go of it when the process ends, however it ends.

    `name`: the command's lock, or the one of a `Run`, which a command holds inside its own.
    """

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        self._folder, self._name = folder, name
        self._descriptor = -1

    def __enter__(self) -> TrainerLock:
        self._descriptor = os.open(self._folder / self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._descriptor)
            raise InputError(
                f"{self._folder} is in use by another trainer; end that: fusion-run stop {self._folder}"
            ) from e
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def is_running(folder: Path) -> bool:
    """Whether a trainer holds the folder's lock."""
    if not (folder / LOCK).exists():
        return False
    try:
        with TrainerLock(folder):
            return False
    except InputError:
        return True


class ControlServer:
    """Serves the folder's socket from a thread of its own; hold the TrainerLock meanwhile.

    `status` returns the line for people. `on_request` hears "pause" or "stop" on the server's thread.
    """

    def __init__(self, folder: Path, status: Callable[[], str], on_request: Callable[[str], None]) -> None:
        self._folder, self._status, self._on_request = folder, status, on_request
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="run-control", daemon=True)

    def __enter__(self) -> ControlServer:
        (self._folder / SOCKET).unlink(missing_ok=True)  # left by a killed trainer: we hold the lock
        with _short(self._folder) as name:
            self._listener.bind(name)
        os.chmod(self._folder / SOCKET, 0o600)
        self._listener.listen(8)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / SOCKET).unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept below
        self._listener.close()
        self._thread.join(_END_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
                connection.settimeout(_ANSWER_S)
                request = msgspec.json.decode(_read_line(connection), type=Request)
                if request.command != "status":
                    self._on_request(request.command)
                connection.sendall(msgspec.json.encode(Answer(os.getpid(), self._status())) + b"\n")


def ask(folder: Path, command: Literal["status", "pause", "stop"]) -> Answer:
    """Send a command to the trainer of `folder`. Raises InputError if none runs there or it does not answer."""
    if not is_running(folder):
        raise InputError(f"no trainer works on {folder}; continue it with: fusion-run resume {folder}")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s, _short(folder) as name:
            s.settimeout(_ANSWER_S)
            s.connect(name)
            s.sendall(msgspec.json.encode(Request(command)) + b"\n")
            return msgspec.json.decode(_read_line(s), type=Answer)
    except (OSError, msgspec.MsgspecError) as e:
        raise InputError(f"the trainer of {folder} does not answer ({e}); it may still be starting: try again") from e


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path to the socket that fits the 108 bytes of a unix address, however deep the folder lies."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_LINE:
        piece = connection.recv(_MAX_LINE)
        if not piece:
            break
        data += piece
    return data

"""A volunteer's executor subprocess as the daemon sees it: started, fed, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from peer.control_io import MessageStream
from peer.errors import ExecutorDied, WireError
from peer.executor_protocol import MAX_PRIVATE_MESSAGE, Beat, FromExecutor, Ready, Start, ToExecutor
from peer.interrupts import bound_command

log = logging.getLogger("peer.daemon")

WATCH_S = 1.0
SILENT_S = 60.0  # no beat from the executor's loop: it is stuck
SEND_S = 30.0
STOP_S = 3.0
MEMORY_SLACK = 1.05  # resident memory over the cap by this much ends the executor; its own limit comes first
RESTART_DELAYS_S = (0.1, 1.0, 5.0, 20.0)
_DECODER: msgspec.msgpack.Decoder[FromExecutor] = msgspec.msgpack.Decoder(FromExecutor)


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """Why an executor ended. `resident_bytes` where memory was the reason."""

    code: str  # died, memory
    reason: str
    resident_bytes: int = 0


class ExecutorProcess:
    """`on_message` and `on_death` are called on the loop. `run` keeps one process alive until it is cancelled."""

    def __init__(
        self,
        start: Start,
        *,
        log_file: Path,
        on_message: Callable[[FromExecutor], None],
        on_death: Callable[[Death], None],
    ) -> None:
        self.start, self._log_file = start, log_file
        self._on_message, self._on_death = on_message, on_death
        self._stream: MessageStream[FromExecutor] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._over_memory: int = 0
        self.ready: Ready | None = None
        self.resident_bytes = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        failures = 0
        while True:
            death = await self._once()
            failures = 0 if self.ready is not None else failures + 1
            self.ready, self.resident_bytes = None, 0
            log.warning("executor of %s: %s; starting another", self.start.device, death.reason)
            self._on_death(death)
            await asyncio.sleep(RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)])

    async def send(self, message: ToExecutor) -> None:
        """ExecutorDied if there is none to take it."""
        if self._stream is None:
            raise ExecutorDied(f"the executor of {self.start.device} is not running; it is being started again")
        try:
            await self._stream.send(message, timeout_s=SEND_S)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise ExecutorDied(f"the executor of {self.start.device} takes no messages: {error}") from error

    def kill(self) -> None:
        """End the process now; `run` starts another."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _once(self) -> Death:
        """One process, from start to end."""
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        try:
            self._process = await self._spawn(theirs)
        finally:
            theirs.close()
        process = self._process
        try:
            reader, writer = await asyncio.open_connection(sock=mine)
            self._stream = MessageStream(reader, writer, _DECODER, limit=MAX_PRIVATE_MESSAGE)
            self._over_memory = 0
            await self.send(self.start)
            watch = asyncio.create_task(self._watch(process.pid))
            try:
                reason = await self._read(self._stream)
            finally:
                watch.cancel()
        except ExecutorDied as error:
            reason = str(error)
        finally:
            if self._stream is not None:
                self._stream.close()
            self._stream = None
            await _stop(process, STOP_S if self.ready is not None else 0.0)  # one that still loads torch hears nothing
        if self._over_memory:
            cap = self.start.memory_bytes
            return Death(
                code="memory",
                reason=f"it held {self._over_memory / 2**30:.2f} GiB, cap {cap / 2**30:.2f} GiB, and was ended",
                resident_bytes=self._over_memory,
            )
        code = process.returncode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Death(code="died", reason=f"executor died ({how}){f': {reason}' if reason else ''}")

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        with _open_log(self._log_file) as log_file:
            return await asyncio.create_subprocess_exec(
                *bound_command(signal.SIGKILL, "peer.executor", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),), start_new_session=True, env=_environment(self.start.threads),
                stdin=asyncio.subprocess.DEVNULL, stdout=log_file, stderr=log_file,
            )  # fmt: skip

    async def _read(self, stream: MessageStream[FromExecutor]) -> str:
        """Pass messages on until the end of the stream; why it ended, "" if that was all."""
        while True:
            try:
                message = await stream.receive(timeout_s=SILENT_S)
            except TimeoutError:
                return f"no sign of life for {SILENT_S:.0f} s"
            except WireError as error:
                return str(error)
            if message is None:
                return ""
            if isinstance(message, Ready):
                self.ready = message
            if isinstance(message, Beat):
                self.resident_bytes = message.resident_bytes
            self._on_message(message)

    async def _watch(self, pid: int) -> None:
        """Ends a process that holds more than the cap, whatever its own limit says."""
        try:
            process = psutil.Process(pid)
            while True:
                resident = int(process.memory_info().rss)
                if resident > self.start.memory_bytes * MEMORY_SLACK and process.is_running():
                    self._over_memory = resident
                    process.kill()
                    return
                await asyncio.sleep(WATCH_S)
        except psutil.Error:
            return


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "NPROC": str(threads),  # what XLA takes for the number of cores
        "JAX_PLATFORMS": "cpu",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products on CUDA
        "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p),
    }


def _open_log(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


async def _stop(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """The end of its socketpair asks it to go; after a moment it is made to."""
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        if process.returncode is None:
            process.kill()
        await process.wait()

"""p2pd, started and supervised by us: the libp2p daemon shipped inside the hivemind wheel.

It runs in its own session with a private socket folder (0700). It dies with the thread that started it (Linux
PR_SET_PDEATHSIG), so a killed peer leaves no daemon. The owner holds a lock in the folder; folders whose lock is free
are leftovers of dead peers and are removed at the next start, whoever's else are left alone.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dht._hivemind import p2pd_binary
from dht.control import ControlClient
from dht.errors import TransportError

log = logging.getLogger("dht.p2pd")

FOLDER_PREFIX = "fusion-p2p-"
_LOCK, _CONTROL = "lock", "control"
_YOUNG_S = 60.0  # a folder without a lock file may be one that is being made
_PR_SET_PDEATHSIG = 1
READY_S = 60.0  # it takes 0.15 s, and its death is seen at once; a machine that is very busy lets it wait
MAX_FILES = 4096  # connections and streams of p2pd, those that have not authenticated too
# Of Go's runtime. p2pd does little at a time and often: where its parts wake one another on several cores, or its
# monitor goes to sleep and is woken at each piece, that costs it half of its CPU at 100 Mbps. One core carries several
# Gbps. A monitor that may print its trace does not sleep (here it would every 23 days): 0.1% of a core at rest.
_ENVIRONMENT = {"GOMAXPROCS": "1", "GODEBUG": "schedtrace=2000000000", "GOLOG_LOG_LEVEL": "error"}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pdConfig:
    """How p2pd listens. `host_addresses` () means it does not listen (an observer)."""

    identity_path: Path
    host_addresses: tuple[str, ...]
    announce_addresses: tuple[str, ...] = ()
    dht_server: bool = True
    nat: bool = True  # port mapping, AutoNAT and relay; off for swarms on one machine
    relays: tuple[str, ...] = ()  # peers that a p2pd behind NAT asks to relay signalling


_mine: set[tuple[int, Path]] = set()  # (process, folder): a forked child has none


class SocketFolder:
    """A private folder for unix sockets, as short as their 107 characters ask for, locked while its owner lives."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    @classmethod
    def create(cls) -> SocketFolder:
        base = _base()
        _clear_leftovers(base)
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))  # mode 0700
        fd = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / "new").rename(path / _LOCK)  # nobody ever finds the lock free while we live
        _mine.add((os.getpid(), path))
        return cls(path, fd)

    @property
    def control(self) -> Path:
        return self.path / _CONTROL

    def leave(self, name: str, data: bytes) -> None:
        """A file for other processes of this peer, which attach."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        _mine.discard((os.getpid(), self.path))
        os.close(self._lock_fd)


def clear_leftovers() -> None:
    """Remove the folders of owners that were killed."""
    _clear_leftovers(_base())


def end_all() -> None:
    """For a process that ends now: its folders and those of killed peers go; its p2pd die with it."""
    for pid, path in list(_mine):
        if pid == os.getpid():
            shutil.rmtree(path, ignore_errors=True)
    clear_leftovers()


atexit.register(end_all)  # for a transport that could not be closed in time


def _base() -> Path:
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) <= 60 else Path("/tmp")


def _clear_leftovers(base: Path) -> None:
    for path in base.glob(f"{FOLDER_PREFIX}*"):
        try:
            status = path.lstat()
            if status.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
                continue
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _YOUNG_S:
                    shutil.rmtree(path, ignore_errors=True)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MAX_FILES if most == resource.RLIM_INFINITY else min(MAX_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return in_child


def _spawn(arguments: list[str]) -> subprocess.Popen[bytes]:
    # subprocess rather than asyncio's: it works on any thread and loop, whoever watches child processes there.
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**_ENVIRONMENT, **os.environ},
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
    )


class P2pd:
    """One running p2pd. `await P2pd.start(...)`, then `wait()` for its death or `stop()`."""

    def __init__(self, process: subprocess.Popen[bytes], client: ControlClient) -> None:
        self.process, self.client = process, client
        self._hold: asyncio.StreamWriter | None = None
        self.lines: collections.deque[str] = collections.deque(maxlen=50)
        self._drain = asyncio.create_task(self._drain_output(), name="p2pd output")

    @classmethod
    async def start(cls, config: P2pdConfig, folder: SocketFolder, *, timeout_s: float = READY_S) -> P2pd:
        """Starts it and waits for its control socket. TransportError with p2pd's last words if it fails."""
        folder.control.unlink(missing_ok=True)
        process = _spawn(_arguments(config, folder.control))
        daemon = cls(process, ControlClient(folder.control))
        try:
            async with asyncio.timeout(timeout_s):
                await daemon._until_ready()
        except TimeoutError as error:
            await daemon.stop()
            raise TransportError(f"p2pd was not ready in {timeout_s:g} s; last words: {daemon.last_words()}") from error
        except BaseException:
            await daemon.stop()
            raise
        if process.poll() is not None:
            await daemon.stop()
            raise TransportError(f"p2pd ended at once; last words: {daemon.last_words()}")
        return daemon

    async def _until_ready(self) -> None:
        """Ready when the control socket takes connections (p2pd listens on it last); or when it has died."""
        delay_s = 0.005
        while not self._drain.done():
            with contextlib.suppress(TransportError):
                # p2pd ends when its last persistent connection (a board's) closes: this one stays.
                self._hold = await self.client.hold()
                return
            await asyncio.sleep(delay_s)
            delay_s = min(0.1, delay_s * 1.5)
        await asyncio.to_thread(self.process.wait)

    def last_words(self) -> str:
        return " | ".join(list(self.lines)[-3:]) or "none"

    async def _drain_output(self) -> None:
        """Ends when p2pd's output does, that is with its death. An undrained pipe would block it."""
        pipe = self.process.stdout
        if pipe is None:
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 16)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while True:
                try:
                    raw = await reader.readline()
                except ValueError:  # a line over the limit; what was read of it is dropped
                    continue
                if not raw:
                    return
                line = raw.decode("utf-8", "replace").rstrip()
                self.lines.append(line[:500])
                log.debug("%s", line)
        finally:
            transport.close()

    async def wait(self) -> str:
        """Returns, with the reason, when p2pd died or its control socket no longer answers."""
        watch = asyncio.create_task(self.client.watch(), name="p2pd control")
        try:
            await asyncio.wait({watch, self._drain}, return_when=asyncio.FIRST_COMPLETED)
            if self._drain.done():
                code = await asyncio.to_thread(self.process.wait)
                return f"it ended with status {code}"
            return watch.result()
        finally:
            watch.cancel()

    def kill(self) -> None:
        """Ends it at once, without waiting, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()

    async def stop(self) -> None:
        """Ends it: SIGTERM, after 2 s SIGKILL. Idempotent."""
        if self._hold is not None:
            self._hold.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, 2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._drain


def _arguments(config: P2pdConfig, control: Path) -> list[str]:
    on = int(config.nat)
    arguments = [
        str(p2pd_binary()),
        f"-listen=/unix{control}",
        f"-id={config.identity_path}",
        "-dhtServer=1" if config.dht_server else "-dhtClient=1",
        "-connManager=1",
        # Above 512 connections p2pd closes those of least use until 384 are left, new ones too after this long: its
        # default of two minutes lets a storm grow. What it takes before that is bounded by its open files.
        "-connHi=512",
        "-connLo=384",
        "-connGrace=20s",
        "-tls=1",
        "-noise=0",  # its ChaCha20 in Go takes twice the CPU of TLS with the processor's AES
        f"-natPortMap={on}",
        f"-autonat={on}",
        f"-relay={on}",
    ]
    if config.nat and config.relays:
        # Relays at random, as p2pd would look for by itself, come minutes later or never.
        arguments += ["-autoRelay=1", "-relayDiscovery=0", f"-trustedRelays={','.join(config.relays)}"]
    if config.host_addresses:
        arguments.append(f"-hostAddrs={','.join(config.host_addresses)}")
    else:
        arguments.append("-noListenAddrs=1")
    if config.announce_addresses:
        arguments.append(f"-announceAddrs={','.join(config.announce_addresses)}")
    return arguments

"""`fusion-peer status|invite|pause|resume|leave`: a private Unix socket of the running daemon, one JSON line each way.

The socket lies in p2pd's private folder (short enough for a Unix path); `peer.json` in the state folder says where.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from peer.errors import ControlError

MAX_LINE = 1 << 20
TIMEOUT_S = 30.0  # the end of a daemon is seen at once; one on a busy machine answers late


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    command: Literal["status", "invite", "pause", "resume", "leave"]


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that this volunteer hosts, for its owner's eyes."""

    run: str
    name: str
    owner: str
    stage: int
    device: str
    tick: int = 0
    waiting_for: str = ""
    bytes_sent: int = 0


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: starting, ready. Rates are 0 until measured."""

    device: str
    state: str
    name: str = ""
    pid: int | None = None
    flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    resident_bytes: int = 0
    cap_bytes: int = 0


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to every command. `peers` counts those on the board, None while that is not known."""

    peer: str
    state: str  # free, busy, paused
    addresses: tuple[str, ...]
    name: str
    uptime_s: float
    devices: tuple[DeviceView, ...]
    stages: tuple[StageView, ...]
    peers: int | None
    daemon_bytes: int
    hours: str = ""
    runs: tuple[str, ...] = ()
    fence: str = ""
    leader: str = ""
    reach: str = ""  # direct, relay, none; "" while nobody has tried
    rests_at: tuple[str, ...] = ()  # pipe hosts by way of which it is reached
    pipes: int = 0  # that it carries for others now
    piped_bytes: int = 0  # since its start
    paused_for: str = ""  # why it computes nothing now
    warning: str = ""
    swarm: str = ""  # its name
    private: bool = False  # the swarm has a key
    invite: str = ""  # what others paste, answered to "invite" alone: it holds the key


class Failure(msgspec.Struct, frozen=True):
    error: str


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """peer.json: the running daemon of a state folder."""

    pid: int
    peer: str
    socket: str


class LocalControl:
    """The daemon's side. `answer` turns a command into the status after it."""

    def __init__(self, path: Path, home: Path, peer: str, answer: Callable[[Command], Awaitable[PeerStatus]]) -> None:
        self._path, self._home, self._peer, self._answer = path, home, peer, answer
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path=str(self._path), limit=MAX_LINE)
        os.chmod(self._path, 0o600)
        where = Where(pid=os.getpid(), peer=self._peer, socket=str(self._path))
        draft = self._home / f".peer.json.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(where))
        draft.replace(self._home / "peer.json")

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            (self._home / "peer.json").unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                line = await reader.readline()
                reply: PeerStatus | Failure
                try:
                    reply = await self._answer(msgspec.json.decode(line, type=Command))
                except (msgspec.MsgspecError, RecursionError) as error:
                    reply = Failure(f"malformed command: {error}")
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            return
        finally:
            writer.close()


def ask(home: Path, command: str, *, timeout_s: float = TIMEOUT_S) -> PeerStatus:
    """Speak to the running daemon of this state folder; ControlError if there is none."""
    start = "start one with: fusion-peer join"
    try:
        where = msgspec.json.decode((home / "peer.json").read_bytes(), type=Where)
    except FileNotFoundError:
        raise ControlError(f"no volunteer runs with the state folder {home}; {start}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ControlError(f"{home / 'peer.json'} cannot be read ({error}); remove it") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(where.socket)
            connection.sendall(msgspec.json.encode({"command": command}) + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline(MAX_LINE)
        except (FileNotFoundError, ConnectionError):
            raise ControlError(f"the volunteer of {home} (pid {where.pid}) is gone; {start}") from None
        except TimeoutError:
            raise ControlError(
                f"the volunteer of {home} (pid {where.pid}) does not answer in {timeout_s:g} s"
            ) from None
    reply = msgspec.json.decode(line) if line else {"error": "it ended without an answer"}
    if "error" in reply:
        raise ControlError(str(reply["error"]))
    return msgspec.convert(reply, PeerStatus)

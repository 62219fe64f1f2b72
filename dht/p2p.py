"""`Transport` over p2pd: authenticated byte streams between peers, by protocol name.

`start` is for the process that owns p2pd; `attach` for another process of the same user on the same host (an
executor), which opens and serves streams through the owner's p2pd. Both survive p2pd's death: the owner restarts it
with the same identity and port, and every transport registers its handlers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dht import addresses
from dht._hivemind import pb
from dht.control import SOCKET_BUFFER_BYTES, STREAM_LIMIT_BYTES, ControlClient, read_message, socket_path
from dht.door import KEY_BYTES, TOKEN_BYTES, Door, env_swarm_key, read_bans
from dht.errors import DhtError, InputError, P2pdGone, PeerUnreachable, SwarmUnreachable, TransportError
from dht.identity import Identity, load_or_create, peer_id_text
from dht.p2pd import P2pd, P2pdConfig, SocketFolder
from dht.pacing import Pacer
from dht.transport import Stream, StreamHandler

T = TypeVar("T")
log = logging.getLogger("dht.p2p")

ANY_ADDRESS = ("/ip4/0.0.0.0/tcp/0",)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ACCEPT_BACKLOG = 1024  # hivemind's 100 loses streams when a fence opens them at once
_SEEN_S = 5.0  # how old the list of connections may be by which streams are counted to address ranges
_HEADER_S = 10.0
_TOKEN_S = 4.0
_RETRY_S = 0.3
# libp2p does not dial for 5 s after a failure, though a peer that restarts is back sooner; and right after joining its
# routing knows nobody yet.
_PASSING = ("dial backoff", "failed to find any peer in table")
_SERVE_S = 10.0
_RESTART_DELAYS_S = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)


class P2PTransport:
    """Made by `start` or `attach`; see `dht.transport.Transport` for the methods others rely on."""

    def __init__(
        self,
        client: ControlClient,
        peer_id: str,
        *,
        identity: Identity | None = None,
        bootstrap: tuple[str, ...] = (),
        door: Door | None = None,
    ) -> None:
        self.client, self.identity, self.bootstrap = client, identity, bootstrap
        self.door = door or Door(peer_id)
        self.pacer: Pacer | None = None
        self._peer_id = peer_id
        self._listener = client.path.with_name(f"s{secrets.token_hex(4)}")
        self._handlers: dict[str, StreamHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen: dict[str, str] = {}  # peer -> IP address of its connection
        self._seen_at = float("-inf")
        self._restart_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._up = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closed = False
        # The owner's parts; None in an attached transport.
        self._daemon: P2pd | None = None
        self._config: P2pdConfig | None = None
        self._folder: SocketFolder | None = None
        self._identity_lock: int | None = None

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def control_address(self) -> str:
        return f"/unix{self.client.path}"

    @property
    def p2pd_pid(self) -> int | None:
        """Process id of the p2pd that this transport owns; None if it does not own one."""
        return None if self._daemon is None else self._daemon.process.pid

    def on_restart(self, callback: Callable[[], Awaitable[None]]) -> None:
        """`callback` runs after each time p2pd came back and the handlers are registered again."""
        self._restart_callbacks.append(callback)

    async def addresses(self, *, timeout_s: float = 5.0) -> tuple[str, ...]:
        """This peer's own addresses, each ending in /p2p/PEER: what others paste to join."""
        _, found = await self.client.identify(timeout_s=timeout_s)
        return tuple(f"{a}/p2p/{self._peer_id}" for a in found)

    async def connected(self, *, timeout_s: float = 5.0) -> dict[str, tuple[str, ...]]:
        """Peers with a live connection now, with the addresses of it."""
        return await self.client.list_peers(timeout_s=timeout_s)

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        """Raises PeerUnreachable. `addresses` with or without their /p2p/ part; () asks libp2p's own routing."""
        transports = tuple(a.partition("/p2p/")[0] for a in addresses)
        await self._patiently(
            f"connecting to peer {peer_id}",
            lambda: self.client.connect(peer_id, transports, timeout_s=timeout_s),
            timeout_s if not transports else 0.0,
            timeout_s,
        )

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        """Raises PeerUnreachable, NoSuchProtocol, or TransportError when p2pd itself is the trouble.

        libp2p negotiates lazily with a peer it knows: a stream to a protocol that is no longer served may open and then
        end. What proves that somebody is there is a first byte from them.
        """
        stream = await self._patiently(
            f"opening {protocol} at peer {peer_id}",
            lambda: self.client.open_stream(peer_id, protocol, timeout_s=timeout_s),
            timeout_s,
            timeout_s,
        )
        stream.writer.write(self.door.token(peer_id, protocol))
        if self.pacer is not None:
            self.pacer.pace(stream)
        return stream

    async def _patiently(self, what: str, call: Callable[[], Awaitable[T]], retry_s: float, timeout_s: float) -> T:
        """`call`, once p2pd is up, and again for `retry_s` while the failure is one that passes by itself."""
        now = asyncio.get_running_loop().time
        end = now() + retry_s
        async with self._deadline(what, timeout_s):
            while True:
                await self._up.wait()
                try:
                    return await call()
                except P2pdGone:  # died just now; the supervisor notices as well
                    pass
                except PeerUnreachable as error:
                    if now() + _RETRY_S > end or not any(reason in str(error) for reason in _PASSING):
                        raise
                await asyncio.sleep(_RETRY_S)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Incoming streams of `protocol` go to `handler`, also after p2pd restarts; they close when it returns."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(
                self._accept, path=str(self._listener), limit=STREAM_LIMIT_BYTES, backlog=ACCEPT_BACKLOG
            )
        known = protocol in self._handlers
        self._handlers[protocol] = handler
        if known:
            return  # the new handler takes the next stream
        try:
            await self._patiently(
                f"serving {protocol}",
                lambda: self.client.serve(protocol, self._listener, timeout_s=_SERVE_S),
                _SERVE_S,
                _SERVE_S,
            )
        except TransportError:
            self._handlers.pop(protocol, None)
            raise

    async def stop_serving(self, protocol: str) -> None:
        """Incoming streams of `protocol` are refused from now on; running ones go on."""
        if self._handlers.pop(protocol, None) is not None:
            await self.client.stop_serving(protocol, self._listener, timeout_s=5.0)

    async def join(self, *, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Connects to the bootstrap addresses at once; the peers that answered. SwarmUnreachable if none did.

        One dead address among live ones does not matter.
        """
        targets = [addresses.parse_swarm_address(a) for a in self.bootstrap]
        targets = [t for t in targets if t.peer_id != self._peer_id]
        results = await asyncio.gather(
            *(self.connect(t.peer_id, (t.transport,), timeout_s=timeout_s) for t in targets), return_exceptions=True
        )
        reached, failed = [], []
        for target, result in zip(targets, results, strict=True):
            if result is None:
                reached.append(target.peer_id)
            elif isinstance(result, DhtError):
                failed.append(f"{target}: {_why(str(result))}")
            else:
                raise result
        if targets and not reached:
            raise SwarmUnreachable(
                f"no address of the swarm answers: {'; '.join(failed)}; "
                "check that a peer runs there and that its port is open"
            )
        return tuple(dict.fromkeys(reached))

    async def close(self) -> None:
        """Ends streams, handlers and, for the owner, p2pd. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._wind_up()
        finally:  # whoever is cancelled twice, as by a second Ctrl-C, leaves no process and no folder either
            if self._daemon is not None:
                self._daemon.kill()
            if self._folder is not None:
                self._folder.remove()
            if self._identity_lock is not None:
                os.close(self._identity_lock)

    async def _wind_up(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._daemon is None:
            for protocol in self._handlers:
                with contextlib.suppress(TransportError):
                    await self.client.stop_serving(protocol, self._listener, timeout_s=2.0)
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listener.unlink(missing_ok=True)
        if self._daemon is not None:
            await self._daemon.stop()

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        if self._closed:
            raise TransportError(f"{what}: this transport is closed")
        try:
            async with asyncio.timeout(timeout_s + 0.5):  # the inner call names its own deadline first
                yield
        except TimeoutError as error:
            raise TransportError(f"{what}: p2pd is not back after {timeout_s:g} s") from error

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        remote = ip = ""
        entered = False
        try:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            writer.transport.set_write_buffer_limits(high=STREAM_LIMIT_BYTES)
            async with asyncio.timeout(_HEADER_S):
                info = await read_message(reader, pb().StreamInfo())
            remote = peer_id_text(info.peer)
            handler = self._handlers.get(info.proto)
            if handler is None:
                log.info("refused a stream of %s from peer %s: it is not served", info.proto[:80], remote)
                return
            ip = await self._ip_of(remote)
            reason = self.door.enter(remote, ip, asyncio.get_running_loop().time())
            if reason:
                log.info("refused a stream of %s from peer %s: %s", info.proto, remote, reason)
                return
            entered = True
            if self.door.key is not None:
                async with asyncio.timeout(_TOKEN_S):
                    token = await reader.readexactly(TOKEN_BYTES)
                if not self.door.proves(remote, info.proto, token):
                    log.info("refused a stream of %s from peer %s: it has not the swarm's key", info.proto, remote)
                    return
            stream = Stream(remote, reader, writer)
            if self.pacer is not None:
                self.pacer.pace(stream)
            await handler(stream)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        except (OSError, TimeoutError, asyncio.IncompleteReadError, DhtError) as error:
            log.info("stream from peer %s ended: %s", remote or "?", error or type(error).__name__)
        except Exception:  # the top of this task: a handler's defect must not end the others
            log.exception("the handler of a stream from peer %s failed", remote or "?")
        finally:
            if entered:
                self.door.leave(remote, ip)
            writer.close()

    async def _ip_of(self, peer: str) -> str:
        """Where `peer` is connected from, as seen a few seconds ago; "" if it is not known."""
        now = asyncio.get_running_loop().time()
        if peer not in self._seen and now - self._seen_at > _SEEN_S:
            self._seen_at = now
            with contextlib.suppress(TransportError):
                found = await self.connected()
                self._seen = {
                    p: next((ip for a in where if (ip := addresses.ip_of(a))), "") for p, where in found.items()
                }
        return self._seen.get(peer, "")

    async def _supervise(self) -> None:
        """Waits for p2pd's death, brings it back (owner) or waits for it (attached), registers the handlers again."""
        self._up.set()
        while True:
            reason = await (self.client.watch() if self._daemon is None else self._daemon.wait())
            self._up.clear()
            log.warning(
                "p2pd of peer %s is gone: %s; %s", self._peer_id, reason, "restarting" if self._daemon else "waiting"
            )
            for attempt in range(1 << 30):
                await asyncio.sleep(_RESTART_DELAYS_S[min(attempt, len(_RESTART_DELAYS_S) - 1)])
                try:
                    await self._come_back()
                    break
                except DhtError as error:
                    if attempt % 6 == 5:  # once a minute, when it lasts
                        log.warning("p2pd of peer %s is not back: %s", self._peer_id, error)
            self._up.set()
            log.info("p2pd of peer %s is back", self._peer_id)
            for callback in self._restart_callbacks:
                try:
                    await callback()
                except Exception:  # a callback's defect must not end the supervision
                    log.exception("after the restart of p2pd of peer %s", self._peer_id)

    async def _come_back(self) -> None:
        if self._daemon is not None and self._config is not None and self._folder is not None:
            await self._daemon.stop()
            self._daemon = await P2pd.start(self._config, self._folder)
        else:
            await self.client.identify(timeout_s=5.0)
        for protocol in list(self._handlers):
            await self.client.serve(protocol, self._listener, timeout_s=5.0)
        if self._daemon is not None and self.bootstrap:
            with contextlib.suppress(SwarmUnreachable):
                self._up.set()
                await self.join(timeout_s=5.0)


async def start(
    identity_path: Path,
    *,
    host_addresses: tuple[str, ...] = ANY_ADDRESS,
    bootstrap: tuple[str, ...] = (),
    announce_addresses: tuple[str, ...] = (),
    client_only: bool = False,
    swarm_key: bytes | None = None,
    download_bytes_per_s: tuple[float, float] | None = None,
    timeout_s: float = 15.0,
) -> P2PTransport:
    """Starts p2pd with the identity at `identity_path` (made if missing) and connects to `bootstrap`.

    `host_addresses`: where to listen; port 0 takes a free one, kept over restarts; () does not listen.
    `client_only`: take no part in libp2p's routing (observers). `swarm_key`: of a private swarm (default:
    $FUSION_SWARM_KEY, else the swarm is public). `download_bytes_per_s`: caps of this process, and
    of each that attaches. Raises InputError (address, identity in use, port in use), SwarmUnreachable (all of
    `bootstrap` dead), TransportError.
    """
    bootstrap = tuple(addresses.check_swarm_address(a) for a in bootstrap)
    host_addresses = tuple(addresses.check_address(a) for a in host_addresses)
    identity = load_or_create(identity_path)
    door = Door(identity.peer_id, key=swarm_key or env_swarm_key(), banned=read_bans())
    _check_ports_free(host_addresses)
    lock = _lock_identity(identity_path)
    try:
        folder = SocketFolder.create()
    except BaseException:
        os.close(lock)
        raise
    transport = P2PTransport(
        ControlClient(folder.control), identity.peer_id, identity=identity, bootstrap=bootstrap, door=door
    )
    if door.key is not None:
        folder.leave("key", door.key)
    if download_bytes_per_s is not None:
        transport.pacer = Pacer(download_bytes_per_s[0])
        folder.leave("download", repr(download_bytes_per_s[1]).encode())
    transport._identity_lock, transport._folder = lock, folder
    config = P2pdConfig(
        identity_path=identity_path,
        host_addresses=host_addresses,
        announce_addresses=tuple(addresses.check_address(a) for a in announce_addresses),
        dht_server=not client_only,
        nat=any("/127." not in a and "/::1" not in a for a in host_addresses),
    )
    try:
        transport._daemon = await P2pd.start(config, folder, timeout_s=timeout_s)
        _, found = await transport.client.identify()
        port = next((p for p in map(addresses.tcp_port, found) if p), 0)
        kept = tuple(
            a if addresses.tcp_port(a) or not port else addresses.with_tcp_port(a, port) for a in host_addresses
        )
        transport._config = replace(config, host_addresses=kept)
        transport._supervisor = asyncio.create_task(transport._supervise(), name="p2pd supervisor")
        await transport.join(timeout_s=timeout_s)
    except BaseException:
        await transport.close()
        raise
    return transport


async def attach(control_address: str, *, timeout_s: float = 10.0) -> P2PTransport:
    """A transport over the p2pd that another process of this host owns. Raises InputError, TransportError."""
    client = ControlClient(socket_path(control_address))
    peer_id, _ = await client.identify(timeout_s=timeout_s)
    transport = P2PTransport(client, peer_id, door=Door(peer_id, key=_key_beside(client), banned=read_bans()))
    with contextlib.suppress(FileNotFoundError):
        transport.pacer = Pacer(float(client.path.with_name("download").read_bytes()))
    transport._supervisor = asyncio.create_task(transport._supervise(), name="p2pd watcher")
    return transport


def _key_beside(client: ControlClient) -> bytes | None:
    """The private swarm's key, which the owner of p2pd left in its private folder."""
    try:
        key = client.path.with_name("key").read_bytes()
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _why(reason: str) -> str:
    """The end of p2pd's nested reasons, which is the one that counts."""
    if "remote key matches" in reason:
        return "another peer answers there; ask for its current address"
    return reason.rpartition(": ")[2].rpartition("] ")[2]


def _lock_identity(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise InputError(
            f"the identity {path} is in use by another running peer; give this one its own with FUSION_HOME=DIR"
        ) from error
    return fd


def _check_ports_free(host_addresses: tuple[str, ...]) -> None:
    """p2pd listens with SO_REUSEPORT and would silently share a port with another p2pd of the same user."""
    for text in host_addresses:
        parts = text.split("/")
        port = addresses.tcp_port(text)
        if not port or parts[1] not in ("ip4", "ip6"):
            continue
        family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((parts[2], port))
                probe.listen(1)
            except OSError as error:
                raise InputError(
                    f"cannot listen at {text}: {error.strerror}; choose another port, or 0 for any free one"
                ) from error

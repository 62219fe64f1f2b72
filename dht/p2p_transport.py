"""`P2PTransport`: one peer's streams over p2pd, made by `dht.p2p`.

It survives p2pd's death: the owner restarts it with the same identity and port, and every transport registers its
handlers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from dht import addresses
from dht._hivemind import pb
from dht.control import ANSWER_S, SOCKET_BUFFER_BYTES, STREAM_LIMIT_BYTES, ControlClient, read_message
from dht.door import TOKEN_BYTES, Door
from dht.errors import DhtError, P2pdGone, PeerUnreachable, SwarmUnreachable, TransportError
from dht.gate import Gate
from dht.identity import Identity, peer_id_text
from dht.p2pd import P2pd, P2pdConfig, SocketFolder
from dht.pacing import Pacer
from dht.transport import Stream, StreamHandler

T = TypeVar("T")
log = logging.getLogger("dht.p2p")

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
        pacer: Pacer | None = None,
        folder: SocketFolder | None = None,
        identity_lock: int | None = None,
    ) -> None:
        self.client, self.identity, self.bootstrap = client, identity, bootstrap
        self.door = door or Door(peer_id)
        self.pacer = pacer
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
        self._folder, self._identity_lock = folder, identity_lock
        self._daemon: P2pd | None = None
        self._config: P2pdConfig | None = None
        self._gate: Gate | None = None

    async def begin(self, config: P2pdConfig, *, join: bool, timeout_s: float) -> None:
        """The owner's start: p2pd comes up, its port is kept over restarts, with `join` the swarm is joined. On failure
        call `close`."""
        assert self._folder is not None
        self._daemon = await P2pd.start(config, self._folder)
        _, found = await self.client.identify()
        port = next((p for p in map(addresses.tcp_port, found) if p), 0)
        kept = tuple(
            a if addresses.tcp_port(a) or not port else addresses.with_tcp_port(a, port) for a in config.host_addresses
        )
        self._config = replace(config, host_addresses=kept)
        self._set_gate(self._daemon, self._config)
        self.watch()
        if join:
            await self.join(timeout_s=timeout_s)

    def _set_gate(self, daemon: P2pd, config: P2pdConfig) -> None:
        if config.nat:  # who listens on loopback only has no strangers
            self._gate = Gate(self.client, daemon.process.pid, config.host_addresses)
            self._gate.start()

    def watch(self) -> None:
        """From now on p2pd's death is noticed."""
        self._supervisor = asyncio.create_task(self._supervise(), name="p2pd supervisor")

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

    async def addresses(self, *, timeout_s: float = ANSWER_S) -> tuple[str, ...]:
        """This peer's own addresses, each ending in /p2p/PEER: what others paste to join."""
        _, found = await self.client.identify(timeout_s=timeout_s)
        return tuple(f"{a}/p2p/{self._peer_id}" for a in found)

    async def connected(self, *, timeout_s: float = ANSWER_S) -> dict[str, tuple[str, ...]]:
        """Peers with a live connection now, with the addresses of it."""
        return await self.client.list_peers(timeout_s=timeout_s)

    async def connect(self, peer_id: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        """Raises PeerUnreachable. `addresses` with or without their /p2p/ part; () asks libp2p's own routing."""
        transports = tuple(a.removesuffix(f"/p2p/{peer_id}") for a in addresses)
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
            await self.client.stop_serving(protocol, self._listener, timeout_s=ANSWER_S)

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
        if self._gate is not None:
            await self._gate.close()
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
            if self._up.is_set():  # this process had no turn for so long that both deadlines are over
                raise PeerUnreachable(f"{what}: no answer in {timeout_s:g} s") from error
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
            reason = await self._death()
            self._up.clear()
            log.warning(
                "p2pd of peer %s is gone: %s; %s", self._peer_id, reason, "restarting" if self._daemon else "waiting"
            )
            attempt = 0
            while not await self._is_back(attempt):
                attempt += 1
            self._up.set()
            log.info("p2pd of peer %s is back", self._peer_id)
            for callback in self._restart_callbacks:
                try:
                    await callback()
                except Exception:  # a callback's defect must not end the supervision
                    log.exception("after the restart of p2pd of peer %s", self._peer_id)

    async def _death(self) -> str:
        """The reason, once p2pd is gone or can no longer be watched."""
        try:
            return await (self.client.watch() if self._daemon is None else self._daemon.wait())
        except Exception as error:  # the top of this task: without supervision every later death would be silent
            log.exception("watching p2pd of peer %s failed", self._peer_id)
            return f"it cannot be watched: {error}"

    async def _is_back(self, attempt: int) -> bool:
        """One try, after a delay that grows."""
        await asyncio.sleep(_RESTART_DELAYS_S[min(attempt, len(_RESTART_DELAYS_S) - 1)])
        try:
            await self._come_back()
        except (DhtError, OSError) as error:
            if attempt % 6 == 5:  # once a minute, when it lasts
                log.warning("p2pd of peer %s is not back: %s", self._peer_id, error)
            return False
        except Exception:  # the top of this task: see _death
            log.exception("bringing back p2pd of peer %s failed; it is tried again", self._peer_id)
            return False
        return True

    async def _come_back(self) -> None:
        if self._daemon is not None and self._config is not None and self._folder is not None:
            if self._gate is not None:
                await self._gate.close()
            await self._daemon.stop()
            self._daemon = await P2pd.start(self._config, self._folder)
            self._set_gate(self._daemon, self._config)
        else:
            await self.client.identify()
        for protocol in list(self._handlers):
            await self.client.serve(protocol, self._listener, timeout_s=_SERVE_S)
        if self._daemon is not None and self.bootstrap:
            with contextlib.suppress(SwarmUnreachable):
                self._up.set()
                await self.join(timeout_s=5.0)


def _why(reason: str) -> str:
    """The end of p2pd's nested reasons, which is the one that counts."""
    if "remote key matches" in reason:
        return "another peer answers there; ask for its current address"
    return reason.rpartition(": ")[2].rpartition("] ")[2]

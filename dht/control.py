"""p2pd's control protocol over its unix socket: one request a connection, protobuf messages with a varint length.

Only what raw byte streams need; the DHT's unary calls go through hivemind's own client (`dht.node`).
Every call has a deadline. Lengths that p2pd states are bounded before they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dht import addresses
from dht._hivemind import pb
from dht.errors import InputError, NoSuchProtocol, P2pdGone, PeerUnreachable, TransportError
from dht.identity import peer_id_bytes, peer_id_text
from dht.transport import Stream

STREAM_LIMIT_BYTES = (
    1 << 20
)  # StreamReader's and the writer's high-water mark: a stalled reader holds at most twice this
SOCKET_BUFFER_BYTES = 1 << 20  # the default of 208 KiB halves the rate of 10 MB frames
MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 20.0  # p2pd answers in a millisecond; its end is seen at once, and `watch` notices if it hangs
_UNIX = bytes.fromhex("9003")  # multicodec of /unix as a varint


def socket_path(control_address: str) -> Path:
    """/unix/PATH as a path."""
    if not control_address.startswith("/unix/"):
        raise InputError(
            f"{control_address!r} is not the control address of a p2pd; one looks like /unix/tmp/.../control"
        )
    return Path(control_address.removeprefix("/unix"))


def _unix_address_bytes(path: Path) -> bytes:
    text = str(path).encode()
    return _UNIX + _varint(len(text)) + text


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


async def read_message(reader: asyncio.StreamReader, message: Any) -> Any:
    """Fill the protobuf `message`; TransportError if longer than MAX_REPLY_BYTES or malformed."""
    length = 0
    for shift in range(0, 28, 7):
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if length > MAX_REPLY_BYTES or byte >= 0x80:
        raise TransportError(f"p2pd announced a message of {length} bytes; at most {MAX_REPLY_BYTES} are read")
    raw = await reader.readexactly(length)
    try:
        message.ParseFromString(raw)
    except pb().DecodeError as error:
        raise TransportError(f"p2pd sent {length} bytes that are not a {type(message).__name__}") from error
    return message


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(sock, str(path))
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=STREAM_LIMIT_BYTES)
    except BaseException:
        sock.close()
        raise
    writer.transport.set_write_buffer_limits(high=STREAM_LIMIT_BYTES)
    return reader, writer


class ControlClient:
    """Requests to one p2pd. Holds no connection; safe to share between tasks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @asynccontextmanager
    async def _errors(self, what: str, timeout_s: float, peer_id: str = "") -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            kind = PeerUnreachable if peer_id else TransportError
            raise kind(f"{what}: no answer in {timeout_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise P2pdGone(f"{what}: the p2pd at {self.path} is not there ({error or 'closed'})") from error

    async def _request(self, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await _connect(self.path)
        try:
            raw = request.SerializeToString()
            writer.write(_varint(len(raw)) + raw)
            return await read_message(reader, pb().Response()), reader, writer
        except BaseException:
            writer.close()
            raise

    async def _call(self, request: Any) -> Any:
        response, _, writer = await self._request(request)
        writer.close()
        return response

    async def identify(self, *, timeout_s: float = ANSWER_S) -> tuple[str, tuple[str, ...]]:
        """(peer id, the addresses it listens at and those others report seeing)."""
        async with self._errors("asking p2pd for its identity", timeout_s):
            response = await self._call(pb().Request(type=pb().Request.IDENTIFY))
        _raise_if_failed(response, "asking p2pd for its identity")
        return peer_id_text(response.identify.id), tuple(addresses.from_bytes(a) for a in response.identify.addrs)

    async def connect(self, peer_id: str, transports: tuple[str, ...], *, timeout_s: float) -> None:
        what = f"connecting to peer {peer_id}"
        request = pb().Request(type=pb().Request.CONNECT)
        request.connect.peer = peer_id_bytes(peer_id)
        request.connect.addrs.extend(addresses.to_bytes(a) for a in transports)
        request.connect.timeout = max(1, round(timeout_s))
        async with self._errors(what, timeout_s, peer_id):
            response = await self._call(request)
        _raise_if_failed(response, what, peer_id)

    async def list_peers(self, *, timeout_s: float = ANSWER_S) -> dict[str, tuple[str, ...]]:
        """Connected peers and the addresses of their connections, of which one peer may have several, as by way of a
        relay and direct. Peers without an Ed25519 id are left out."""
        async with self._errors("listing connected peers", timeout_s):
            response = await self._call(pb().Request(type=pb().Request.LIST_PEERS))
        _raise_if_failed(response, "listing connected peers")
        found: dict[str, tuple[str, ...]] = {}
        for peer in response.peers:
            try:
                name = peer_id_text(peer.id)
                found[name] = (*found.get(name, ()), *(addresses.from_bytes(a) for a in peer.addrs))
            except InputError:
                continue
        return found

    async def disconnect(self, peer_id: str, *, timeout_s: float = ANSWER_S) -> None:
        request = pb().Request(type=pb().Request.DISCONNECT)
        request.disconnect.peer = peer_id_bytes(peer_id)
        async with self._errors(f"disconnecting from peer {peer_id}", timeout_s):
            response = await self._call(request)
        _raise_if_failed(response, f"disconnecting from peer {peer_id}", peer_id)

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float) -> Stream:
        what = f"opening {protocol} at peer {peer_id}"
        request = pb().Request(type=pb().Request.STREAM_OPEN)
        request.streamOpen.peer = peer_id_bytes(peer_id)
        request.streamOpen.proto.append(protocol)
        request.streamOpen.timeout = max(1, round(timeout_s))
        async with self._errors(what, timeout_s, peer_id):
            response, reader, writer = await self._request(request)
        try:
            _raise_if_failed(response, what, peer_id)
            return Stream(peer_id_text(response.streamInfo.peer), reader, writer)
        except BaseException:
            writer.close()
            raise

    async def serve(self, protocol: str, listener: Path, *, timeout_s: float) -> None:
        """Have p2pd pass incoming streams of `protocol` to the unix socket `listener`; done again it changes nothing.

        TransportError if another process serves it.
        """
        request = pb().Request(type=pb().Request.STREAM_HANDLER)
        request.streamHandler.addr = _unix_address_bytes(listener)
        request.streamHandler.proto.append(protocol)
        request.streamHandler.balanced = False
        async with self._errors(f"serving {protocol}", timeout_s):
            response = await self._call(request)
            if response.type == pb().Response.ERROR and "already set" in response.error.msg:
                with contextlib.suppress(TransportError):  # ours, of a request whose answer was lost?
                    await self.stop_serving(protocol, listener, timeout_s=timeout_s)
                response = await self._call(request)
        _raise_if_failed(response, f"serving {protocol}")

    async def stop_serving(self, protocol: str, listener: Path, *, timeout_s: float) -> None:
        request = pb().Request(type=pb().Request.REMOVE_STREAM_HANDLER)
        request.removeStreamHandler.addr = _unix_address_bytes(listener)
        request.removeStreamHandler.proto.append(protocol)
        async with self._errors(f"ending service of {protocol}", timeout_s):
            response = await self._call(request)
        _raise_if_failed(response, f"ending service of {protocol}")

    async def hold(self, *, timeout_s: float = ANSWER_S) -> asyncio.StreamWriter:
        """A persistent connection that is not used; p2pd lives on while at least one is open."""
        async with self._errors("holding p2pd", timeout_s):
            response, _, writer = await self._request(pb().Request(type=pb().Request.PERSISTENT_CONN_UPGRADE))
        _raise_if_failed(response, "holding p2pd")
        return writer

    async def watch(self, *, interval_s: float = 2.0, timeout_s: float = 10.0) -> str:
        """Returns, with the reason, when p2pd's control socket closes or an IDENTIFY goes unanswered."""
        raw = pb().Request(type=pb().Request.IDENTIFY).SerializeToString()
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await _connect(self.path)
        except (OSError, TimeoutError) as error:
            return f"its control socket does not answer ({error or 'no answer'})"
        try:
            while True:
                async with asyncio.timeout(timeout_s):
                    writer.write(_varint(len(raw)) + raw)
                    await read_message(reader, pb().Response())
                try:
                    async with asyncio.timeout(interval_s):
                        await reader.readexactly(1)  # p2pd says nothing unasked: this ends only with the connection
                except TimeoutError:
                    continue
                return "its control socket sent what was not asked for"
        except TimeoutError:
            return f"its control socket has not answered for {timeout_s:g} s"
        except (OSError, asyncio.IncompleteReadError, TransportError):
            return "its control socket closed"
        finally:
            writer.close()


def _raise_if_failed(response: Any, what: str, peer_id: str = "") -> None:
    if response.type != pb().Response.ERROR:
        return
    reason = " ".join(response.error.msg.split())[:300]
    if "protocol not supported" in reason or "protocols not supported" in reason:
        raise NoSuchProtocol(f"{what}: the peer does not serve it")
    raise (PeerUnreachable if peer_id else TransportError)(f"{what}: {reason}")

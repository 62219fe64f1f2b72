"""Latency, bandwidth and reachability between peers: raw streams of `/fusion/1/probe`, bounded in bytes and time.

The prober opens a stream and writes one-byte requests:
  p                 -> length (2 bytes), Beat: the round trip, and what the peer says of itself; up to 8 a stream
  u  chunks, end    -> b, or go and an a per chunk received, then r and the rate in bytes/s (8): from here to there
  d                 -> b, or go and chunks, end; the prober answers an a per chunk: from there to here
  r  port (2)       -> length (1), address seen, result (1): can this peer be dialled where it is seen?
A chunk is length (4) and payload; length 0 ends them. b: busy with another probe; g: go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from dht.errors import TransportError
from dht.fence_records import Beat
from dht.rates import CHUNK_BYTES, MAX_BYTES, MAX_SEND_S, RateMeter, Window
from dht.transport import Stream, Transport

log = logging.getLogger("dht.probe")

PROTOCOL = "/fusion/1/probe"
PING_S = 3.0
PROBE_S = 3 * MAX_SEND_S + 4.0
DIAL_S = 4.0
REST_S = 5.0  # between two bandwidth probes of one remote peer
MAX_BEAT = 1024
MAX_PINGS = 8
_IDLE_S = 10.0
_REMEMBERED = 1024
_LENGTH, _RATE = struct.Struct(">I"), struct.Struct(">d")
_PAYLOAD = bytes(range(256)) * (CHUNK_BYTES // 256)
_BANNER = b"/multistream/1.0.0"
_beat_decoder = msgspec.msgpack.Decoder(Beat)
Dialled = Literal["open", "refused", "silent", "other", "unseen"]
_DIALLED: tuple[Dialled, ...] = ("open", "refused", "silent", "other", "unseen")


@dataclass(frozen=True, slots=True)
class Pong:
    """`relayed` is not known here; the caller sees it from its connection."""

    rtt_s: float
    beat: Beat


@dataclass(frozen=True, slots=True)
class Reach:
    """What another peer found: the address it sees this one at, and whether the port answers there."""

    seen: str
    result: Dialled


class ProbeBusy(TransportError):
    """The peer measures with another one just now."""


class Prober:
    """Both sides. `beat`: what to say of this peer; `seen_at`: the IP address that a connected peer is seen at, "" if
    not known; `may_probe`: False while the device works, when strangers' bandwidth probes are turned down;
    `upload_bytes_per_s`: probes send no faster (None: as fast as the link takes it)."""

    def __init__(
        self,
        transport: Transport,
        beat: Callable[[], Beat],
        *,
        seen_at: Callable[[str], Awaitable[str]],
        may_probe: Callable[[], bool] = lambda: True,
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self._transport, self._beat, self._upload_bytes_per_s = transport, beat, upload_bytes_per_s
        self._seen_at, self._may_probe = seen_at, may_probe
        self._one = asyncio.Lock()  # one bandwidth probe at a time, whoever asked for it
        self._last: OrderedDict[str, float] = OrderedDict()

    async def start(self) -> None:
        await self._transport.serve(PROTOCOL, self._serve)

    async def stop(self) -> None:
        await self._transport.stop_serving(PROTOCOL)

    # --- asking

    async def ping(self, peer: str, *, times: int = 2, timeout_s: float = PING_S) -> Pong:
        """The least round trip of `times`; TransportError (also for an answer that is none)."""
        stream = await self._transport.open_stream(peer, PROTOCOL, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                best = float("inf")
                for _ in range(times):
                    start = time.perf_counter()
                    stream.writer.write(b"p")
                    (length,) = struct.unpack(">H", await stream.reader.readexactly(2))
                    if length > MAX_BEAT:
                        raise TransportError(f"peer {peer} answers a ping with {length} bytes; at most {MAX_BEAT}")
                    raw = await stream.reader.readexactly(length)
                    best = min(best, time.perf_counter() - start)
                return Pong(best, _beat_decoder.decode(raw))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError, RecursionError) as error:
            raise TransportError(f"peer {peer} answers no ping: {error or 'no answer'}") from error
        finally:
            stream.writer.close()

    async def rates(self, peer: str) -> tuple[float, float]:
        """(to the peer, from the peer) in bytes per second; ProbeBusy, TransportError. At most 64 MiB and 16 s."""
        async with self._one:
            stream = await self._transport.open_stream(peer, PROTOCOL, timeout_s=PING_S)
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._request(stream, b"u")
                    await _send(stream, self._upload_bytes_per_s)
                    (up,) = _RATE.unpack(await stream.reader.readexactly(_RATE.size))
                    await self._request(stream, b"d")
                    down = await _receive(stream)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                raise TransportError(f"the bandwidth probe of peer {peer} broke off: {error or 'too slow'}") from error
            finally:
                stream.writer.close()
        if not 0 < up < 1e12:
            raise TransportError(f"peer {peer} says that it received {up} bytes/s")
        return up, down

    async def reach(self, peer: str, port: int, *, timeout_s: float = PING_S + DIAL_S) -> Reach:
        """Has `peer` dial this one's TCP `port` at the address it sees it at."""
        stream = await self._transport.open_stream(peer, PROTOCOL, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                stream.writer.write(b"r" + struct.pack(">H", port))
                length = (await stream.reader.readexactly(1))[0]
                seen = (await stream.reader.readexactly(length)).decode("ascii", "replace")
                result = (await stream.reader.readexactly(1))[0]
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise TransportError(f"peer {peer} does not say whether it can dial: {error or 'no answer'}") from error
        finally:
            stream.writer.close()
        return Reach(seen, _DIALLED[min(result, len(_DIALLED) - 1)])

    @staticmethod
    async def _request(stream: Stream, what: bytes) -> None:
        stream.writer.write(what)
        answer = await stream.reader.readexactly(1)
        if answer == b"b":
            raise ProbeBusy(f"peer {stream.remote} measures with another peer now")
        if answer != b"g":
            raise TransportError(f"peer {stream.remote} answers a probe with {answer!r}")

    # --- answering

    async def _serve(self, stream: Stream) -> None:
        pings = 0
        while True:
            async with asyncio.timeout(_IDLE_S):
                try:
                    request = await stream.reader.readexactly(1)
                except asyncio.IncompleteReadError:
                    return
            if request == b"p" and pings < MAX_PINGS:
                pings += 1
                raw = msgspec.msgpack.encode(self._beat())
                stream.writer.write(struct.pack(">H", len(raw)) + raw)
            elif request in b"ud":
                await self._answer_rate(stream, request)
            elif request == b"r":
                await self._answer_reach(stream)
            else:
                return
            async with asyncio.timeout(_IDLE_S):
                await stream.writer.drain()

    async def _answer_rate(self, stream: Stream, request: bytes) -> None:
        if self._one.locked() or not self._may_probe() or (request == b"u" and not self._rested(stream.remote)):
            stream.writer.write(b"b")
            return
        async with self._one, asyncio.timeout(PROBE_S):
            stream.writer.write(b"g")
            if request == b"u":
                stream.writer.write(_RATE.pack(await _receive(stream)))
            else:
                await _send(stream, self._upload_bytes_per_s)

    def _rested(self, peer: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(peer, float("-inf")) < REST_S:
            return False
        self._last[peer] = now
        self._last.move_to_end(peer)
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        return True

    async def _answer_reach(self, stream: Stream) -> None:
        """Dials only where the asking peer is seen to come from: nobody can point it at a third party."""
        async with asyncio.timeout(_IDLE_S):
            (port,) = struct.unpack(">H", await stream.reader.readexactly(2))
        seen = await self._seen_at(stream.remote)
        result = await dial(seen, port) if seen and port else "unseen"
        raw = seen.encode("ascii", "replace")[:64]
        stream.writer.write(bytes((len(raw),)) + raw + bytes((_DIALLED.index(result),)))


async def dial(host: str, port: int, *, timeout_s: float = DIAL_S) -> Dialled:
    """Whether something that speaks libp2p answers at this TCP port."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            writer.write(b"\x13" + _BANNER + b"\n")
            return "open" if _BANNER in await reader.readexactly(1 + len(_BANNER)) else "other"
    except asyncio.IncompleteReadError:
        return "other"
    except TimeoutError:
        return "silent" if writer is None else "other"
    except OSError:
        return "refused"
    finally:
        if writer is not None:
            writer.close()


async def _send(stream: Stream, most_bytes_per_s: float | None) -> None:
    """Chunks within the window until the bounds of `rates` are reached."""
    window = Window(time.perf_counter(), most_bytes_per_s)
    while not window.over(now := time.perf_counter()):
        while window.room(now):
            stream.writer.write(_LENGTH.pack(CHUNK_BYTES) + _PAYLOAD)
            window.sending(CHUNK_BYTES)
        await stream.writer.drain()
        if window.acked == window.sent:
            await asyncio.sleep(min(MAX_SEND_S, max(0.0, window.wait_s(now))))
            continue
        acks = await stream.reader.read(256)
        if not acks:
            raise asyncio.IncompleteReadError(b"", None)
        window.acknowledged(acks.count(b"a") * CHUNK_BYTES, time.perf_counter())
    stream.writer.write(_LENGTH.pack(0))
    while window.acked < window.sent:  # what follows on this stream must not be taken for acknowledgements
        left = (window.sent - window.acked) // CHUNK_BYTES
        acks = await stream.reader.read(left)
        if not acks:
            raise asyncio.IncompleteReadError(b"", None)
        window.acknowledged(len(acks) * CHUNK_BYTES, time.perf_counter())


async def _receive(stream: Stream) -> float:
    """Bytes per second that arrived; acknowledges each chunk."""
    meter = RateMeter()
    while True:
        (length,) = _LENGTH.unpack(await stream.reader.readexactly(_LENGTH.size))
        if length == 0:
            break
        if length > CHUNK_BYTES or meter.total + length > MAX_BYTES:
            raise TransportError(f"peer {stream.remote} sends more in a probe than it may")
        left = length
        while left:
            data = await stream.reader.read(left)
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            meter.arrived(len(data), time.perf_counter())
        stream.writer.write(b"a")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_S):
            await stream.writer.drain()
    return meter.bytes_per_s()

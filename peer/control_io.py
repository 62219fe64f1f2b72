"""Control messages on a byte stream: a 4-byte little-endian length, then msgpack of one protocol Struct.

The same framing serves the trainer's CONTROL streams and the socketpair between a daemon and its executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Generic, TypeVar

import msgspec

from peer.errors import WireError
from peer.protocol import MAX_MESSAGE
from peer.wire import CHUNK_BYTES

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
PARTS, WAKING_S = 8, 0.25  # of a limit; a last look for what came while this process slept


class MessageStream(Generic[T]):
    """Reads messages of the union `incoming`, writes any protocol Struct. One reader task, any number of writers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
        *,
        limit: int = MAX_MESSAGE,
    ) -> None:
        self._reader, self._writer, self._decoder, self._limit = reader, writer, decoder, limit
        self._turn = asyncio.Lock()

    async def send(self, message: msgspec.Struct, *, timeout_s: float) -> None:
        """TimeoutError once the other side takes nothing for `timeout_s`; ConnectionError when the stream is broken.

        The message is queued whole: a send that is cancelled leaves the stream in order.
        """
        raw = msgspec.msgpack.encode(message)
        if len(raw) > self._limit:
            raise WireError(f"{type(message).__name__} of {len(raw)} bytes, at most {self._limit}")
        async with self._turn:  # whoever has it gives it up within `timeout_s` of the last byte that went
            self._writer.write(_LENGTH.pack(len(raw)) + raw)
            left, stuck = self._writer.transport.get_write_buffer_size(), 0
            while True:
                try:
                    async with asyncio.timeout(timeout_s / PARTS):
                        return await self._writer.drain()
                except TimeoutError:
                    before, left = left, self._writer.transport.get_write_buffer_size()
                    stuck = stuck + 1 if left >= before else 0
                    if stuck == PARTS:
                        raise

    async def receive(self, *, timeout_s: float) -> T | None:
        """The next message, None at the end of the stream. TimeoutError after `timeout_s` without a byte: a large
        message on a slow link is no silence."""
        head = await self._read(_LENGTH.size, timeout_s)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > self._limit:
            raise WireError(f"control message of {length} bytes announced, at most {self._limit}")
        raw = await self._read(length, timeout_s)
        if raw is None:
            return None
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed control message: {error}") from error

    async def _read(self, count: int, timeout_s: float) -> bytes | None:
        """`count` bytes, None if the stream ends before. Memory grows with what came, not with what was announced."""
        data = bytearray()
        while len(data) < count:
            most = min(count - len(data), CHUNK_BYTES)
            try:
                piece = await self._some(most, timeout_s)
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    async def _some(self, most: int, timeout_s: float) -> bytes:
        """Up to `most` bytes. A sleep of this process ends one part of the limit, however long it was."""
        for _ in range(PARTS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s / PARTS):
                    return await self._reader.read(most)
        async with asyncio.timeout(WAKING_S):
            return await self._reader.read(most)

    def close(self) -> None:
        self._writer.close()

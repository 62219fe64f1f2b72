"""Control messages on a byte stream: a 4-byte little-endian length, then msgpack of one protocol Struct.

The same framing serves the trainer's CONTROL streams and the socketpair between a daemon and its executor.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Generic, TypeVar

import msgspec

from peer.errors import WireError
from peer.protocol import MAX_MESSAGE
from peer.wire import CHUNK_BYTES

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
WAKING_S = 0.25


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
            left = self._writer.transport.get_write_buffer_size()
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        return await self._writer.drain()
                except TimeoutError:
                    before, left = left, self._writer.transport.get_write_buffer_size()
                    if left >= before:
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
                try:
                    async with asyncio.timeout(timeout_s):
                        piece = await self._reader.read(most)
                except TimeoutError:  # if it was this process that slept, the bytes are there now
                    async with asyncio.timeout(WAKING_S):
                        piece = await self._reader.read(most)
            except ConnectionError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._writer.close()

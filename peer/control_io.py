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

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


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
        """TimeoutError if the other side does not take it in time; ConnectionError when the stream is broken."""
        raw = msgspec.msgpack.encode(message)
        if len(raw) > self._limit:
            raise WireError(f"{type(message).__name__} of {len(raw)} bytes, at most {self._limit}")
        async with asyncio.timeout(timeout_s), self._turn:
            self._writer.write(_LENGTH.pack(len(raw)) + raw)
            await self._writer.drain()

    async def receive(self, *, timeout_s: float) -> T | None:
        """The next message, None at the end of the stream. TimeoutError after `timeout_s` without one."""
        async with asyncio.timeout(timeout_s):
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > self._limit:
                    raise WireError(f"control message of {length} bytes announced, at most {self._limit}")
                raw = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed control message: {error}") from error

    def close(self) -> None:
        self._writer.close()

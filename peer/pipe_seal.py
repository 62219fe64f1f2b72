"""What makes a pipe private: whoever carries it sees peer ids and lengths, never a byte of what passes.

X25519 with fresh keys, the transcript (both peer ids, both keys) signed by both peers' Ed25519 identities, then
ChaCha20-Poly1305 records, each direction with a key of its own and a counter as nonce. A record that was changed, left
out, repeated or turned round does not open. Source of the pattern: SIGMA (Krawczyk, CRYPTO 2003).
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dht.errors import TransportError
from dht.identity import Identity, peer_id_bytes, public_key_of, verify
from dht.transport import Stream

MAX_PLAIN = 64 << 10
HANDSHAKE_S = 10.0
_CONTEXT = b"fusion-p2p/pipe/1\0"
_KEY, _SIGNATURE, _TAG = 32, 64, 16
_LENGTH = struct.Struct(">I")
_NONCE = struct.Struct(">IQ")


class Unreadable(TransportError):
    """Bytes in a pipe that are not what the peer at its other end sent."""


class Sealer:
    """One direction's records. The nonce counts them, so that each key seals each nonce once."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = ChaCha20Poly1305(key), 0

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(0, self._count)

    def seal(self, plain: bytes) -> bytes:
        """A record: length (4 bytes), ciphertext. At most MAX_PLAIN bytes at once."""
        head = _LENGTH.pack(len(plain) + _TAG)
        return head + self._cipher.encrypt(self._nonce(), plain, head)

    def open(self, head: bytes, body: bytes) -> bytes:
        """The plain bytes of the next record; Unreadable if it is not that."""
        try:
            return self._cipher.decrypt(self._nonce(), body, head)
        except InvalidTag:
            raise Unreadable("a record of the pipe does not open: changed, repeated or left out on its way") from None


class Handshake:
    """One side. `mine` goes to the other as it is; `signed` and `check` prove who is there; `keys` ends it."""

    def __init__(self, identity: Identity, other: str, *, calling: bool) -> None:
        self._identity, self._other, self._calling = identity, other, calling
        self._private = X25519PrivateKey.generate()
        self.mine = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._theirs = b""

    def hear(self, theirs: bytes) -> None:
        """The other side's fresh key."""
        self._theirs = theirs

    def _transcript(self) -> bytes:
        ids = peer_id_bytes(self._identity.peer_id), peer_id_bytes(self._other)
        keys = self.mine, self._theirs
        if not self._calling:
            ids, keys = ids[::-1], keys[::-1]
        return _CONTEXT + b"".join(ids) + b"".join(keys)

    def signature(self) -> bytes:
        return self._identity.sign(self._transcript() + (b"call" if self._calling else b"answer"))

    def check(self, signature: bytes) -> None:
        """Unreadable unless the peer that was meant signed this very exchange."""
        role = b"answer" if self._calling else b"call"
        if not verify(public_key_of(self._other), signature, self._transcript() + role):
            raise Unreadable(f"whoever answers in the pipe is not peer {self._other}")

    def keys(self) -> tuple[bytes, bytes]:
        """(for what this side sends, for what it gets), 32 bytes each."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(self._theirs))
        except ValueError:
            raise Unreadable(f"peer {self._other} offers a key that is none") from None
        made = HKDF(SHA256(), 2 * _KEY, salt=None, info=self._transcript()).derive(shared)
        call, answer = made[:_KEY], made[_KEY:]
        return (call, answer) if self._calling else (answer, call)


class Sealed:
    """The plain bytes of a pipe's stream, once the handshake is done."""

    def __init__(self, stream: Stream, other: str, keys: tuple[bytes, bytes]) -> None:
        self._stream, self.other = stream, other
        self._out, self._in = Sealer(keys[0]), Sealer(keys[1])

    async def read(self) -> bytes:
        """One record's bytes, b"" at the end of the stream. Unreadable ends it."""
        try:
            head = await self._stream.reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            if not _TAG <= length <= MAX_PLAIN + _TAG:
                raise Unreadable(f"a record of {length} bytes in the pipe of peer {self.other}")
            return self._in.open(head, await self._stream.reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return b""

    async def write(self, plain: bytes) -> None:
        self._stream.writer.write(self._out.seal(plain))
        await self._stream.writer.drain()

    def close(self) -> None:
        self._stream.writer.close()


async def call(stream: Stream, identity: Identity, other: str) -> Sealed:
    """The calling side's handshake. Unreadable; TimeoutError after HANDSHAKE_S; EOFError if the pipe broke."""
    shake = Handshake(identity, other, calling=True)
    async with asyncio.timeout(HANDSHAKE_S):
        stream.writer.write(shake.mine)
        shake.hear(await stream.reader.readexactly(_KEY))
        shake.check(await stream.reader.readexactly(_SIGNATURE))
        stream.writer.write(shake.signature())
    return Sealed(stream, other, shake.keys())


async def answer(stream: Stream, identity: Identity, other: str) -> Sealed:
    """The called side's."""
    shake = Handshake(identity, other, calling=False)
    async with asyncio.timeout(HANDSHAKE_S):
        shake.hear(await stream.reader.readexactly(_KEY))
        stream.writer.write(shake.mine + shake.signature())
        shake.check(await stream.reader.readexactly(_SIGNATURE))
    return Sealed(stream, other, shake.keys())


async def pump(sealed: Sealed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Plain bytes of a local stream through the pipe, both ways, until either ends; then both are closed."""

    async def out() -> None:
        while data := await reader.read(MAX_PLAIN):
            await sealed.write(data)

    async def back() -> None:
        while data := await sealed.read():
            writer.write(data)
            await writer.drain()

    tasks = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError, RuntimeError):
            sealed.close()
            writer.close()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, OSError | EOFError):
            raise result

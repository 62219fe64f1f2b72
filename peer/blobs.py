"""Snapshots as blobs: kept by hash, served by range to peers that the plan names, fetched with resume and verified.

Protocol BLOBS, one request a stream: the asker sends a 16-bit length and msgpack `Get`; the holder answers with a
16-bit length and msgpack `Have`, then the bytes from `offset` to the end. No blob is used before its BLAKE2b-256 has
been checked over the whole of it, so a lying or broken holder costs only time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from dht.transport import Stream, Transport
from peer.caps import held_bytes
from peer.channel_io import STREAM_ERRORS, ChannelSettings, LiveReader, LiveWriter
from peer.errors import BlobError, DiskFull, WireError, is_disk_full
from peer.protocol import BLOBS, BlobRef
from peer.ratelimit import Limiter

log = logging.getLogger(__name__)

MAX_REQUEST = 512
CHUNK_BYTES = 128 << 10
MAX_SERVED, MAX_SERVED_PER_PEER = 64, 16  # streams served at once; others are told to come again
ROUNDS = 3  # times that every holder is asked before a fetch gives up
_HASH = re.compile(r"[0-9a-f]{64}")
_LENGTH = struct.Struct("<H")
T = TypeVar("T")


class Get(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of blob `hash` from `offset` on, in the name of `run`."""

    run: str
    hash: str
    offset: int


class Have(msgspec.Struct, frozen=True, array_like=True):
    """The blob's whole size; or why its bytes do not follow."""

    size: int
    refused: str = ""


Authorise = Callable[[str, str, str], bool]
"""(peer that asks, run, hash) -> whether the present plan names it for this blob."""


def blob_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


class BlobStore:
    """A folder of blobs named by their hash. Writing is atomic: beside, fsync, rename.

    `cap_bytes`: no more than that is written while the folder's files, whoever's, take as much; None: no cap.
    """

    def __init__(self, folder: Path, cap_bytes: int | None = None) -> None:
        self._folder, self._cap_bytes = folder, cap_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, blob: str) -> Path:
        """Where the blob is or will be. BlobError if this is no hash."""
        if not _HASH.fullmatch(blob):
            raise BlobError(f"{blob[:80]!r} is no blob's hash: 64 hex digits")
        return self._folder / blob

    def check_room(self, count: int) -> None:
        """DiskFull if `count` more bytes would pass the cap."""
        if self._cap_bytes is not None and (held := held_bytes(self._folder)) + count > self._cap_bytes:
            mib = f"{held / 2**20:.1f} + {count / 2**20:.1f} of {self._cap_bytes / 2**20:.1f} MiB"
            raise DiskFull(f"no room for a snapshot within --disk: {mib}; raise --disk there, or end a run")

    def has(self, blob: str) -> bool:
        return self.path(blob).is_file()

    def put(self, data: bytes | Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Keep these bytes; (hash, size). On a thread where `data` is large: it is hashed and fsynced here."""
        hasher, size = blob_hash(), 0
        part = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            with open(part, "wb", opener=_private) as file:
                for chunk in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
                    if self._cap_bytes is not None:
                        file.flush()  # what is written counts
                        self.check_room(len(chunk))
                    hasher.update(chunk)
                    size += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            self.keep(part, hasher.hexdigest())
        finally:
            part.unlink(missing_ok=True)
        return hasher.hexdigest(), size

    def keep(self, part: Path, blob: str) -> None:
        """Give a part, fsynced and verified, its name, so that it is there after a crash."""
        part.replace(self.path(blob))
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def get(self, ref: BlobRef) -> bytes:
        """The blob's bytes, verified. BlobError if it is not here or damaged."""
        path = self.path(ref.hash)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BlobError(f"blob {ref.hash[:16]} of {ref.size} bytes is not in {self._folder}") from None
        if len(data) != ref.size or _digest(data) != ref.hash:
            raise BlobError(f"{path} is damaged: its bytes do not match their hash; remove it")
        return data

    def delete(self, blob: str) -> None:
        self.path(blob).unlink(missing_ok=True)

    def hashes(self) -> set[str]:
        return {p.name for p in self._folder.iterdir() if _HASH.fullmatch(p.name)}

    def size_bytes(self) -> int:
        return sum(p.stat().st_size for p in self._folder.iterdir() if p.is_file())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _digest(data: bytes) -> str:
    hasher = blob_hash()
    hasher.update(data)
    return hasher.hexdigest()


# --- serving


async def serve_blobs(
    transport: Transport, store: BlobStore, authorise: Authorise, *, limiter: Limiter, settings: ChannelSettings
) -> None:
    """Answer BLOBS on this transport from now on."""
    serving = Counter[str]()

    async def handle(stream: Stream) -> None:
        nonlocal serving
        serving[stream.remote] += 1
        try:
            if serving[stream.remote] > MAX_SERVED_PER_PEER or serving.total() > MAX_SERVED:
                await _say(LiveWriter(stream, limiter), Have(0, "busy"))
            else:
                await _serve_one(stream, store, authorise, limiter, settings)
        except (*STREAM_ERRORS, BlobError) as error:
            log.info("blob for %s: %s", stream.remote, error)
        finally:
            serving[stream.remote] -= 1
            serving += Counter()  # drops the zeros
            stream.writer.close()

    await transport.serve(BLOBS, handle)


async def _serve_one(
    stream: Stream, store: BlobStore, authorise: Authorise, limiter: Limiter, settings: ChannelSettings
) -> None:
    writer = LiveWriter(stream, limiter)
    async with asyncio.timeout(settings.dead_s):
        request = await _read(LiveReader(stream, settings), Get)
    if not authorise(stream.remote, request.run, request.hash) or not store.has(request.hash):
        return await _say(writer, Have(0, "no such blob for you"))
    with store.path(request.hash).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= request.offset <= size:
            return await _say(writer, Have(size, f"offset {request.offset} of {size}"))
        await _say(writer, Have(size))
        file.seek(request.offset)
        while chunk := file.read(limiter.slice_bytes(CHUNK_BYTES)):
            async with asyncio.timeout(settings.dead_s * 8):
                await writer.write(chunk)
    with contextlib.suppress(*STREAM_ERRORS):  # the asker closes when it has all: until then bytes are on their way
        async with asyncio.timeout(settings.dead_s * 8):
            await stream.reader.read(1)


async def _say(writer: LiveWriter, message: msgspec.Struct) -> None:
    raw = msgspec.msgpack.encode(message)
    await writer.write(_LENGTH.pack(len(raw)) + raw)


async def _read(reader: LiveReader, kind: type[T]) -> T:
    (length,) = _LENGTH.unpack(await reader.read_exactly(2))
    if length > MAX_REQUEST:
        raise WireError(f"blob message of {length} bytes announced, at most {MAX_REQUEST}")
    try:
        return msgspec.msgpack.decode(await reader.read_exactly(length), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed blob message: {error}") from error


# --- fetching


async def fetch_blob(
    transport: Transport,
    store: BlobStore,
    run: str,
    ref: BlobRef,
    *,
    max_bytes: int,
    settings: ChannelSettings | None = None,
) -> Path:
    """The blob, verified, in `store`. Holders are asked in an order of this peer's own, so that many who fetch the
    same blob spread over them; each takes up where the last one broke off. BlobError, naming each, if none has it.

    `max_bytes`: most that may be taken.
    """
    settings = settings or ChannelSettings()
    if store.has(ref.hash):
        return store.path(ref.hash)
    if not 0 <= ref.size <= max_bytes:
        raise BlobError(f"blob {ref.hash[:16]} has {ref.size} bytes, at most {max_bytes} are taken here")
    store.check_room(ref.size)
    part = store.path(ref.hash).with_name(f".{ref.hash}.{secrets.token_hex(4)}.part")
    order = sorted(ref.holders, key=lambda holder: _digest(f"{transport.peer_id} {holder}".encode()))
    failures: dict[str, str] = {}
    try:
        for attempt in range(ROUNDS):
            for holder in order:
                try:
                    known = ref.addresses.get(holder, ())
                    await _fetch_from(transport, holder, known, part, store, run, ref, settings)
                except (*STREAM_ERRORS, BlobError) as error:
                    if isinstance(error, DiskFull):
                        raise
                    if is_disk_full(error):
                        raise DiskFull(f"no space left on the disk of {part.parent}; make room there") from None
                    failures[holder] = str(error) or type(error).__name__
                    log.info("blob %s from %s: %s", ref.hash[:16], holder, failures[holder])
                    continue
                if await asyncio.to_thread(_finish, part, store, ref):
                    return store.path(ref.hash)
                failures[holder] = "its bytes do not match the hash"
            if attempt + 1 < ROUNDS:
                await asyncio.sleep(min(settings.backoff_max_s, 0.2 * 2**attempt))
    finally:
        part.unlink(missing_ok=True)
    why = "; ".join(f"{holder}: {reason}" for holder, reason in failures.items()) or "it has no holders"
    raise BlobError(f"blob {ref.hash[:16]} of {ref.size} bytes could not be fetched ({why})")


async def _fetch_from(
    transport: Transport,
    holder: str,
    addresses: tuple[str, ...],
    part: Path,
    store: BlobStore,
    run: str,
    ref: BlobRef,
    settings: ChannelSettings,
) -> None:
    """Append to `part` what is missing. Every wait for a byte ends after `dead_s`."""
    if holder != transport.peer_id:
        await transport.connect(holder, addresses, timeout_s=settings.open_s)
    stream = await transport.open_stream(holder, BLOBS, timeout_s=settings.open_s)
    reader, writer = LiveReader(stream, settings), LiveWriter(stream, Limiter(None))
    file, offset = _append_to(part)
    try:
        async with asyncio.timeout(settings.dead_s):
            await _say(writer, Get(run, ref.hash, offset))
            have = await _read(reader, Have)
        if have.refused:
            raise BlobError(have.refused[:200])
        if have.size != ref.size:
            raise BlobError(f"it has {have.size} bytes, expected {ref.size}")
        while offset < ref.size:
            async with asyncio.timeout(settings.dead_s):
                data = await reader.read_some(min(CHUNK_BYTES, ref.size - offset))
            store.check_room(len(data))  # others may write at the same time
            offset += file.write(data)
    finally:
        stream.writer.close()
        file.close()


def _append_to(part: Path) -> tuple[BinaryIO, int]:
    """The part of a blob, opened at its end, and its size."""
    file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    return file, file.tell()


def _finish(part: Path, store: BlobStore, ref: BlobRef) -> bool:
    """Check the hash, fsync, rename. A part that does not match is thrown away."""
    hasher = blob_hash()
    with part.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
        os.fsync(file.fileno())
    if hasher.hexdigest() != ref.hash:
        part.unlink()
        return False
    store.keep(part, ref.hash)
    return True

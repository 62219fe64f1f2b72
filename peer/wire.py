"""The bytes of tensor streams: frame envelopes, open and answer, cursors (DESIGN sections 2 and 7).

A stream carries one channel, from the peer that opened it to the peer that accepted it:

    opener   -> acceptor   Open, then any of: FRAME (header + payload), DIGEST (header only), BEAT
    acceptor -> opener     Answer, then any of: ACK (cursor), BEAT, REFUSE (ends the stream)

Each record starts with one tag byte. A frame's header carries a 128-bit `digest` of its payload, which also tells
whether a re-sent frame is the same (DESIGN 'Honest difference'), and a CRC-32 of itself, so that a length is trusted
only after its header has been checked. libp2p has authenticated the bytes; the digest finds what was damaged before or
after, and what honest hosts computed differently. Who wants to lie about its own frame need not forge one: it may send
any digest. So it need not be one-way, and is GHASH: 31 GB/s measured on this project's CI machine, BLAKE2b-128 1.3.
"""

from __future__ import annotations

import enum
import struct
import zlib

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusion_p2p.frame import TRAINER, Frame, Kind
from peer.errors import WireError

WIRE_VERSION = 2
CHUNK_BYTES = 128 << 10  # libp2p streams: larger writes hurt slow links, smaller ones cost CPU
MAX_PAYLOAD = 1 << 30
MAX_OPEN = 512
RUN_BYTES = 16

# version, kind, src, dst, run, epoch, src incarnation, value, tick, micro-batch, index, payload length, digest
_FIELDS = struct.Struct("<BBhh16sIIIQIII16s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
_CURSOR = struct.Struct("<QI")
CURSOR_BYTES = _CURSOR.size
_LENGTH = struct.Struct("<H")
_GHASH, _NONCE = AESGCM(bytes(16)), bytes(12)  # a known key: a checksum, no proof of who made it
_KINDS = frozenset(int(k) for k in Kind)


class Tag(enum.IntEnum):
    """What follows on a channel's stream, as its first byte."""

    FRAME = 1
    DIGEST = 2
    BEAT = 3
    ACK = 4
    REFUSE = 5


class Cursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The next frame that is expected: its tick and its index within (channel, tick)."""

    tick: int = 0
    index: int = 0

    def after(self) -> Cursor:
        return Cursor(self.tick, self.index + 1)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A frame's envelope. `incarnation` is the sender stage's, `digest` that of the payload."""

    run: bytes
    epoch: int
    incarnation: int
    kind: Kind
    src: int
    dst: int
    value: int
    tick: int
    micro_batch: int
    index: int
    length: int
    digest: bytes

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.tick, self.index)

    def frame(self, payload: bytes) -> Frame:
        """The frame, once the payload's digest has been checked; WireError if it does not match."""
        if digest(payload) != self.digest:
            raise WireError(f"payload of {self.kind.name} {self.src}->{self.dst} at {self.cursor} is damaged")
        return Frame(self.kind, self.src, self.dst, self.value, self.tick, self.micro_batch, payload)


def digest(payload: bytes) -> bytes:
    """16 bytes: the tag of AES-128-GCM over `payload` as additional data, key and nonce zero (GMAC, NIST SP 800-38D).
    Different payloads share one by chance in 2**-128, on purpose easily."""
    return _GHASH.encrypt(_NONCE, b"", payload)


def header_of(frame: Frame, *, run: bytes, epoch: int, incarnation: int, index: int) -> Header:
    """The envelope of `frame`; `run` is the run id's 16 bytes."""
    return Header(
        run, epoch, incarnation, frame.kind, frame.src, frame.dst, frame.value, frame.tick, frame.micro_batch, index,
        len(frame.payload), digest(frame.payload),
    )  # fmt: skip


def pack_header(h: Header) -> bytes:
    """HEADER_BYTES bytes. WireError when a field does not fit its place."""
    try:
        fields = _FIELDS.pack(
            WIRE_VERSION, h.kind, h.src, h.dst, h.run, h.epoch, h.incarnation, h.value, h.tick, h.micro_batch, h.index,
            h.length, h.digest,
        )  # fmt: skip
    except struct.error as error:
        raise WireError(f"header of {h.kind.name} {h.src}->{h.dst} does not fit the wire: {error}") from error
    if len(h.run) != RUN_BYTES or h.length > MAX_PAYLOAD:
        raise WireError(f"{h.kind.name} {h.src}->{h.dst}: run of {len(h.run)} bytes, payload of {h.length}")
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack_header(raw: bytes) -> Header:
    """The inverse of `pack_header`; WireError on anything else."""
    if len(raw) != HEADER_BYTES:
        raise WireError(f"header of {len(raw)} bytes, expected {HEADER_BYTES}")
    if zlib.crc32(raw[: _FIELDS.size]) != _CRC.unpack_from(raw, _FIELDS.size)[0]:
        raise WireError("damaged frame header: its CRC-32 does not match")
    (version, kind, src, dst, run, epoch, incarnation, value, tick, micro_batch, index, length, payload_digest) = (
        _FIELDS.unpack_from(raw)
    )
    if version != WIRE_VERSION:
        raise WireError(f"frame of wire version {version}, this peer speaks {WIRE_VERSION}")
    if kind not in _KINDS:
        raise WireError(f"frame of unknown kind {kind}")
    if src < TRAINER or dst < TRAINER or src == dst:
        raise WireError(f"frame from stage {src} to stage {dst}")
    if length > MAX_PAYLOAD:
        raise WireError(f"frame of {length} bytes, at most {MAX_PAYLOAD}")
    return Header(
        run, epoch, incarnation, Kind(kind), src, dst, value, tick, micro_batch, index, length, payload_digest
    )


def pack_cursor(cursor: Cursor) -> bytes:
    return _CURSOR.pack(cursor.tick, cursor.index)


def unpack_cursor(raw: bytes) -> Cursor:
    if len(raw) != CURSOR_BYTES:
        raise WireError(f"cursor of {len(raw)} bytes, expected {CURSOR_BYTES}")
    return Cursor(*_CURSOR.unpack(raw))


class Open(msgspec.Struct, frozen=True, array_like=True):
    """First on a stream. `src` speaks, `dst` is the stage it means to reach, both with their incarnations."""

    version: int
    run: bytes
    epoch: int
    plan: int
    src: int
    dst: int
    src_incarnation: int
    dst_incarnation: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """To Open: send from `cursor` on. A non-empty `refused` (stale, unknown, busy, version, ...) ends the stream."""

    cursor: Cursor = Cursor()
    refused: str = ""
    reason: str = ""


_OPEN = msgspec.msgpack.Decoder(Open)
_ANSWER = msgspec.msgpack.Decoder(Answer)


def pack_message(message: Open | Answer) -> bytes:
    """A 16-bit length and msgpack of at most MAX_OPEN bytes (a long reason is cut)."""
    raw = msgspec.msgpack.encode(message)
    if len(raw) > MAX_OPEN and isinstance(message, Answer):
        raw = msgspec.msgpack.encode(Answer(message.cursor, message.refused[:32], message.reason[:100]))
    if len(raw) > MAX_OPEN:
        raise WireError(f"message of {len(raw)} bytes, at most {MAX_OPEN}")
    return _LENGTH.pack(len(raw)) + raw


def message_length(raw: bytes) -> int:
    """The length that the first two bytes of a message announce, checked against MAX_OPEN."""
    (length,) = _LENGTH.unpack(raw)
    if length > MAX_OPEN:
        raise WireError(f"message of {length} bytes announced, at most {MAX_OPEN}")
    return int(length)


def unpack_open(raw: bytes) -> Open:
    """The first message of a channel; WireError if malformed or of another wire version."""
    try:
        message = _OPEN.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed Open: {error}") from error
    if message.version != WIRE_VERSION:
        raise WireError(f"Open of wire version {message.version}, this peer speaks {WIRE_VERSION}")
    return message


def unpack_answer(raw: bytes) -> Answer:
    try:
        return _ANSWER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed Answer: {error}") from error

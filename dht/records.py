"""The records on the bulletin board: typed, versioned, signed by their subject, at most 2 KB, bounded in time.

Layout (key -> subkey -> record):
  fence/FENCE/SHARD  peer id (38 bytes)                       PeerRecord, signed by the peer; and see fence_records
  runs/SHARD         owner key (32) + run id (16)             RunRecord, signed by the run's owner or its session key
  run/RUN            owner key (32) + run id (16) + part name RunStages, RunLinks, RunEvents, RunFigures, likewise
  receipts/RUN       peer id                                  Receipt, signed by the peer; see receipts

A value is: major version (1 byte), delegation flag (1), [session key (32), its expiry (8), the owner's signature (64)],
body (msgpack array, tagged), signature (64) over key, subkey, expiration, version, flag, delegation and body.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from dht.errors import InputError, RecordError
from dht.fence_records import FenceHead, FenceRecord, LinksRecord, index_key, leader_key
from dht.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, peer_id_bytes, verify
from dht.receipts import Receipt, receipts_key
from dht.record_types import (
    NO_FENCE,
    Device,
    Event,
    FencePart,
    LinkBytes,
    PeerRecord,
    Record,
    RunEvents,
    RunFigures,
    RunLinks,
    RunPart,
    RunRecord,
    RunStages,
    StageFigures,
    StageHost,
    Work,
)

__all__ = [
    "FENCE_SHARDS",
    "MAJOR",
    "MAX_RECORD_BYTES",
    "MAX_TTL_S",
    "NO_FENCE",
    "REFRESH_S",
    "RUN_SHARDS",
    "TTL_S",
    "Delegation",
    "Device",
    "Event",
    "FencePart",
    "LinkBytes",
    "PeerRecord",
    "Record",
    "RunEvents",
    "RunFigures",
    "RunLinks",
    "RunPart",
    "RunRecord",
    "RunStages",
    "Signer",
    "StageFigures",
    "StageHost",
    "VersionSkew",
    "Work",
    "clip",
    "fence_keys",
    "key_id",
    "links_keys",
    "own_peer",
    "place",
    "run_id",
    "run_key",
    "runs_keys",
    "seal",
    "unseal",
]

MAJOR = 1
MAX_RECORD_BYTES = 2048
TTL_S = 45.0
REFRESH_S = 15.0
MAX_TTL_S = 75.0  # what a reader accepts: TTL plus what clocks may differ by
FENCE_SHARDS = 4
RUN_SHARDS = 4

_PART_NAMES: dict[type, bytes] = {RunStages: b"s", RunLinks: b"l", RunEvents: b"e", RunFigures: b"f"}
_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()
_DELEGATION = struct.Struct(">32sd64s")


def clip(text: str, chars: int = 240) -> str:
    """`text` as a Text field takes it: at most `chars` characters."""
    return text if len(text) <= chars else text[: chars - 1] + "…"


def run_id(owner: bytes, name: str, opdag_hash: str, seed: int, created: float) -> str:
    """BLAKE2b-128 hex over the msgpack of the five: binds a run's id to its owner's key."""
    raw = _encoder.encode((owner, name, opdag_hash, seed, float(created)))
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def home_key(key: str) -> str:
    """The key whose replicas hold `key` as well: links lie beside the heartbeats, so that one call stores both."""
    return f"fence/{key.removeprefix('links/')}" if key.startswith("links/") else key


def key_id(key: str) -> bytes:
    """The 20 bytes under which `key` is stored: hivemind's own, or beside its home's, where the same nodes are near."""
    home = home_key(key)
    made = hashlib.sha1(_encoder.encode(home), usedforsecurity=False).digest()
    return made if home == key else made[:-1] + bytes((made[-1] ^ 2,))


def fence_keys(fence: str = NO_FENCE) -> tuple[str, ...]:
    """The keys that hold the peers of a fence."""
    return tuple(f"fence/{fence}/{shard}" for shard in range(FENCE_SHARDS))


def links_keys(fence: str = NO_FENCE) -> tuple[str, ...]:
    """The keys that hold the measured links of a fence's members."""
    return tuple(f"links/{fence}/{shard}" for shard in range(FENCE_SHARDS))


def runs_keys() -> tuple[str, ...]:
    """The keys that hold every run's RunRecord."""
    return tuple(f"runs/{shard}" for shard in range(RUN_SHARDS))


def run_key(run: str) -> str:
    """The key that holds the parts of one run."""
    return f"run/{run}"


def _shard(subject: bytes, shards: int) -> int:
    return hashlib.blake2b(subject, digest_size=2).digest()[0] % shards


def place(record: Record) -> tuple[str, bytes]:
    """(key, subkey) at which `record` belongs, and nowhere else."""
    if isinstance(record, PeerRecord):
        subject = peer_id_bytes(record.peer)
        return f"fence/{record.fence}/{_shard(subject, FENCE_SHARDS)}", subject
    if isinstance(record, LinksRecord):
        subject = peer_id_bytes(record.peer)
        return f"links/{record.fence}/{_shard(subject, FENCE_SHARDS)}", subject
    if isinstance(record, FenceRecord):
        return leader_key(record.fence), peer_id_bytes(record.leader)
    if isinstance(record, FenceHead):
        return index_key(record.fence), peer_id_bytes(record.leader)
    if isinstance(record, Receipt):
        return receipts_key(record.run), peer_id_bytes(record.peer)
    subject = record.owner + bytes.fromhex(record.run)
    if isinstance(record, RunRecord):
        return f"runs/{_shard(subject, RUN_SHARDS)}", subject
    return run_key(record.run), subject + _PART_NAMES[type(record)] + str(record.part).encode()


@dataclass(frozen=True, slots=True)
class Delegation:
    """A run's owner lets `session_key` sign records of this one run until `expires` (swarm time)."""

    session_key: bytes
    expires: float
    signature: bytes

    @classmethod
    def sign(cls, owner: Identity, run: str, session_key: bytes, expires: float) -> Delegation:
        return cls(session_key, expires, owner.sign(_delegation_message(run, session_key, expires)))


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signs: a peer for its own record; a run's owner, or the session key it delegated to, for the run's."""

    identity: Identity
    delegation: Delegation | None = None


def _delegation_message(run: str, session_key: bytes, expires: float) -> bytes:
    return b"fusion-p2p/delegate/1\0" + bytes.fromhex(run) + session_key + struct.pack(">d", expires)


def _signed_message(key: bytes, subkey: bytes, expiration: float, signed: bytes) -> bytes:
    head = b"fusion-p2p/record\0" + key + struct.pack(">Hd", len(subkey), expiration) + subkey
    return head + signed


def seal(record: Record, signer: Signer, *, expiration: float) -> bytes:
    """The signed value to store at `place(record)` until `expiration`. RecordError if it breaks a bound."""
    key, subkey = place(record)
    delegation = signer.delegation
    link = (
        b""
        if delegation is None
        else _DELEGATION.pack(delegation.session_key, delegation.expires, delegation.signature)
    )
    signed = bytes((MAJOR, int(delegation is not None))) + link + _encoder.encode(record)
    message = _signed_message(key_id(key), subkey, expiration, signed)
    value = signed + signer.identity.sign(message)
    unseal(key_id(key), subkey, value, expiration, now=expiration - TTL_S)  # never publish what others refuse
    return value


def unseal(key: bytes, subkey: bytes, value: bytes, expiration: float, *, now: float) -> Record:
    """The record in `value`, if every rule holds at swarm time `now`; RecordError names the rule that does not.

    `key`: the 20 bytes of `key_id`; `subkey`: see the module's text.
    """
    if not isinstance(expiration, float) or not math.isfinite(expiration):
        raise RecordError(f"expiration {expiration!r} is not a finite time")
    if expiration < now:
        raise RecordError(f"expired {now - expiration:.1f} s ago")
    if expiration > now + MAX_TTL_S:
        raise RecordError(f"expires in {expiration - now:.0f} s; at most {MAX_TTL_S:.0f} s ahead is accepted")
    if len(value) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(value)} bytes; at most {MAX_RECORD_BYTES} are accepted")
    if len(value) < 2 + SIGNATURE_BYTES or value[1] > 1:
        raise RecordError(f"{len(value)} bytes that are not a record")
    if value[0] != MAJOR:
        raise VersionSkew(value[0], subkey)
    signed, signature = value[:-SIGNATURE_BYTES], value[-SIGNATURE_BYTES:]
    start = 2 + (_DELEGATION.size if value[1] else 0)
    record = _decode(signed[start:])
    expected_key, expected_subkey = place(record)
    if subkey != expected_subkey or key != key_id(expected_key):
        raise RecordError(f"a {type(record).__name__} in another subject's place")
    signer = _signing_key(record, signed, expiration)
    if not verify(signer, signature, _signed_message(key, subkey, expiration, signed)):
        raise RecordError(f"the signature of a {type(record).__name__} of {subkey[:32].hex()} is not its subject's")
    return record


class VersionSkew(RecordError):
    """A record of another major version; `major` and the subject it is filed under (unverified)."""

    def __init__(self, major: int, subkey: bytes) -> None:
        super().__init__(f"a record of major version {major} of {subkey[:PEER_ID_BYTES].hex()}; this is {MAJOR}")
        self.major, self.subkey = major, subkey


def _decode(body: bytes) -> Record:
    try:
        record = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"not a known record: {error}") from error
    if not _finite(record):
        raise RecordError(f"a {type(record).__name__} with a number that is not finite")
    signer = own_peer(record)
    if signer is not None:
        if _not_a_peer_id(signer):
            raise RecordError(f"{signer!r} is not a peer id")
    elif isinstance(record, RunRecord):
        if _not_a_peer_id(record.trainer):
            raise RecordError(f"trainer {record.trainer!r} is not a peer id")
        if record.run != run_id(record.owner, record.name, record.opdag_hash, record.seed, record.created):
            raise RecordError(f"run {record.run} is not of the owner {record.owner.hex()[:16]} who claims it")
    return record


def own_peer(record: Record) -> str | None:
    """The peer that signs this record of its own; None for a run's."""
    if isinstance(record, PeerRecord | LinksRecord | Receipt):
        return record.peer
    return record.leader if isinstance(record, FenceRecord | FenceHead) else None


def _not_a_peer_id(text: str) -> bool:
    try:
        peer_id_bytes(text)
    except InputError:
        return True
    return False


def _signing_key(record: Record, signed: bytes, expiration: float) -> bytes:
    if isinstance(record, PeerRecord | FencePart | Receipt):
        if not signed[1]:
            return peer_id_bytes(own_peer(record) or "")[-32:]
        raise RecordError("a peer signs its own record; nobody may for it")
    if not signed[1]:
        return record.owner
    session_key, expires, signature = _DELEGATION.unpack_from(signed, 2)
    if not math.isfinite(expires) or expires < expiration:
        raise RecordError(f"the record outlives its session key by {expiration - expires:.0f} s")
    if not verify(record.owner, signature, _delegation_message(record.run, session_key, expires)):
        raise RecordError(f"the session key of run {record.run} is not signed by the run's owner")
    return bytes(session_key)


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, msgspec.Struct):
        return all(_finite(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, tuple):
        return all(map(_finite, value))
    return True

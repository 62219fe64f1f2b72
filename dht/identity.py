"""A peer's Ed25519 identity: the key file that p2pd reads, the peer id that carries the public key, signatures.

A peer id is the 38-byte identity multihash of the protobuf-encoded public key (libp2p peer-id specification), so that
the key is read back from the id and no lookup is needed to check a signature.
"""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dht.errors import InputError

PEER_ID_BYTES = 38
SIGNATURE_BYTES = 64
_FILE_PREFIX = bytes.fromhex("08011240")  # protobuf PrivateKey: type Ed25519, data of 64 bytes (seed, public key)
_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: protobuf PublicKey, Ed25519, 32 bytes


def peer_id_of(public_key: bytes) -> str:
    """The peer id (base58 text) of a raw 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise InputError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return base58.b58encode(_ID_PREFIX + public_key).decode("ascii")


@functools.lru_cache(1 << 14)  # base 58 is slow, and a peer meets the same few thousands again and again
def peer_id_bytes(peer_id: str) -> bytes:
    """The 38 bytes of a peer id; InputError if `peer_id` is not the text form of an Ed25519 peer id."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= 64 else b""
    except ValueError:
        raw = b""
    if len(raw) != PEER_ID_BYTES or not raw.startswith(_ID_PREFIX):
        raise InputError(f"{peer_id[:80]!r} is not an Ed25519 peer id; one looks like 12D3KooW...")
    return raw


def peer_id_text(raw: bytes) -> str:
    """The text form of a 38-byte peer id."""
    if len(raw) != PEER_ID_BYTES or not raw.startswith(_ID_PREFIX):
        raise InputError(f"{raw[:40].hex()} is not an Ed25519 peer id of {PEER_ID_BYTES} bytes")
    return base58.b58encode(raw).decode("ascii")


def public_key_of(peer_id: str) -> bytes:
    """The raw 32-byte public key inside a peer id."""
    return peer_id_bytes(peer_id)[len(_ID_PREFIX) :]


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` (64 bytes) of `message` is by the raw 32-byte `public_key`; False for malformed input too."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A signing key. For a peer it is its libp2p identity, for a run its owner or session key."""

    seed: bytes  # 32 bytes, secret
    public_key: bytes  # 32 bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        if len(seed) != 32:
            raise InputError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        return cls(seed, public.public_bytes(Encoding.Raw, PublicFormat.Raw))

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_seed(secrets.token_bytes(32))

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "identity") -> Identity:
        """From libp2p's protobuf private-key bytes; `name` goes into the error."""
        if len(data) != len(_FILE_PREFIX) + 64 or not data.startswith(_FILE_PREFIX):
            raise InputError(
                f"{name} is not an Ed25519 identity (68 bytes); move it away and start again to make a new one"
            )
        identity = cls.from_seed(data[4:36])
        if identity.public_key != data[36:]:
            raise InputError(f"{name} is damaged: its public half does not match; move it away to make a new identity")
        return identity

    def to_bytes(self) -> bytes:
        """libp2p's protobuf private-key bytes, as p2pd's `-id` reads them."""
        return _FILE_PREFIX + self.seed + self.public_key

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the seed

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)


def load_or_create(path: Path) -> Identity:
    """The identity stored at `path`; a new one, mode 0600 from birth, if nothing is there.

    Raises InputError for a damaged file or one that others may read.
    """
    try:
        return load(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity = Identity.generate()
    # Written whole under another name and linked into place: a reader never sees half a key, and of two processes that
    # start at once one wins and the other loads the winner's.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(identity.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        return load(path)
    finally:
        draft.unlink(missing_ok=True)
    return identity


def load(path: Path) -> Identity:
    """The identity stored at `path`; FileNotFoundError if none, InputError if damaged or readable by others."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        data = file.read(128)
    if mode & 0o077:
        raise InputError(f"{path} may be read by others (mode {mode:04o}); run: chmod 600 {path}")
    return Identity.from_bytes(data, str(path))

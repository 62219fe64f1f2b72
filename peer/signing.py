"""Ed25519 signatures over typed bodies: run specs, session certificates, assignments (DESIGN section 7, 'Keys').

The owner key signs RunSpec and SessionCert; the session key signs Assignment. Neither is a peer's identity.
What is signed: `fusion-p2p/1/<type name>\\0` + the body's canonical msgpack, so no body passes for another type.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fusion_p2p.settings import OptimizerSpec
from peer.errors import SignatureError
from peer.protocol import Assignment, RunSpec, SessionCert, Signed

T = TypeVar("T", bound=msgspec.Struct)

MAX_SIGNED_BODY = 64 << 10
_KEY_BYTES = 32


def _domain(type_name: str, body: bytes) -> bytes:
    return b"fusion-p2p/1/" + type_name.encode() + b"\0" + body


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The raw 32-byte public key."""
    return key.public_key().public_bytes_raw()


def new_session_key() -> Ed25519PrivateKey:
    """A fresh key that lives in memory only."""
    return Ed25519PrivateKey.generate()


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """The raw 32-byte private key in `path`, made with mode 0600 from birth if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        raw = Ed25519PrivateKey.generate().private_bytes_raw()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
    raw = path.read_bytes()
    if len(raw) != _KEY_BYTES:
        raise SignatureError(f"{path} holds {len(raw)} bytes, a key has {_KEY_BYTES}: restore it or move it away")
    if path.stat().st_mode & 0o077:
        raise SignatureError(f"others can read the key {path}: run `chmod 600 {path}`")
    return Ed25519PrivateKey.from_private_bytes(raw)


def sign(body: msgspec.Struct, key: Ed25519PrivateKey) -> Signed:
    """`body` as canonical msgpack, signed under its type's name."""
    raw = msgspec.msgpack.encode(body, order="deterministic")
    return Signed(raw, public_bytes(key), key.sign(_domain(type(body).__name__, raw)))


def open_signed(signed: Signed, body_type: type[T], key: bytes) -> T:
    """The body, if `key` (raw 32 bytes) signed it as a `body_type`; SignatureError otherwise."""
    name = body_type.__name__
    if len(signed.body) > MAX_SIGNED_BODY:
        raise SignatureError(f"signed {name} of {len(signed.body)} bytes, at most {MAX_SIGNED_BODY}")
    if signed.key != key:
        raise SignatureError(f"{name} signed by {signed.key.hex()[:16]}, expected {key.hex()[:16]}")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed.signature, _domain(name, signed.body))
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(f"the signature of a {name} by {key.hex()[:16]} does not verify") from error
    try:
        return msgspec.msgpack.decode(signed.body, type=body_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SignatureError(f"signed body is no {name}: {error}") from error


def run_id(owner: bytes, name: str, opdag_hash: str, seed: int, created: float) -> str:
    """BLAKE2b-128 hex over (owner, name, opdag_hash, seed, created)."""
    raw = msgspec.msgpack.encode((owner, name, opdag_hash, seed, created))
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def make_run_spec(
    owner_key: Ed25519PrivateKey,
    *,
    name: str,
    opdag_hash: str,
    seed: int,
    optimizer: OptimizerSpec,
    created: float,
    description: str = "",
) -> tuple[RunSpec, Signed]:
    """A run's immutable spec and its signed form."""
    owner = public_bytes(owner_key)
    spec = RunSpec(
        run=run_id(owner, name, opdag_hash, seed, created),
        name=name,
        owner=owner,
        opdag_hash=opdag_hash,
        seed=seed,
        optimizer=optimizer,
        created=created,
        description=description,
    )
    return spec, sign(spec, owner_key)


def check_own(spec: Signed, owner_key: Ed25519PrivateKey) -> RunSpec:
    """The spec of a run of ours; SignatureError if it was changed, or another owner made it."""
    run, ours = open_signed(spec, RunSpec, spec.key), public_bytes(owner_key)
    if spec.key != ours or run.owner != ours:
        raise SignatureError(
            f"run {run.name} belongs to owner {run.owner.hex()[:16]}, the key here is {ours.hex()[:16]}: "
            f"restore its owner.key into FUSION_HOME"
        )
    return run


def check_session(spec: Signed, cert: Signed, *, remote_peer: str, now: float) -> tuple[RunSpec, SessionCert]:
    """What a volunteer checks of Hello: spec and certificate by the same owner, for this run, for the peer that
    libp2p authenticated, not expired at `now` (unix seconds). Raises SignatureError."""
    run = open_signed(spec, RunSpec, spec.key)
    if run.owner != spec.key:
        raise SignatureError(f"run spec of owner {run.owner.hex()[:16]} is signed by {spec.key.hex()[:16]}")
    if run.run != run_id(run.owner, run.name, run.opdag_hash, run.seed, run.created):
        raise SignatureError(f"run id {run.run[:40]!r} is not the hash of its spec")
    session = open_signed(cert, SessionCert, run.owner)
    if session.run != run.run:
        raise SignatureError(f"session certificate is for run {session.run[:40]!r}, not {run.run}")
    if session.trainer_peer != remote_peer:
        raise SignatureError(f"session certificate names peer {session.trainer_peer[:60]!r}, not {remote_peer}")
    if not session.expires > now:
        raise SignatureError(f"session certificate expired {now - session.expires:.0f} s ago: start the trainer again")
    return run, session


def is_successor(cert: Signed, run: RunSpec, epoch: int) -> bool:
    """Whether the run's owner signed a session of it with a higher epoch: the proof that ours is replaced."""
    try:
        session = open_signed(cert, SessionCert, run.owner)
    except SignatureError:
        return False
    return session.run == run.run and session.epoch > epoch


def check_assignment(
    assignment: Signed, run: RunSpec, session: SessionCert, *, target_peer: str, now: float
) -> Assignment:
    """An assignment that `session` made for `target_peer` in `run`, not expired; SignatureError otherwise."""
    body = open_signed(assignment, Assignment, session.session_key)
    bound = ("run", run.run), ("epoch", session.epoch), ("opdag_hash", run.opdag_hash), ("target_peer", target_peer)
    for name, expected in bound:
        if getattr(body, name) != expected:
            raise SignatureError(f"assignment has {name} {str(getattr(body, name))[:80]!r}, expected {expected!r}")
    if not body.expires > now:
        raise SignatureError(f"assignment of stage {body.stage} expired {now - body.expires:.0f} s ago")
    return body

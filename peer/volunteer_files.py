"""What a volunteer keeps in its home between offers: OP-DAGs by their hash, and the highest assignments seen."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from peer.errors import RefusedError
from peer.policy import Fences
from peer.protocol import Assignment
from peer.trainer_state import write_atomic

log = logging.getLogger("peer.daemon")

OPDAGS_KEPT = 16


class OpDags:
    """The newest OPDAGS_KEPT that came with offers, each checked against the hash that its owner signed."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "opdags"
        self._folder.mkdir(exist_ok=True, mode=0o700)
        for path in self._folder.iterdir():  # what was damaged is sent again, rather than refused for good
            if path.is_file() and _hash(path.read_bytes()) != path.name:
                log.warning("%s is damaged: it goes, and comes again with the next offer", path)
                path.unlink()

    def known(self) -> tuple[str, ...]:
        """Hashes of those that need not be sent."""
        return tuple(sorted(p.name for p in self._folder.iterdir() if len(p.name) == 64))

    def checked(self, opdag_hash: str, sent: bytes) -> bytes:
        """The OP-DAG's bytes, as sent or (b"") as kept; RefusedError (admission) if they are not what was signed."""
        path = self._folder / opdag_hash
        if len(opdag_hash) != 64 or not set(opdag_hash) <= set("0123456789abcdef"):
            raise RefusedError("admission", f"{opdag_hash[:80]!r} is no OP-DAG's hash")
        raw = sent
        if not raw:
            if not path.is_file():
                raise RefusedError("admission", f"OP-DAG {opdag_hash[:16]} is not here; send it with the offer")
            raw = path.read_bytes()
        if _hash(raw) != opdag_hash:
            if not sent:
                path.unlink(missing_ok=True)
            raise RefusedError("admission", f"the OP-DAG's bytes do not have the signed hash {opdag_hash[:16]}")
        if sent:
            write_atomic(path, sent)
            kept = sorted(self._folder.iterdir(), key=lambda p: p.stat().st_mtime)
            for old in kept[:-OPDAGS_KEPT]:
                old.unlink()
        return raw


def _hash(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=32).hexdigest()


class KeptFences:
    """`Fences` that outlive the daemon: on disk before an offer is answered."""

    def __init__(self, home: Path) -> None:
        self._path = home / "fences.json"
        self._fences = self._load()

    def check(self, a: Assignment) -> None:
        """RefusedError (lease) for an assignment older than one already seen; else it is remembered."""
        self._fences.check(a)
        write_atomic(self._path, msgspec.json.encode(self._fences.to_dict()))

    def _load(self) -> Fences:
        try:
            return Fences(msgspec.json.decode(self._path.read_bytes(), type=dict[str, tuple[int, int]]))
        except FileNotFoundError:
            return Fences()
        except msgspec.MsgspecError as error:
            log.warning("%s is damaged (%s): begun anew", self._path, error)
            return Fences()

"""The trainer's run folder: everything that a run needs to go on tomorrow, written atomically.

spec.json           the signed, immutable RunSpec
opdag.json          its OP-DAG
numeric_log.jsonl   signed NumericLogEntry, one a line, append only
ladder.json         what the codecs cost on this model, where that was measured
replay_log.jsonl    the numeric log of another run that this one repeats, where it was given one
progress.json       Progress: for people and for `list`; never needed to resume
state/000000012/    one complete set: stage-0.bin ... and manifest.json, which is written last
hosts.json          Hosts: where the stages run, for a session that starts while they still do
audit.jsonl         per step, the loss and a hash of what each stage sent: what an audit compares with
released.jsonl      Released, one a line: the ticks since the newest set, written before their data is sent
spool/              batches released since the oldest kept set, where the data source cannot seek
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from peer.blobs import BlobStore
from peer.errors import BlobError
from peer.protocol import RunSpec, Signed

SETS_KEPT = 2
T = TypeVar("T")


class StageFile(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    hash: str  # BLAKE2b-256 hex of the snapshot's bytes
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One complete set: every stage's snapshot at the boundary before `tick`, and the data's position there."""

    run: str
    opdag_hash: str
    tick: int
    step: int
    epoch: int  # the trainer session that wrote it
    numerics: Numerics
    stages: tuple[StageFile, ...]
    data_state: bytes = b""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is, kept in its folder for `list`, `show` and whoever resumes it."""

    name: str
    run: str
    phase: str  # waiting, training, paused, stopped, done
    epoch: int
    tick: int
    step: int
    loss: float | None = None
    set_tick: int = 0
    reason: str = ""


class Audited(msgspec.Struct, frozen=True):
    """`sent`: stage -> BLAKE2b-128 of what it sent in the step, hex, by its own report."""

    step: int
    loss: float
    sent: dict[int, str]


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in force, and the addresses of the peers that it names."""

    plan: Plan
    addresses: dict[str, tuple[str, ...]]


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """One released tick. `digest`: BLAKE2b-128 over its frames' payloads, by which the batch is known again."""

    tick: int
    step: int
    training: bool
    digest: bytes


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write beside, fsync, rename, fsync the folder: after a crash the old or the new bytes are there, never half."""
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunFolder:
    """Reads and writes one run's folder. Readers raise InputError naming the file at fault."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._journal = threading.Lock()

    @property
    def blobs(self) -> BlobStore:
        return BlobStore(self.root / "state" / "blobs")

    @property
    def exists(self) -> bool:
        return (self.root / "spec.json").exists()

    def make(self) -> None:
        """The folder itself, if it is missing. InputError where it cannot be made or written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(f"run folder {str(self.root)[:200]!r} cannot be used: {why}; give another one") from None

    def create(self, spec: Signed, opdag: bytes) -> None:
        """Begin a run here; InputError if one is here already (a spec is immutable)."""
        if self.exists:
            raise InputError(f"{self.root} holds a run already; continue it with: fusion-run resume {self.root}")
        (self.root / "state").mkdir(parents=True, exist_ok=True)
        write_atomic(self.root / "opdag.json", opdag)
        write_atomic(self.root / "spec.json", msgspec.json.encode(spec))

    def forget_start(self) -> None:
        """Remove what a run that never had a complete set left here, so that it may be started again."""
        for name in (
            "spec.json", "opdag.json", "numeric_log.jsonl", "replay_log.jsonl", "hosts.json", "released.jsonl",
            "audit.jsonl", "ladder.json",
        ):  # fmt: skip
            (self.root / name).unlink(missing_ok=True)
        for name in ("state", "spool"):
            shutil.rmtree(self.root / name, ignore_errors=True)

    def spec(self) -> tuple[Signed, RunSpec]:
        """The signed spec and its body; the caller checks the signature."""
        path = self.root / "spec.json"
        if not path.exists():
            raise InputError(f"{self.root} holds no run (no spec.json); start one with: fusion-run train CONFIG")
        signed = self._read(path, Signed)
        try:
            return signed, msgspec.msgpack.decode(signed.body, type=RunSpec)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}") from None

    def opdag(self) -> bytes:
        """The OP-DAG's bytes, checked against the spec."""
        path, wanted = self.root / "opdag.json", self.spec()[1].opdag_hash
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        found = hashlib.blake2b(data, digest_size=32).hexdigest()
        if found != wanted:
            raise InputError(f"{path} has hash {found[:12]}, the spec names {wanted[:12]}: it belongs to another run")
        return data

    def append_numerics(self, signed: Signed) -> None:
        path = self.root / "numeric_log.jsonl"
        with path.open("ab") as file:
            file.write(msgspec.json.encode(signed) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def numeric_log(self) -> list[tuple[Signed, NumericLogEntry]]:
        path = self.root / "numeric_log.jsonl"
        if not path.exists():
            return []
        log = []
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                signed = msgspec.json.decode(line, type=Signed)
                log.append((signed, msgspec.msgpack.decode(signed.body, type=NumericLogEntry)))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise InputError(f"{path} line {number} is damaged: {error}") from None
        return log

    def write_progress(self, progress: Progress) -> None:
        write_atomic(self.root / "progress.json", msgspec.json.encode(progress))

    def append_audit(self, steps: Iterable[Audited]) -> None:
        """A step that was done again has another line."""
        with (self.root / "audit.jsonl").open("ab") as file:
            file.write(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))

    def progress(self) -> Progress:
        return self._read(self.root / "progress.json", Progress)

    def save_hosts(self, hosts: Hosts) -> None:
        write_atomic(self.root / "hosts.json", msgspec.json.encode(hosts))

    def hosts(self) -> Hosts | None:
        """None where it is missing or damaged: then the stages are placed anew."""
        try:
            return self._read(self.root / "hosts.json", Hosts)
        except InputError:
            return None

    def note_release(self, released: Released) -> None:
        """On disk before the data leaves. Not fsynced: what a power cut takes away is only that stages are adopted."""
        with self._journal, (self.root / "released.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(released) + b"\n")

    def released(self, first_tick: int) -> list[Released]:
        """The ticks from `first_tick` on, in order. InputError where one is missing or damaged."""
        path = self.root / "released.jsonl"
        found: dict[int, Released] = {}
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
            try:
                entry = msgspec.json.decode(line, type=Released)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise InputError(f"{path} line {number} is damaged: {error}") from None
            found[entry.tick] = entry  # a tick that was released again counts as it was last
        ticks = sorted(tick for tick in found if tick >= first_tick)
        if ticks != list(range(first_tick, first_tick + len(ticks))):
            raise InputError(f"{path} lacks a tick from {first_tick} on")
        return [found[tick] for tick in ticks]

    def forget_releases(self, first_tick: int | None = None) -> None:
        """Keep only the ticks from `first_tick` on; None: none."""
        with self._journal:
            kept = [] if first_tick is None else self.released(first_tick)
            write_atomic(self.root / "released.jsonl", b"".join(msgspec.json.encode(r) + b"\n" for r in kept))

    def next_epoch(self) -> int:
        """This session's number, above every earlier one's; on disk before it is used (DESIGN 'Fencing')."""
        path = self.root / "epoch"
        try:
            epoch = int(path.read_bytes()) + 1 if path.exists() else 1
        except ValueError:
            raise InputError(
                f"{path} is damaged; write a number into it that no earlier session of this run had, as 1000000"
            ) from None
        write_atomic(path, str(epoch).encode())
        return epoch

    def save_set(self, manifest: Manifest) -> None:
        """Add a complete set and forget all but the newest two. BlobError unless its blobs are all in `blobs`."""
        for entry in manifest.stages:
            if not self.blobs.has(entry.hash):
                raise BlobError(f"stage {entry.stage}'s snapshot at tick {manifest.tick} is not in {self.root}/state")
        write_atomic(self._set_path(manifest.tick), msgspec.json.encode(manifest))
        sets = self.sets()
        for tick in sets[:-SETS_KEPT]:
            self._set_path(tick).unlink(missing_ok=True)
        kept = {e.hash for tick in sets[-SETS_KEPT:] for e in self._manifest_at(tick).stages}
        for blob in self.blobs.hashes() - kept:
            self.blobs.delete(blob)

    def sets(self) -> list[int]:
        """Ticks of the complete sets, oldest first."""
        return sorted(int(p.stem) for p in (self.root / "state").glob("[0-9]*.json") if p.stem.isdecimal())

    def manifest(self, tick: int | None = None) -> Manifest:
        """The set at `tick`, by default the newest."""
        sets = self.sets()
        if not sets or (tick is not None and tick not in sets):
            at = "" if tick is None else f" at tick {tick}"
            raise InputError(f"{self.root / 'state'} holds no complete set{at}; it has {sets or 'none'}")
        manifest, spec = self._manifest_at(sets[-1] if tick is None else tick), self.spec()[1]
        if manifest.run != spec.run:
            path = self._set_path(manifest.tick)
            raise InputError(f"{path} belongs to run {manifest.run[:12]}, this folder to run {spec.run[:12]}")
        return manifest

    def mend(self) -> list[str]:
        """Put a damaged newest set aside, if an older one is whole; what was done, one line a set.

        The damaged file goes: the same weights, trained again, have its name. InputError if no set is whole.
        """
        said: list[str] = []
        while ticks := self.sets():
            try:
                for entry in self._manifest_at(ticks[-1]).stages:
                    self._snapshot(entry)
                break
            except InputError as error:
                if not self._is_whole_before(ticks):
                    raise
                said.append(f"{error}; going on from the set at tick {ticks[-2]}")
                for blob in self._damaged(ticks[-1]):
                    self.blobs.delete(blob)
                self._set_path(ticks[-1]).unlink()
        return said

    def _is_whole_before(self, ticks: list[int]) -> bool:
        return len(ticks) > 1 and not self._damaged(ticks[-2])

    def _damaged(self, tick: int) -> list[str]:
        """The blobs of this set that are not what they should be."""
        damaged = []
        try:
            entries = self._manifest_at(tick).stages
        except InputError:
            return [] if tick == self.sets()[-1] else ["the manifest"]
        for entry in entries:
            try:
                self._snapshot(entry)
            except InputError:
                damaged.append(entry.hash)
        return damaged

    def snapshots(self, manifest: Manifest) -> dict[int, bytes]:
        """The bytes of each stage, verified against the manifest."""
        return {e.stage: self._snapshot(e) for e in manifest.stages}

    def _snapshot(self, entry: StageFile) -> bytes:
        path = self.blobs.path(entry.hash)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} (stage {entry.stage}) cannot be read: {error.strerror}") from None
        if len(data) != entry.size:
            raise InputError(f"{path} (stage {entry.stage}) is truncated: {len(data)} of {entry.size} bytes")
        if hashlib.blake2b(data, digest_size=32).hexdigest() != entry.hash:
            raise InputError(f"{path} (stage {entry.stage}) is damaged: its bytes do not match its name")
        return data

    def _manifest_at(self, tick: int) -> Manifest:
        return self._read(self._set_path(tick), Manifest)

    def _set_path(self, tick: int) -> Path:
        return self.root / "state" / f"{tick:09d}.json"

    @staticmethod
    def _read(path: Path, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}") from None

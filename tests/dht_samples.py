"""Records for tests of `dht`."""

from __future__ import annotations

from dht.identity import Identity
from dht.records import Delegation, Device, PeerRecord, RunRecord, Signer, run_id

NOW = 1_000_000.0
CPU = Device(
    kind="cpu", name="test", flops_per_s=5e10, memory_bytes_per_s=1e10, memory_bytes=8 << 30, free_bytes=4 << 30
)


def peer_record(identity: Identity, **fields: object) -> PeerRecord:
    return PeerRecord(**{"peer": identity.peer_id, "version": "0.1.0", "devices": (CPU,), **fields})  # type: ignore[arg-type]


def run_record(owner: Identity, trainer: str, **fields: object) -> RunRecord:
    name = str(fields.pop("name", "demo"))
    base = {
        "run": run_id(owner.public_key, name, "ab" * 32, 7, 1.5),
        "owner": owner.public_key,
        "name": name,
        "opdag_hash": "ab" * 32,
        "seed": 7,
        "created": 1.5,
        "trainer": trainer,
        "state": "training",
    }
    return RunRecord(**{**base, **fields})  # type: ignore[arg-type]


def session_signer(owner: Identity, run: str, expires: float) -> Signer:
    session = Identity.generate()
    return Signer(session, Delegation.sign(owner, run, session.public_key, expires))

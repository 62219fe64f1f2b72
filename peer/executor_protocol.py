"""Messages between a volunteer's daemon and the executor of one device, over a private socketpair (control_io frames).

What the daemon has checked (signatures, policy, lease) is not checked again; what is heavy (the OP-DAG, the trial step,
the state's bytes) is checked in the executor, whose memory is limited and whose death the daemon survives.
"""

from __future__ import annotations

import msgspec

from fusion_p2p.plan import Numerics
from fusion_p2p.suspicion import Watched
from peer.protocol import (
    MAX_MESSAGE,
    Accepted,
    Assignment,
    BlobRef,
    Connect,
    Drop,
    Mark,
    Marked,
    Pass,
    Refused,
    RunSpec,
    Snapshotted,
    StageFault,
    StageStatus,
    Suspect,
    Trim,
)

MAX_PRIVATE_MESSAGE = 2 * MAX_MESSAGE  # a StageOffer of the largest size is passed on with the run's spec

# --- daemon -> executor


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """First. `memory_bytes`: most that the process may hold; `upload_bytes_per_s` None: no cap; `blobs`: the folder of
    snapshots, which may take `blob_bytes` (None: no cap) and in which outboxes may have `spill_bytes` too; `operators`:
    the folder of operators' times; `vram_bytes`
    0: all of the device's; `framework`: what runs the operators, "torch" or "jax"."""

    control_address: str
    device: str
    framework: str
    threads: int
    memory_bytes: int
    vram_bytes: int
    upload_bytes_per_s: float | None
    blobs: str
    blob_bytes: int | None
    operators: str
    spill_bytes: int
    beat_s: float
    dead_s: float


class HostStage(msgspec.Struct, frozen=True, tag="host", kw_only=True):
    """A checked StageOffer. `opdag` is never empty here."""

    spec: RunSpec
    assignment: Assignment
    numerics: Numerics
    window: int
    opdag: bytes
    state: BlobRef
    first_tick: int
    trial: bool
    logged: bool
    watched: tuple[Watched, ...] = ()


class Adopt(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """A new session of the run's trainer goes on with this stage as it is; answered by Accepted."""

    run: str
    stage: int


class Lease(msgspec.Struct, frozen=True, tag="lease", kw_only=True):
    """Whether the run's trainer has been heard of lately; without, its stages send nothing."""

    run: str
    held: bool


class Upload(msgspec.Struct, frozen=True, tag="upload", kw_only=True):
    """This executor's share of the upload cap from now on."""

    bytes_per_s: float | None


ToExecutor = Start | HostStage | Adopt | Connect | Mark | Trim | Pass | Drop | Lease | Upload

# --- executor -> daemon


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The device as measured: fp32 matrix products and memory copies. `base_bytes`: resident before any stage."""

    device: str
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    base_bytes: int


class Beat(msgspec.Struct, frozen=True, tag="beat", kw_only=True):
    """Every 2 s: the loop is alive. `stages` as (run, stage)."""

    resident_bytes: int
    stages: tuple[tuple[str, int], ...] = ()
    observed: tuple[tuple[str, int, float], ...] = ()  # (peer, bytes it took, in seconds) since the last beat


FromExecutor = Ready | Beat | Accepted | Refused | Marked | Snapshotted | StageStatus | StageFault | Suspect

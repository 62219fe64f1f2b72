"""Control messages between a trainer and a volunteer, and between a volunteer's daemon and its executor.

One control stream per (trainer, volunteer), protocol `CONTROL`; length-prefixed msgpack of the unions below, each
message at most MAX_MESSAGE bytes. The daemon answers Hello, checks policy and caps, then hands each StageOffer and
StageCommand to the executor of the device over a private socketpair that carries the same messages.
Tensor frames never pass here: they go from executor to executor over `data_protocol(endpoint)`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.suspicion import FrameId, Suspicion, Watched
from peer.plain import one_line

PROTOCOL_VERSION = 1
CONTROL = f"/fusion/{PROTOCOL_VERSION}/control"
BLOBS = f"/fusion/{PROTOCOL_VERSION}/blobs"
MAX_MESSAGE = 16 << 20

# What a volunteer says is bounded where it is decoded: it is shown, summed and put on the board.
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
MAX_ATOMS = 1 << 16
MAX_STAGES = 1 << 12
MAX_ADDRESSES, MAX_ADDRESS = 16, 512  # of one peer; characters
Addresses = Annotated[tuple[Annotated[str, Meta(max_length=MAX_ADDRESS)], ...], Meta(max_length=MAX_ADDRESSES)]
MAX_EPOCH = 2**32 - 1  # as frames' headers carry it
Channel = Annotated[str, Meta(pattern="^-?[0-9]{1,10}--?[0-9]{1,10}$")]


def bounded(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a peer's addresses, as it published them, that a message may hold."""
    return tuple(a for a in addresses if len(a) <= MAX_ADDRESS)[:MAX_ADDRESSES]


def data_protocol(endpoint: str) -> str:
    """The libp2p protocol under which one executor (or one trainer session) takes tensor streams."""
    return f"/fusion/{PROTOCOL_VERSION}/data/{endpoint}"


class Signed(msgspec.Struct, frozen=True):
    """`body` signed by `key` (Ed25519, raw 32 bytes); `body` is the canonical msgpack of a Struct below."""

    body: bytes
    key: bytes
    signature: bytes


class SessionCert(msgspec.Struct, frozen=True, kw_only=True):
    """Body signed by the run's owner key: this session key may act for the run until `expires` (unix seconds)."""

    run: str
    session_key: bytes
    trainer_peer: str
    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    expires: float


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable; body signed by the owner. `run` is BLAKE2b-128 hex of (owner, name, opdag, seed, created)."""

    run: str
    name: str
    owner: bytes
    opdag_hash: str
    seed: int
    optimizer: OptimizerSpec
    created: float
    description: str = ""


class BlobRef(msgspec.Struct, frozen=True):
    """A snapshot's bytes: BLAKE2b-256 hex, size, the peers that hold it, and where those live as far as it is known.
    Who cannot be dialled is reached by way of the hosts that its addresses name, and in no other way."""

    hash: str
    size: int
    holders: tuple[str, ...]
    addresses: Annotated[dict[str, Addresses], Meta(max_length=64)] = {}


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Body signed by the session key. Bound to everything DESIGN section 7 names."""

    run: str
    epoch: int
    plan: int
    stage: int
    replica: int
    incarnation: int
    opdag_hash: str
    target_peer: str
    device: str
    expires: float


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one end of the streams lives now. `stage` is TRAINER (-1) for the trainer."""

    stage: int
    peer: str
    endpoint: str
    incarnation: int
    addresses: Addresses = ()


# --- trainer -> volunteer


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    version: int
    spec: Signed  # RunSpec
    cert: Signed  # SessionCert


class Renew(msgspec.Struct, frozen=True, tag="renew", kw_only=True):
    """The session's certificate with a later end: same key, same epoch."""

    cert: Signed  # SessionCert


class StageOffer(msgspec.Struct, frozen=True, tag="offer", kw_only=True):
    """`opdag` may be empty when the volunteer said in Welcome that it has this hash. `state` restores the stage at
    `first_tick`; `trial` runs one full-shape step first, so that out-of-memory is a refusal with figures; `logged`:
    keep what was sent until a Trim covers it. `adopt`: the stage runs here already, under this incarnation, and goes on
    where it is for this session; refused (gone) where it does not. Then nothing else of the offer counts. `watched`:
    frames into the stage of which a Suspect is wanted whatever they are."""

    assignment: Signed
    numerics: Numerics
    window: int
    opdag: bytes
    state: BlobRef
    first_tick: int
    trial: bool = True
    logged: bool = False
    adopt: bool = False
    watched: Annotated[tuple[Watched, ...], Meta(max_length=16)] = ()


class Connect(msgspec.Struct, frozen=True, tag="connect", kw_only=True):
    """Who is at the other ends; sent again, with a higher plan number, whenever one moves."""

    run: str
    plan: int
    stage: int
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=MAX_STAGES + 1)]
    buddies: Annotated[tuple[str, ...], Meta(max_length=4096)] = ()  # who else may fetch the stage's snapshots
    epoch: int = 0  # filled in by the daemon, from the session's certificate


class Mark(msgspec.Struct, frozen=True, tag="mark", kw_only=True):
    """Snapshot at the boundary before `tick` (not yet released); answered by Marked at once, then by Snapshotted."""

    run: str
    stage: int
    tick: int


class Trim(msgspec.Struct, frozen=True, tag="trim", kw_only=True):
    """A set at `tick` is complete: frames and snapshots before it are no longer needed. `stage` -1: to a peer that
    hosts none, and keeps those of others."""

    run: str
    stage: int
    tick: int


class Keep(msgspec.Struct, frozen=True, tag="keep", kw_only=True):
    """Fetch this snapshot of somebody's stage and keep it, serving it to `readers`; answered by Kept."""

    run: str
    stage: int
    tick: int
    state: BlobRef
    readers: Annotated[tuple[str, ...], Meta(max_length=4096)]


class Pass(msgspec.Struct, frozen=True, tag="pass", kw_only=True):
    """The frame that the stage suspected may be used."""

    run: str
    stage: int
    frame: FrameId


class Drop(msgspec.Struct, frozen=True, tag="drop", kw_only=True):
    """The stage is over; forget it."""

    run: str
    stage: int
    reason: str = ""

    def __post_init__(self) -> None:
        _plain(self, "reason")


# --- volunteer -> trainer


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A stage that is still here from an earlier session."""

    stage: int
    incarnation: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """`held`: stages of this run that are still here from before; the trainer drops those it does not adopt."""

    version: int
    peer: str
    devices: tuple[str, ...]
    have_opdags: tuple[str, ...] = ()
    held: Annotated[tuple[Held, ...], Meta(max_length=4096)] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """`code`: version, policy, busy, lease, memory, admission, signature, state (its bytes could not be had),
    gone (the stage that is to be adopted does not run here).

    `cert`: of the session that leads the run now, where the trainer was put out: without this proof it does not end.
    `needed` and `cap` in bytes for memory. `run` and `stage` of the offer; "" and -1 in answer to a hello.
    """

    code: str
    reason: str
    stage: int = -1
    needed: Bytes = 0
    cap: Bytes = 0
    run: str = ""
    cert: Signed | None = None  # SessionCert

    def __post_init__(self) -> None:
        _plain(self, "code", "reason", "run")


class AtomSeconds(msgspec.Struct, frozen=True, array_like=True):
    """How long one atom of the model takes on a device, for a micro-batch of the run's size."""

    forward_s: Seconds
    backward_s: Seconds


class Accepted(msgspec.Struct, frozen=True, tag="accepted", kw_only=True):
    """A volunteer takes the stage: where it answers, its memory in bytes, what its trial step took in seconds."""

    run: str
    stage: int
    incarnation: int
    endpoint: str
    memory_bytes: Bytes
    tick: Bytes = 0  # where the stage is, if it was adopted
    trial_forward_s: Seconds = 0.0
    trial_backward_s: Seconds = 0.0
    atoms: Annotated[tuple[AtomSeconds, ...], Meta(max_length=MAX_ATOMS)] = ()  # all of them, where the device knows


class Marked(msgspec.Struct, frozen=True, tag="marked", kw_only=True):
    """The mark is noted: the stage will not pass `tick` without its snapshot. Then the tick may be released."""

    run: str
    stage: int
    tick: int


class Snapshotted(msgspec.Struct, frozen=True, tag="snapshotted", kw_only=True):
    """A stage's state at `tick` lies at its host, under the hash in `state`."""

    run: str
    stage: int
    incarnation: int
    tick: int
    state: BlobRef


class Kept(msgspec.Struct, frozen=True, tag="kept", kw_only=True):
    """The snapshot is here, verified; or why it is not."""

    run: str
    stage: int
    tick: int
    reason: str = ""

    def __post_init__(self) -> None:
        _plain(self, "reason")


class Took(msgspec.Struct, frozen=True, array_like=True):
    """New frames accepted from a neighbour, their payload bytes, and the FLOPs, by this host's own copy of the OP-DAG,
    of the micro-batches of which a tensor came in ticks that were trained on and have ended."""

    frames: Bytes = 0
    bytes: Bytes = 0
    flops: Annotated[float, Meta(ge=0, le=1e30)] = 0.0


class StageStatus(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Every heartbeat. `waiting_for` names what the stage waits for, "" when it computes; rates from its streams."""

    run: str
    stage: int
    incarnation: int
    tick: int
    waiting_for: str = ""
    waited_s: Seconds = 0.0
    bytes_sent: Annotated[dict[Channel, Bytes], Meta(max_length=4096)] = {}  # "src-dst" -> bytes since the start
    resident_bytes: Bytes = 0
    held_up_s: Seconds = 0.0  # it has stood still so long, in all, because its neighbours did not take what it sent
    accepted: Annotated[dict[int, Took], Meta(max_length=4096)] = {}  # by neighbouring stage
    outbox_share: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # of the memory for a replay: half full asks for a set
    differing: Bytes = 0  # frames that were sent again and were not the same bytes; they were kept out

    def __post_init__(self) -> None:
        _plain(self, "waiting_for")


class StageFault(msgspec.Struct, frozen=True, tag="fault", kw_only=True):
    """The stage stopped or a neighbour is gone; `peer` is the one it concerns ("" for itself).

    `code` of itself: died, frame, memory, leaving, mark; of `peer`: peer-lost, back (it is reached again), peer-frame
    (it sent what does not fit), refused (it says that of us), stale, gap, apart (the two ends of a link no longer
    agree, as after one was computed again on other hardware: the stage stopped, and nobody is to blame).
    """

    run: str
    stage: int
    incarnation: int
    code: str
    reason: str
    peer: str = ""

    def __post_init__(self) -> None:
        _plain(self, "code", "reason", "peer")


class Suspect(msgspec.Struct, frozen=True, tag="suspect", kw_only=True):
    """The stage holds back a frame that came in, and what depends on it, until a Pass or another host of it."""

    run: str
    stage: int
    incarnation: int
    what: Suspicion


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    pass


ToVolunteer = Hello | Renew | StageOffer | Connect | Mark | Trim | Keep | Pass | Drop | Heartbeat
ToTrainer = Welcome | Refused | Accepted | Marked | Snapshotted | Kept | StageStatus | StageFault | Suspect | Heartbeat


def _plain(message: msgspec.Struct, *fields: str) -> None:
    """What the other side wrote is printed here, so it is one printable line from the moment it is decoded."""
    for field in fields:
        msgspec.structs.force_setattr(message, field, one_line(getattr(message, field)))

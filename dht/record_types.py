"""The types of the records of peers and runs, with the bounds of every field.

Fields are only ever appended, with defaults: readers of one major version ignore what they do not know.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from dht.fence_records import FenceHead, FenceRecord, LinksRecord
from dht.receipts import Receipt

NO_FENCE = "0"  # every peer's fence until fences are elected

Name = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=240)]
PeerText = Annotated[str, Meta(min_length=46, max_length=64)]
RunId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Key32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Rate = Annotated[float, Meta(ge=0, le=1e21)]
Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]  # unix time or a duration


class Device(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`kind`: cpu, cuda. Rates are measured; `free_bytes` is what a stage may take now, under the volunteer's cap."""

    kind: Name
    name: Name
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    memory_bytes: Size
    free_bytes: Size


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One stage that a peer hosts; stage -1: it is the run's trainer."""

    run: RunId
    stage: Annotated[int, Meta(ge=-1, le=1 << 20)]


class PeerRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="peer"):
    """What a peer offers and does now. `hours` is local time, "22:00-07:00", "" for always. `place`: roughly where it
    is, in its owner's words, if they chose to say. `relay_mbps`: what it carries for peers that cannot be dialled.
    `disk_bytes`: what it keeps for others, all its devices together; 0 is no cap."""

    peer: PeerText
    version: Name
    devices: Annotated[tuple[Device, ...], Meta(max_length=16)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=8)] = ()
    hours: Annotated[str, Meta(max_length=32)] = ""
    state: Literal["free", "busy", "paused", "left"] = "free"
    work: Annotated[tuple[Work, ...], Meta(max_length=16)] = ()
    fence: Annotated[str, Meta(min_length=1, max_length=32)] = NO_FENCE
    published: Seconds = 0.0  # swarm time; the board fills it
    leader: Annotated[str, Meta(max_length=64)] = ""  # of the fence, as this member sees it; "" for none
    term: Count = 0
    reach: Literal["", "direct", "relay", "none"] = ""  # how others reach it, as another peer tried; "" unknown
    place: Annotated[str, Meta(max_length=32)] = ""
    relay_mbps: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    disk_bytes: Size = 0


class RunRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="run"):
    """A run's progress. `run` is `run_id(owner, name, opdag_hash, seed, created)`, so nobody can claim another's id.

    `reason`: why it waits, is paused or failed, "" otherwise; `since`: swarm time of the last change of state.
    None means unknown (or not a finite number, for a loss).
    """

    run: RunId
    owner: Key32
    name: Name
    opdag_hash: Annotated[str, Meta(max_length=64)]
    seed: int
    created: Seconds
    trainer: PeerText
    state: Literal["waiting", "training", "paused", "done", "failed"]
    reason: Text = ""
    since: Seconds = 0.0
    epoch: Count = 0
    plan: Count = 0
    step: Count = 0
    total: Count = 0
    loss: Annotated[float, Meta(ge=-1e30, le=1e30)] | None = None
    step_time_s: Seconds | None = None
    tokens_per_s: Rate | None = None
    published: Seconds = 0.0
    wanted_peers: Count = 0  # more volunteers that it waits for
    wanted_bytes: Size = 0  # device memory that each of them should offer; 0 unknown


class StageHost(msgspec.Struct, frozen=True, array_like=True):
    stage: Annotated[int, Meta(ge=0, le=1 << 20)]
    replica: Annotated[int, Meta(ge=0, le=1 << 20)]
    peer: PeerText
    device: Annotated[str, Meta(max_length=16)]


class LinkBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes sent from stage `src` to stage `dst` since the run's start (-1: the trainer), and the codec in force.

    Of the last steps: bytes a step, and what they would be uncompressed by the codec's own estimate; 0 unknown.
    `why`: the plan's reason for the codec, "" where it says none.
    """

    src: Annotated[int, Meta(ge=-1, le=1 << 20)]
    dst: Annotated[int, Meta(ge=-1, le=1 << 20)]
    bytes_sent: Size
    codec: Annotated[str, Meta(max_length=32)] = ""
    bytes_per_step: Size = 0
    dense_bytes_per_step: Size = 0
    why: Annotated[str, Meta(max_length=120)] = ""


class StageFigures(msgspec.Struct, frozen=True, array_like=True):
    """Of the last step: seconds a stage computed, had its sender held up, and waited for others; None unknown.

    `waiting_for`: what it waits for now, "" when it computes.
    """

    stage: Annotated[int, Meta(ge=0, le=1 << 20)]
    replica: Annotated[int, Meta(ge=0, le=1 << 20)]
    compute_s: Seconds | None = None
    send_s: Seconds | None = None
    wait_s: Seconds | None = None
    waiting_for: Annotated[str, Meta(max_length=48)] = ""


class Event(msgspec.Struct, frozen=True, array_like=True):
    time: Seconds
    text: Text


class RunStages(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="run-stages"):
    """Part `part` of who hosts what under plan number `plan`."""

    run: RunId
    owner: Key32
    part: Annotated[int, Meta(ge=0, le=63)]
    plan: Count
    stages: Annotated[tuple[StageHost, ...], Meta(max_length=24)]


class RunLinks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="run-links"):
    """One part of a run's links: what each has sent, in bytes, and by which codec."""

    run: RunId
    owner: Key32
    part: Annotated[int, Meta(ge=0, le=63)]
    plan: Count
    links: Annotated[tuple[LinkBytes, ...], Meta(max_length=40)]


class RunEvents(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="run-events"):
    """The latest events that fit."""

    run: RunId
    owner: Key32
    part: Annotated[int, Meta(ge=0, le=63)]
    events: Annotated[tuple[Event, ...], Meta(max_length=16)]


class RunFigures(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="run-figures"):
    """One part of what a run's stages took in the last step, in seconds."""

    run: RunId
    owner: Key32
    part: Annotated[int, Meta(ge=0, le=63)]
    plan: Count
    stages: Annotated[tuple[StageFigures, ...], Meta(max_length=24)]


RunPart: TypeAlias = RunStages | RunLinks | RunEvents | RunFigures
FencePart: TypeAlias = FenceRecord | FenceHead | LinksRecord
Record: TypeAlias = (
    PeerRecord
    | RunRecord
    | RunStages
    | RunLinks
    | RunEvents
    | RunFigures
    | FenceRecord
    | FenceHead
    | LinksRecord
    | Receipt
)

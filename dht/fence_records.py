"""Records of fences and links, and `FenceView`, what `Board.fences` returns. Signed by the peer they name.

Layout (key -> subkey -> record), beside that of `dht.records`:
  fences/SHARD            peer id                 FenceHead: a leader's entry in the index of all fences
  fence/FENCE/leader      peer id                 FenceRecord: the leader's leased, termed record
  fence/FENCE/SHARD       peer id                 PeerRecord: a member's heartbeat, which names leader and term
  links/FENCE/SHARD       peer id                 LinksRecord: what a member measured

The DHT compares and swaps nothing, so several leaders' records may lie at one key: `leads` says which counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

FENCE_INDEX_SHARDS = 4
LEASE_S = 45.0  # a leader that has not renewed its record for this long leads no more
MAX_LINKS = 12
MAX_FENCE_LINKS = 12
MAX_SPARES = 8
MAX_NOMINEES = 8
MEMBERS_STAY_S = 45.0  # that a fence is read on after its last leader: until a member has stood, or all have left
MAX_LED_LATELY = 256  # of those
PROBE_SLOTS = 8  # an eighth of a fence probes at a time

FenceId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
PeerText = Annotated[str, Meta(min_length=46, max_length=64)]
PeerKey = Annotated[bytes, Meta(min_length=32, max_length=32)]  # the public key inside a peer id
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Score = Annotated[int, Meta(ge=0, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]
Kbps = Annotated[int, Meta(ge=0, le=1 << 40)]  # kilobits per second; 0: not measured
Micros = Annotated[int, Meta(ge=0, le=1 << 32)]  # round trip in microseconds


Point = Annotated[tuple[float, ...], Meta(max_length=3)]  # see dht.coordinates; () unknown


class LinkFigure(msgspec.Struct, frozen=True, array_like=True):
    """What the publisher measured towards `peer`. Rates are kbit/s, 0 where not measured; `age_s` of the rates."""

    peer: PeerKey
    rtt_us: Micros
    up_kbps: Kbps = 0
    down_kbps: Kbps = 0
    age_s: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    relayed: bool = False
    fence: Annotated[bytes, Meta(max_length=8)] = b""  # of `peer`, as it said itself


class LinksRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="links"):
    """Measured links of one peer, and its network coordinate."""

    peer: PeerText
    fence: Annotated[str, Meta(min_length=1, max_length=32)]
    links: Annotated[tuple[LinkFigure, ...], Meta(max_length=MAX_LINKS)] = ()
    coordinate: Point = ()
    error: Annotated[float, Meta(ge=0, le=100)] = 1.0  # the coordinate's relative error
    published: Seconds = 0.0


class LinkSummary(msgspec.Struct, frozen=True, array_like=True):
    """Medians over measured pairs; `spread` is the ratio of the 90th to the 10th percentile of the rates, 0 unknown."""

    kbps: Kbps = 0
    rtt_us: Micros = 0
    pairs: Count = 0
    spread: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class FenceLink(msgspec.Struct, frozen=True, array_like=True):
    """From this fence's members to those of `fence`."""

    fence: FenceId
    out: LinkSummary


class Nominee(msgspec.Struct, frozen=True, array_like=True):
    """`dead` hosted a stage and is silent; `spare` is the leader's proposal. Only the run's owner assigns."""

    dead: PeerText
    spare: PeerText
    run: Annotated[str, Meta(max_length=32)] = ""
    stage: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1


class FenceRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="fence"):
    """A leader's lease on a fence. `published` + LEASE_S is its end; `resigned_to` names the leader it merges under."""

    fence: FenceId
    leader: PeerText
    term: Count
    score: Score
    members: Count
    inside: LinkSummary = LinkSummary()
    outside: Annotated[tuple[FenceLink, ...], Meta(max_length=MAX_FENCE_LINKS)] = ()
    spares: Annotated[tuple[PeerText, ...], Meta(max_length=MAX_SPARES)] = ()
    nominees: Annotated[tuple[Nominee, ...], Meta(max_length=MAX_NOMINEES)] = ()
    probe_slot_s: Annotated[float, Meta(ge=0.5, le=3600)] = 2.0  # see `probe_turn`
    resigned_to: Annotated[str, Meta(max_length=64)] = ""
    published: Seconds = 0.0


class FenceHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="fence-head"):
    """A fence's entry in the index."""

    fence: FenceId
    leader: PeerText
    term: Count
    score: Score
    members: Count
    coordinate: Point = ()  # the leader's
    published: Seconds = 0.0


class Beat(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What a peer says of itself when pinged; hearsay about others is only a hint whom to ping next."""

    fence: Annotated[str, Meta(max_length=16)] = ""
    leader: Annotated[str, Meta(max_length=64)] = ""
    term: Count = 0
    score: Score = 0
    members: Count = 0  # of its fence, as its leader says
    near: Annotated[tuple[PeerText, ...], Meta(max_length=4)] = ()
    coordinate: Point = ()
    error: Annotated[float, Meta(ge=0, le=100)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceView:
    """A fence as readers see it. `members` counts those whose heartbeats the leader has read; `age_s`: of its record.

    `Board.peers(fence=id)` reads the members themselves.
    """

    id: str
    leader: str
    term: int
    members: int
    summary: LinkSummary
    outside: tuple[FenceLink, ...]
    spares: tuple[str, ...]
    nominees: tuple[Nominee, ...]
    age_s: float


Lead = TypeVar("Lead", FenceRecord, FenceHead)


def rank(record: FenceRecord | FenceHead) -> tuple[int, int, str]:
    """The higher one leads: term first, then score, then peer id."""
    return record.term, record.score, record.leader


def leads(records: Iterable[Lead], now: float) -> dict[str, Lead]:
    """Per fence, the record that counts at swarm time `now`: its lease runs, and it ranks highest."""
    best: dict[str, Lead] = {}
    for record in records:
        if record.published + LEASE_S < now:
            continue
        known = best.get(record.fence)
        if known is None or rank(record) > rank(known):
            best[record.fence] = record
    return best


class LedLately:
    """Which fences to read: those that are led, and those that were until lately. Pure."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def see(self, led: Iterable[str], now: float) -> list[str]:
        """`led`: the fences that the index names at swarm time `now`."""
        named = dict.fromkeys(led, now + MEMBERS_STAY_S)
        lately = {fence: until for fence, until in self._until.items() if until >= now and fence not in named}
        latest = sorted(lately, key=lambda fence: -lately[fence])[:MAX_LED_LATELY]
        self._until = named | {fence: lately[fence] for fence in latest}
        return sorted(self._until)


def view(record: FenceRecord, now: float) -> FenceView:
    """`record` as readers see it at swarm time `now`."""
    return FenceView(
        id=record.fence,
        leader=record.leader,
        term=record.term,
        members=record.members,
        summary=record.inside,
        outside=record.outside,
        spares=record.spares,
        nominees=record.nominees,
        age_s=max(0.0, now - record.published),
    )


def leader_key(fence: str) -> str:
    """The key that holds a fence's leader record."""
    return f"fence/{fence}/leader"


def index_keys() -> tuple[str, ...]:
    """The keys that hold the index of all fences."""
    return tuple(f"fences/{shard}" for shard in range(FENCE_INDEX_SHARDS))


def index_key(fence: str) -> str:
    """The key that holds a fence's entry in the index."""
    return f"fences/{int(fence[:2], 16) % FENCE_INDEX_SHARDS}"


def probe_turn(peer_key: bytes, now: float, slot_s: float) -> bool:
    """Whether the peer with this public key may probe bandwidth at swarm time `now`: an eighth of a fence at a time."""
    return int(now / slot_s) % PROBE_SLOTS == peer_key[0] % PROBE_SLOTS

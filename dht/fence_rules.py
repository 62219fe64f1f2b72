"""The rules of fences, each a pure function: who is near, who leads, what a leader sums up and whom it nominates."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

from dht.fence_records import (
    MAX_FENCE_LINKS,
    MAX_NOMINEES,
    MAX_SPARES,
    FenceLink,
    LinksRecord,
    LinkSummary,
    Nominee,
)
from dht.identity import public_key_of
from dht.records import REFRESH_S, TTL_S, PeerRecord
from dht.sights import FLOOR_S, Sight

JOIN_GAP = 3.0  # a leader at most this many times as far as the nearest peer is of one's own fence
LEAVE_GAP = 6.0  # and beyond this it is not; between the two lies room for noise of +-30 % on both
GAIN = 2.0  # another leader must be this many times nearer,
REPEATS = 4  # in this many rounds one after the other
MAX_MEMBERS = 128  # larger sites are several fences, so that a leader's work stays bounded
FULL_MEMBERS = MAX_MEMBERS * 5 // 4  # beyond it members leave again; heartbeats of those who left count for a while
_RATED_PEERS = 3
SILENT_S = TTL_S + REFRESH_S  # a heartbeat older than this is a dead member's


def fence_name(founder: str, now: float) -> str:
    """The id of a fence founded now: 16 hex digits."""
    return hashlib.blake2b(f"{founder}/{now:.3f}".encode(), digest_size=8).hexdigest()


def nearness_s(sights: Sequence[Sight], leader: Sight) -> tuple[float, float]:
    """(distance to `leader`, distance to the nearest peer), in comparable terms.

    Rates count once they are known for the leader and for enough near peers; before, round trips alone. `sights`: the
    nearest peers first, without those that are being compared with.
    """
    near = [s for s in sights if s.peer != leader.peer]
    with_rate = [s for s in near if s.rate > 0]
    if leader.rate > 0 and len(with_rate) >= _RATED_PEERS:
        return leader.distance_s(rated=True), min(s.distance_s(rated=True) for s in with_rate)
    return leader.distance_s(rated=False), min((s.distance_s(rated=False) for s in near), default=FLOOR_S)


def within(sights: Sequence[Sight], leader: Sight, gap: float = JOIN_GAP) -> bool:
    """Whether `leader` belongs to the near ones, as seen from here."""
    distance_s, nearest_s = nearness_s(sights, leader)
    return distance_s <= gap * max(nearest_s, FLOOR_S)


def outranks(a: Sight, score: int, peer: str) -> bool:
    """Higher (score, peer id) wins between leaders of two fences."""
    return (a.beat.score, a.peer) > (score, peer)


# --- what a leader publishes


def summarise(values: Sequence[tuple[int, int]]) -> LinkSummary:
    """`values`: (kbit/s of the slower direction or 0, round trip in microseconds) per measured pair."""
    if not values:
        return LinkSummary()
    rates = sorted(v[0] for v in values if v[0] > 0)
    spread = rates[(9 * len(rates)) // 10] / rates[len(rates) // 10] if rates else 0.0
    return LinkSummary(
        int(statistics.median(rates)) if rates else 0,
        int(statistics.median(v[1] for v in values)),
        len(values),
        round(spread, 2),
    )


def link_summaries(fence: str, links: Iterable[LinksRecord]) -> tuple[LinkSummary, tuple[FenceLink, ...]]:
    """(inside the fence, towards each other fence), from what the members published."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for record in links:
        for f in record.links:
            if f.fence:
                rates = [r for r in (f.up_kbps, f.down_kbps) if r > 0]
                groups.setdefault(f.fence.hex(), []).append((min(rates, default=0), f.rtt_us))
    inside = summarise(groups.pop(fence, []))
    known = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_FENCE_LINKS]
    return inside, tuple(FenceLink(name, summarise(values)) for name, values in known if len(name) == 16)


def spares(members: Mapping[str, PeerRecord], now: float) -> tuple[str, ...]:
    """Living members without work, the fastest first."""
    free = [m for m in members.values() if m.state == "free" and not m.work and not silent(m, now)]
    fastest = sorted(free, key=lambda m: (-sum(d.flops_per_s for d in m.devices if d.free_bytes), m.peer))
    return tuple(m.peer for m in fastest[:MAX_SPARES])


def silent(member: PeerRecord, now: float) -> bool:
    """Whether its heartbeat stopped."""
    return member.state == "left" or now - member.published > SILENT_S


def nominate(members: Mapping[str, PeerRecord], now: float) -> tuple[Nominee, ...]:
    """A spare for each stage of each silent member: the fastest with at least the dead one's memory, if there is one.

    The run's owner decides; two leaders that nominate differently do no harm.
    """
    left = list(spares(members, now))
    out: list[Nominee] = []
    for dead in sorted((m for m in members.values() if silent(m, now) and m.work), key=lambda m: m.peer):
        for work in dead.work:
            if work.stage < 0 or not left or len(out) == MAX_NOMINEES:
                continue
            roomy = [p for p in left if _memory(members[p]) >= _memory(dead)]
            chosen = (roomy or left)[0]
            left.remove(chosen)
            out.append(Nominee(dead.peer, chosen, work.run, work.stage))
    return tuple(out)


def _memory(record: PeerRecord) -> int:
    return max((d.memory_bytes for d in record.devices), default=0)


def probe_slot_s(members: int) -> float:
    """How long an eighth of the fence may probe: long enough that one probe a peer, one after the other, fits."""
    return 2.0 if members <= 64 else 4.0


def turn_of(peer: str) -> bytes:
    """What `fence_records.probe_turn` orders peers by."""
    return public_key_of(peer)

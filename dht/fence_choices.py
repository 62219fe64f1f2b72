"""Choices of one peer among those it has seen: whom to ping, whom to measure with, which leader to follow. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence

from dht import fence_rules as rules
from dht.fence_records import FenceHead
from dht.sights import Sight, Sights, oldest_rated

PINGS, FIRST_PINGS = 4, 24  # others a round, when settled and while new
LEADERS_PINGED = 8  # by a leader, which looks for its rivals


def pings(
    sights: Sights,
    heads: Iterable[FenceHead],
    strangers: Sequence[str],
    *,
    me: str,
    leader: str,
    resigned_to: str,
    leading: bool,
    new: bool,
    rng: random.Random,
) -> tuple[str, ...]:
    """Whom to ping in this round.

    The leader always; leaders not met yet and the nearest ones besides; of peers only heard of, near ones and such not
    heard of for long some at random, so that a settled member pings PINGS others a round.
    """
    count = FIRST_PINGS if new else PINGS
    few = count // 3 + 1 if new else 1
    table = sights.table
    first = dict.fromkeys(p for p in (resigned_to, leader) if p not in ("", me))
    unmet = heapq.nsmallest(
        LEADERS_PINGED if leading else few,
        (h for h in heads if h.leader != me and not _met(sights, h)),
        key=lambda h: (
            table[h.leader].rtt_s if h.leader in table else sights.predicted_rtt_s(h.coordinate), h.leader
        ),
    )  # fmt: skip
    first.update(dict.fromkeys(h.leader for h in unmet))
    leaders = sorted((s for s in table.values() if s.leading), key=lambda s: s.rtt_s)
    first.update(dict.fromkeys(s.peer for s in leaders[:2]))
    rest: dict[str, None] = dict.fromkeys(reversed(list(sights.hints)[-few:]))
    oldest = sorted(sights.nearest(8), key=lambda s: s.heard_at)
    rest.update(dict.fromkeys(s.peer for s in oldest[: 2 if new else 1]))
    stale = min(table.values(), key=lambda s: s.heard_at, default=None)
    rest.update({} if stale is None else {stale.peer: None})
    others = [p for p in strangers if p != me and p not in table]
    rest.update(dict.fromkeys(others[: max(1, count - len(first) - len(rest))]))
    wanted = [p for p in rest if p not in first]
    if not new:
        rng.shuffle(wanted)
    most = count + (4 if new else 0) + (LEADERS_PINGED if leading else 0)
    return tuple((*first, *wanted))[:most]


def _met(sights: Sights, head: FenceHead) -> bool:
    """Whether this leader was pinged since it leads."""
    known = sights.table.get(head.leader)
    return known is not None and known.leading and known.beat.fence == head.fence


def whom_to_probe(sights: Sights, leader: str) -> str | None:
    """The leader first, then near and far peers in turn, whose rates are oldest: O(log n) peers in all."""
    near = sights.nearest(6)
    known = sights.table.get(leader)
    if known is not None and known.rate == 0:
        return known.peer
    far = [s for s in sights.table.values() if s not in near]
    rated_far = [s for s in far if s.rate > 0]
    unrated = next((s for s in near if s.rate == 0), None)
    if unrated is not None:
        return unrated.peer
    found = oldest_rated(near + (rated_far if len(rated_far) >= 8 else far))
    return None if found is None else found.peer


def best_leader(sights: Sights) -> Sight | None:
    """The leader to follow: within reach; among those about as near the higher (score, peer id)."""
    near = sights.nearest(12)
    fits = [
        s
        for s in sights.table.values()
        if s.leading and s.beat.members < rules.MAX_MEMBERS and rules.within(near, s)
    ]  # fmt: skip
    if not fits:
        return None
    nearest_s = min(s.distance_s(rated=False) for s in fits)
    alike = [s for s in fits if s.distance_s(rated=False) < rules.GAIN * nearest_s]
    return max(alike, key=lambda s: (s.beat.score, s.peer))


def nearer_leader(sights: Sights, fence: str, mine: Sight) -> Sight | None:
    """The nearest leader of another fence, if it is GAIN times nearer than `mine`, in comparable terms."""
    rated = mine.rate > 0
    found = [
        s
        for s in sights.table.values()
        if s.leading and s.beat.fence != fence and (s.rate > 0) == rated and s.beat.members < rules.MAX_MEMBERS
        and s.distance_s(rated=rated) * rules.GAIN <= mine.distance_s(rated=rated)
    ]  # fmt: skip
    return min(found, key=lambda s: (s.distance_s(rated=rated), s.peer), default=None)


def rival(sights: Sights, fence: str, score: int, me: str, members: int) -> Sight | None:
    """A leader of another fence that is as near as this one's members, and outranks; for a leader of `members`."""
    near = sights.nearest(12)
    room = rules.FULL_MEMBERS - members
    found = [
        s
        for s in sights.table.values()
        if s.leading and s.beat.fence != fence and s.beat.members <= room
        and rules.outranks(s, score, me) and rules.within(near, s)
    ]  # fmt: skip
    return max(found, key=lambda s: (s.beat.score, s.peer), default=None)


def first_among_near(sights: Sights, score: int, me: str) -> bool:
    """Whether no near peer without a fence outranks this one: it founds first."""
    near = sights.nearest(12)
    return not any(rules.outranks(s, score, me) for s in near if not s.beat.fence and rules.within(near, s))

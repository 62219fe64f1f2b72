"""The election of fences as a state machine over (records, pings, clock, randomness): no sockets, no tasks.

A round of the driver (`dht.fencing`, or a simulator):

    wants = machine.reads()                            # what to read from the board
    machine.saw_leaders / saw_index / saw_members      # for each reading
    for peer in machine.pings(strangers): ...          # then machine.heard or missed
    machine.probe(now)                                 # whom to measure bandwidth with, then machine.rated
    stand = machine.decide(now)                        # what to publish from now on, and when to come again

Rules (DESIGN section 7): a peer joins the fence of a leader that is about as near as the nearest peers it knows; where
there is none it founds one after a random delay. A leader holds a lease; when it lapses its members stand after a
random delay, with the next term. Between two leaders of one fence the higher (term, score, peer id) leads; between two
fences that are one, the higher (score, peer id) stays and the other is merged into it. A peer changes fence only for
a clear and repeated gain. Leaders only publish and nominate, so that two at once do no harm.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dht import fence_choices as choices
from dht import fence_rules as rules
from dht.fence_records import (
    LEASE_S,
    Beat,
    FenceHead,
    FenceRecord,
    LinksRecord,
    leads,
    probe_turn,
    rank,
)
from dht.records import NO_FENCE, REFRESH_S, PeerRecord
from dht.sights import Sight, Sights

ROUND_S = REFRESH_S
NEW_ROUND_S = 5.0  # while new
FIRST_ROUNDS = 12
_MOST_MEMBERS = 4 * rules.MAX_MEMBERS
_LOOK_EVERY = 4  # rounds
_SMALL = 32  # members; a leader of so few reads all their heartbeats every round
_RESIGN_S = 2 * LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """`leader_of`: the fence whose leader record to read; `index`: all fences; `shards`: of the own fence's heartbeats
    and links, for its leader."""

    leader_of: str | None
    index: bool
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What this peer publishes: its fence, leader and term in its heartbeat, its links, and as a leader two records."""

    fence: str
    leader: str
    term: int
    links: LinksRecord
    record: FenceRecord | None
    head: FenceHead | None
    resigned: FenceRecord | None
    reason: str  # of the last change, "" if there was none in this round
    next_s: float  # until the next round


class FenceMachine:
    """`score`: what makes a good leader (hours up, reachable, fast); only compared."""

    def __init__(self, me: str, rng: random.Random, *, score: int = 0) -> None:
        self.me, self.score, self._rng = me, score, rng
        self.sights = Sights(me, rng)
        self.fence, self.leader, self.term = "", "", 0
        self.members_known = 0
        self._rounds = 0
        self._phase = rng.randrange(_LOOK_EVERY)
        self._lead: FenceRecord | None = None  # the record that counts, as last read
        self._lead_seen = float("-inf")
        self._top_term = 0
        self._stand_at: float | None = None
        self._streak: tuple[str, int] = ("", 0)
        self._heads: dict[str, FenceHead] = {}
        self._members: dict[str, PeerRecord] = {}
        self._links: dict[str, LinksRecord] = {}
        self._shard = 0
        self._resigned: FenceRecord | None = None
        self._reason = ""
        self._now = self._entered = float("-inf")
        self._quick_until = float("-inf")
        self._beat = Beat(score=score)

    @property
    def leading(self) -> bool:
        return bool(self.fence) and self.leader == self.me

    # --- what others are told

    def beat(self) -> Beat:
        """The answer to a ping, as of the last round."""
        return self._beat

    def _new_beat(self) -> Beat:
        own = self.sights.own
        return Beat(
            fence=self.fence,
            leader=self.leader,
            term=self.term,
            score=self.score,
            members=self.members_known,
            near=tuple(s.peer for s in self.sights.nearest(4)),
            coordinate=own.point,
            error=round(own.error, 3),
        )

    # --- what a round needs

    @property
    def _new(self) -> bool:
        """In its first minute, or between fences: it looks at more, and more often."""
        return not self.fence or self._rounds < FIRST_ROUNDS

    def reads(self) -> Wants:
        """What to read from the board in this round."""
        shards: tuple[int, ...] = ()
        if self.leading:
            shards = (0, 1, 2, 3) if self.members_known <= _SMALL else (self._shard,)
            self._shard = (self._shard + 1) % 4
        # Leaders look for rivals, newcomers for leaders. A member whose leader answered its last ping as such has been
        # told what the record says: it reads it now and then only.
        look = self._new or self.leading or not self._told() or self._rounds % _LOOK_EVERY == self._phase
        return Wants(leader_of=(self.fence or None) if look else None, index=self._new or self.leading, shards=shards)

    def _told(self) -> bool:
        known = self.sights.table.get(self.leader)
        if known is None or known.misses or self._now - known.heard_at > ROUND_S / 2:
            return False
        beat = known.beat
        return (beat.fence, beat.leader, beat.term) == (self.fence, self.leader, self.term) and self._lead is not None

    def probe(self, now: float) -> str | None:
        """Whom to measure bandwidth with now; None if it is not this peer's turn."""
        slot_s = self._lead.probe_slot_s if self._lead is not None else 2.0
        turn = self.fence and probe_turn(rules.turn_of(self.me), now, slot_s)
        return choices.whom_to_probe(self.sights, self.leader) if turn else None

    def pings(self, strangers: Sequence[str]) -> tuple[str, ...]:
        """Whom to ping. `strangers`: some peers of the swarm at random, as the routing table gives them."""
        resigned_to = self._lead.resigned_to if self._lead is not None else ""
        return choices.pings(
            self.sights, self._heads.values(), strangers, me=self.me, leader=self.leader, resigned_to=resigned_to,
            leading=self.leading, new=self._new, rng=self._rng,
        )  # fmt: skip

    # --- what a round brought

    def heard(self, peer: str, rtt_s: float, beat: Beat, now: float, *, relayed: bool = False) -> None:
        """A ping was answered."""
        self.sights.heard(peer, rtt_s, beat, now, relayed=relayed)
        if peer == self.leader and beat.leader == peer and beat.fence == self.fence:
            self._lead_seen = max(self._lead_seen, now)  # a sign of life as good as its record

    def missed(self, peer: str) -> None:
        """A ping was not answered in time."""
        self.sights.missed(peer)

    def rated(self, peer: str, up_bytes_per_s: float, down_bytes_per_s: float, now: float) -> None:
        """A probe, or real traffic, measured the rates to `peer`."""
        self.sights.rated(peer, up_bytes_per_s, down_bytes_per_s, now)

    def saw_leaders(self, records: Iterable[FenceRecord], now: float) -> None:
        """The leader records of the own fence were read."""
        mine = [r for r in records if r.fence == self.fence]
        self._top_term = max([self._top_term, *(r.term for r in mine)])
        best = leads(mine, now).get(self.fence)
        if best is not None and (
            self._lead is None or best.published >= self._lead.published or rank(best) > rank(self._lead)
        ):
            self._lead, self._lead_seen = best, max(self._lead_seen, best.published)

    def saw_index(self, heads: Iterable[FenceHead], now: float) -> None:
        """The index of fences was read."""
        self._heads = leads(heads, now)

    def saw_members(self, peers: Iterable[PeerRecord], links: Iterable[LinksRecord], now: float) -> None:
        """Shards of the own fence's heartbeats and links were read, by its leader."""
        for p in peers:
            known = self._members.get(p.peer)
            if known is None and len(self._members) >= _MOST_MEMBERS:
                continue  # made-up members push out none that are known
            if known is None or p.published > known.published:
                self._members[p.peer] = p
        for r in links:
            if r.fence == self.fence and r.peer in self._members:
                self._links[r.peer] = r
        gone = [p for p, m in self._members.items() if now - m.published > 6 * rules.SILENT_S or m.fence != self.fence]
        for peer in gone:
            self._members.pop(peer)
        for peer in [p for p in self._links if p not in self._members]:
            self._links.pop(peer)

    # --- what follows

    def decide(self, now: float) -> Stand:
        """At the end of a round."""
        self._rounds += 1
        self._now, self._reason = now, ""
        if self._resigned is not None and now - self._resigned.published > _RESIGN_S:
            self._resigned = None
        if self.leading:
            self._as_leader(now)
        elif self.fence:
            self._as_member(now)
        else:
            self._as_newcomer(now)
        self._beat = self._new_beat()
        return self._stand(now)

    def _as_newcomer(self, now: float) -> None:
        if self._rounds < 2:
            return  # who is near shows only after the near ones' near ones were pinged
        best = choices.best_leader(self.sights)
        if best is not None:
            self._follow(best, f"nearest leader, {best.rtt_s * 1e3:.1f} ms")
            return
        if self._stand_at is None:
            self._stand_at = (
                now
                + self._rng.uniform(0, NEW_ROUND_S)
                + (0 if choices.first_among_near(self.sights, self.score, self.me) else ROUND_S)
            )
        if now >= self._stand_at:
            self._found(now)

    def _found(self, now: float) -> None:
        self._enter(rules.fence_name(self.me, now), self.me, 1, "no leader in reach: founded")

    def _as_member(self, now: float) -> None:
        lead, known = self._lead, self.sights.table.get(self.leader)
        if known is not None and known.heard_at > self._entered and known.beat.fence not in ("", self.fence):
            self._merge_under(known.beat.leader)  # it leads no more, as it says itself
            return
        if lead is not None and max(lead.published, self._lead_seen) + LEASE_S >= now:
            self._stand_at = None
            if lead.resigned_to:
                self._merge_under(lead.resigned_to)
                return
            if lead.leader != self.leader:
                self._reason = f"{lead.leader[-8:]} leads, term {lead.term}"
            self.leader, self.term, self.members_known = lead.leader, lead.term, lead.members
            if lead.leader == self.me:
                return  # leads since the last round of an earlier life
            self._weigh_change()
            return
        seen = max(self._lead_seen, self._entered)
        if now - seen <= LEASE_S:
            return  # the record was not found, but its lease may run
        if self._stand_at is None:
            self._stand_at = now + self._rng.uniform(0, NEW_ROUND_S)
        if now >= self._stand_at:
            self._stand_at = None
            self._quick_until = now + 2 * ROUND_S
            self._top_term = max(self._top_term, self.term) + 1
            self.leader, self.term = self.me, self._top_term
            self._lead = None
            self._reason = f"the leader's lease ran out: stood, term {self.term}"

    def _merge_under(self, leader: str) -> None:
        old, target = self.fence, self.sights.table.get(leader)
        if target is not None and target.leading and rules.within(self.sights.nearest(12), target, rules.LEAVE_GAP):
            self._follow(target, f"fence {old[:6]} was merged")
            return
        best = choices.best_leader(self.sights)
        if best is not None and best.beat.fence != old:
            self._follow(best, f"fence {old[:6]} was merged")
        else:
            self._enter("", "", 0, f"fence {old[:6]} was merged, its leader is not near")

    def _weigh_change(self) -> None:
        """Another fence only for a clear gain, seen REPEATS times in a row."""
        near = self.sights.nearest(12)
        mine = self.sights.table.get(self.leader)
        if mine is None:
            return
        nearest = choices.nearer_leader(self.sights, self.fence, mine)
        members = mine.beat.members
        if nearest is not None:
            if self._again(nearest.beat.fence):
                self._follow(nearest, f"its leader is {rules.GAIN:g} times nearer, {rules.REPEATS} times in a row")
        elif not rules.within(near, mine, rules.LEAVE_GAP):
            if self._again("-"):
                self._enter("", "", 0, f"the leader is {rules.LEAVE_GAP:g} times as far as the nearest peers")
        elif members > rules.FULL_MEMBERS and self._rng.random() < 1 - rules.MAX_MEMBERS / members:
            self._enter("", "", 0, f"fence {self.fence[:6]} is full")
        else:
            self._streak = ("", 0)

    def _again(self, what: str) -> bool:
        name, count = self._streak
        self._streak = (what, count + 1 if name == what else 1)
        return self._streak[1] >= rules.REPEATS

    def _as_leader(self, now: float) -> None:
        lead = self._lead
        if lead is not None and lead.leader != self.me and lead.published + LEASE_S >= now:
            mine = (self.term, self.score, self.me)
            if rank(lead) > mine:
                self.leader, self.term = lead.leader, lead.term
                self._forget_members()
                self._reason = f"{lead.leader[-8:]} outranks: stepped down"
                return
        rival = choices.rival(self.sights, self.fence, self.score, self.me, self.members_known)
        if rival is not None:
            self._resigned = self._leader_record(now, resigned_to=rival.peer)
            self._follow(rival, f"one fence with {rival.beat.fence[:6]}, whose leader outranks")

    def _follow(self, leader: Sight, reason: str) -> None:
        self._enter(leader.beat.fence, leader.peer, leader.beat.term, reason)
        self.members_known = leader.beat.members

    def _enter(self, fence: str, leader: str, term: int, reason: str) -> None:
        self.fence, self.leader, self.term = fence, leader, term
        self._lead, self._lead_seen, self._top_term, self._entered = None, float("-inf"), term, self._now
        self._stand_at, self._streak, self._reason = None, ("", 0), reason
        self.members_known = 0
        self._forget_members()

    def _forget_members(self) -> None:
        self._members.clear()
        self._links.clear()

    # --- records

    def _stand(self, now: float) -> Stand:
        record = self._leader_record(now) if self.leading else None
        head = None
        if record is not None:
            head = FenceHead(
                fence=record.fence, leader=self.me, term=record.term, score=record.score, members=record.members,
                coordinate=self.sights.own.point, published=record.published,
            )  # fmt: skip
        fence = self.fence or NO_FENCE
        own = self.sights.own
        links = LinksRecord(
            peer=self.me, fence=fence, links=self.sights.figures(now), coordinate=own.point,
            error=round(own.error, 3), published=round(now, 2),
        )  # fmt: skip
        return Stand(
            fence=fence, leader=self.leader, term=self.term, links=links, record=record, head=head,
            resigned=self._resigned, reason=self._reason, next_s=self._next_s(now),
        )  # fmt: skip

    def _next_s(self, now: float) -> float:
        """Sooner while new, while the leader is missed, and after standing, when others may have stood as well."""
        missed = bool(self.fence) and not self.leading and now - max(self._lead_seen, self._entered) > LEASE_S - ROUND_S
        if self.fence and self._stand_at is not None:
            return max(0.5, self._stand_at - now)
        return NEW_ROUND_S if self._new or missed or now < self._quick_until else ROUND_S

    def _leader_record(self, now: float, resigned_to: str = "") -> FenceRecord:
        living = {p: m for p, m in self._members.items() if not rules.silent(m, now)}
        self.members_known = max(1, len(living))
        inside, outside = rules.link_summaries(self.fence, self._links.values())
        return FenceRecord(
            fence=self.fence, leader=self.me, term=self.term, score=self.score, members=self.members_known,
            inside=inside, outside=outside, spares=rules.spares(self._members, now),
            nominees=rules.nominate(self._members, now), probe_slot_s=rules.probe_slot_s(self.members_known),
            resigned_to=resigned_to, published=round(now, 2),
        )  # fmt: skip

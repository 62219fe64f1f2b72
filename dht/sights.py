"""What one peer knows of others from its own pings and probes: bounded, smoothed, forgotten with age. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass

from dht.coordinates import Coordinate, from_point, moved, predict_rtt_s, whereabouts
from dht.fence_records import MAX_LINKS, Beat, LinkFigure
from dht.identity import public_key_of

MAX_SIGHTS = 48
_SLACK = 16  # above it, so that the table is put in order now and then only
FORGET_S = 600.0
PIECE_BYTES = 128 << 10  # what a distance adds to the round trip: the time for one chunk of a tensor stream
FLOOR_S = 2e-3  # distances below this are all alike: one local network
_SMOOTH = 0.3
MISSES = 3  # unanswered pings after which a peer is not counted any more


@dataclass(slots=True)
class Sight:
    """Rates in bytes per second, 0 where not measured; times are the caller's clock."""

    peer: str
    rtt_s: float
    heard_at: float
    beat: Beat
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    rated_at: float = float("-inf")
    relayed: bool = False
    misses: int = 0

    @property
    def leading(self) -> bool:
        return self.beat.leader == self.peer and bool(self.beat.fence)

    @property
    def rate(self) -> float:
        """The slower direction, 0 if not measured."""
        return min(self.up_bytes_per_s, self.down_bytes_per_s)

    def distance_s(self, *, rated: bool) -> float:
        """Round trip, and with `rated` the time of one chunk at the slower direction's rate; at least FLOOR_S."""
        chunk_s = PIECE_BYTES / self.rate if rated and self.rate > 0 else 0.0
        return max(FLOOR_S, self.rtt_s + chunk_s)


class Sights:
    """The table. `heard` and `rated` feed it; the nearest, the leaders and the oldest stay when it is full."""

    def __init__(self, me: str, rng: random.Random) -> None:
        self.me, self._rng = me, rng
        self.table: dict[str, Sight] = {}
        self.hints: dict[str, None] = {}  # peers others named, not pinged yet; oldest first
        self.own = Coordinate()

    def heard(self, peer: str, rtt_s: float, beat: Beat, now: float, *, relayed: bool = False) -> None:
        """A ping was answered after `rtt_s`."""
        if peer == self.me:
            return
        self.hints.pop(peer, None)
        known = self.table.get(peer)
        if known is None:
            known = self.table[peer] = Sight(peer, rtt_s, now, beat, relayed=relayed)
        else:
            known.rtt_s += _SMOOTH * (rtt_s - known.rtt_s)
            known.heard_at, known.beat, known.misses, known.relayed = now, beat, 0, relayed
        there = from_point(beat.coordinate, beat.error)
        if there is not None:
            self.own = moved(self.own, there, rtt_s, self._rng.uniform(0, 6.283))
        for hint in (*beat.near, beat.leader):
            if hint and hint != self.me and hint not in self.table:
                self.hints[hint] = None
        while len(self.hints) > MAX_SIGHTS:
            del self.hints[next(iter(self.hints))]
        if len(self.table) > MAX_SIGHTS + _SLACK:
            self._shrink(now)

    def missed(self, peer: str) -> None:
        """A ping was not answered."""
        self.hints.pop(peer, None)
        known = self.table.get(peer)
        if known is not None:
            known.misses += 1
            if known.misses >= MISSES:
                del self.table[peer]

    def rated(self, peer: str, up_bytes_per_s: float, down_bytes_per_s: float, now: float) -> None:
        """A probe or real traffic measured the rates to `peer`; 0 leaves a direction as it was."""
        known = self.table.get(peer)
        if known is None:
            return
        for name, value in (("up_bytes_per_s", up_bytes_per_s), ("down_bytes_per_s", down_bytes_per_s)):
            if value > 0:
                old = getattr(known, name)
                setattr(known, name, value if old == 0 else old + _SMOOTH * (value - old))
        known.rated_at = now

    def nearest(self, count: int) -> list[Sight]:
        """By round trip, those that answered last time."""
        return heapq.nsmallest(count, [s for s in self.table.values() if s.misses == 0], key=_by_rtt)

    def predicted_rtt_s(self, coordinate: tuple[float, ...]) -> float:
        """To a peer at a published coordinate; 0 if it published none (then it is worth a ping)."""
        there = whereabouts(coordinate)
        return 0.0 if there is None else predict_rtt_s(self.own, there)

    def figures(self, now: float) -> tuple[LinkFigure, ...]:
        """For the board: what is rated first, then the nearest, MAX_LINKS at most."""
        best = sorted(self.table.values(), key=lambda s: (s.rate <= 0, s.rtt_s))[:MAX_LINKS]
        return tuple(
            LinkFigure(
                peer=public_key_of(s.peer),
                rtt_us=min(1 << 32, int(s.rtt_s * 1e6)),
                up_kbps=kbps(s.up_bytes_per_s),
                down_kbps=kbps(s.down_bytes_per_s),
                age_s=int(now - s.rated_at) if s.rated_at > 0 else 0,
                relayed=s.relayed,
                fence=bytes.fromhex(s.beat.fence),
            )
            for s in best
        )

    def _shrink(self, now: float) -> None:
        for peer in [p for p, s in self.table.items() if now - s.heard_at > FORGET_S]:
            del self.table[peer]
        near = {s.peer for s in self.nearest(MAX_SIGHTS // 3)}
        leaders = sorted((s for s in self.table.values() if s.leading), key=lambda s: s.rtt_s)[: MAX_SIGHTS // 3]
        keep = near | {s.peer for s in leaders}
        for s in sorted(self.table.values(), key=lambda s: (s.rate > 0, s.heard_at)):
            if len(self.table) <= MAX_SIGHTS:
                return
            if s.peer not in keep:
                del self.table[s.peer]


def _by_rtt(sight: Sight) -> tuple[float, str]:
    return sight.rtt_s, sight.peer


def kbps(bytes_per_s: float) -> int:
    """Kilobits per second, three digits, for a record."""
    value = bytes_per_s * 8 / 1e3
    return 0 if value <= 0 else max(1, int(float(f"{value:.3g}")))


def oldest_rated(candidates: Iterable[Sight]) -> Sight | None:
    """Whom to probe next."""
    return min(candidates, key=lambda s: (s.rated_at, s.peer), default=None)

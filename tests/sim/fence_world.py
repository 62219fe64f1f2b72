"""A world of peers that elect fences: sites, links, a board that loses and delays, clocks that differ, partitions.

Time is simulated; the machines are the real ones (`dht.fences`). Records are the real ones too, unsigned.
"""

from __future__ import annotations

import collections
import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dht import records
from dht.fence_records import FenceHead, FenceRecord, LinksRecord, index_keys, leader_key, leads
from dht.fences import NEW_ROUND_S, ROUND_S, FenceMachine, Stand, Wants
from dht.identity import peer_id_of
from dht.records import Device, PeerRecord, Record, Work

TTL_S = records.TTL_S


@dataclass(frozen=True)
class Site:
    """Rates in bytes per second; round trips in seconds."""

    size: int
    x_ms: float
    y_ms: float
    inside_rtt_s: float
    inside_bytes_per_s: float
    uplink_bytes_per_s: float


def make_sites(count: int, peers: int, rng: random.Random) -> list[Site]:
    """Sites of unequal sizes; 1-10 Gbps inside (one of them 100 Mbps), uplinks of 8 Mbps to 1 Gbps."""
    weights = [rng.uniform(0.4, 1.6) for _ in range(count)]
    sizes = [max(3, int(peers * w / sum(weights))) for w in weights]
    sizes[0] += peers - sum(sizes)
    places: list[tuple[float, float]] = []
    while len(places) < count:
        spot = rng.uniform(0, 60 * math.sqrt(count)), rng.uniform(0, 60 * math.sqrt(count))
        if all(math.dist(spot, other) > 12 for other in places):
            places.append(spot)
    mbit = 1e6 / 8
    return [
        Site(
            size,
            *place,
            inside_rtt_s=rng.uniform(0.2e-3, 1.5e-3),
            inside_bytes_per_s=mbit * (100 if i == count - 1 else rng.choice((1e3, 2.5e3, 1e4))),
            uplink_bytes_per_s=mbit * 10 ** rng.uniform(math.log10(8), 3),
        )
        for i, (size, place) in enumerate(zip(sizes, places, strict=True))
    ]


@dataclass
class Peer:
    name: str
    site: int
    machine: FenceMachine
    skew_s: float
    due: float
    alive: bool = True
    side: int = 0  # of a partition
    stand: Stand | None = None
    changes: int = 0
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A record on the board. While it is on its way (until `seen_from`) the one before it is what others find."""

    record: Record
    until: float
    seen_from: float
    sides: frozenset[int]  # of a partition


@dataclass
class Faults:
    """Probabilities and amplitudes; all off by default."""

    loss: float = 0.0  # of a ping, a store or a read
    delay_s: float = 0.0  # until a stored record is seen by others, at most
    skew_s: float = 0.0  # of clocks, at most, both ways
    noise: float = 0.1  # of measurements, relative


@dataclass
class World:
    """`step` runs one round of every living peer, in the order of their phases."""

    sites: Sequence[Site]
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    now: float = 1e6

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.faults = replace(self.faults)
        self.peers: dict[str, Peer] = {}
        self.board: dict[str, dict[str, tuple[Entry, ...]]] = collections.defaultdict(dict)
        self.sides = frozenset((0,))
        self.alive_names: list[str] = []
        self.events: list[str] = []
        self.watch: Callable[[str, int], None] = lambda what, count: None  # traffic: kind, how many
        for i, site in enumerate(self.sites):
            for _ in range(site.size):
                self.add(i)

    def add(self, site: int) -> Peer:
        name = peer_id_of(self.rng.randbytes(32))
        skew = self.rng.uniform(-self.faults.skew_s, self.faults.skew_s)
        machine = FenceMachine(name, random.Random(self.rng.random()), score=self.rng.randrange(4))
        peer = Peer(name, site, machine, skew, self.now + self.rng.uniform(0, NEW_ROUND_S))
        self.peers[name] = peer
        self.alive_names.append(name)
        return peer

    def kill(self, peer: Peer) -> None:
        peer.alive = False
        self.alive_names = [p.name for p in self.peers.values() if p.alive]

    def partition(self, side_of: Callable[[Peer], int]) -> None:
        """Peers of different sides exchange nothing; `heal` ends it."""
        for p in self.peers.values():
            p.side = side_of(p)
        self.sides = frozenset(p.side for p in self.peers.values())

    def heal(self) -> None:
        self.partition(lambda peer: 0)

    # --- links

    def rtt_s(self, a: Peer, b: Peer) -> float:
        one, two = self.sites[a.site], self.sites[b.site]
        if a.site == b.site:
            return one.inside_rtt_s
        return (math.dist((one.x_ms, one.y_ms), (two.x_ms, two.y_ms)) + 2.0) / 1e3

    def bytes_per_s(self, a: Peer, b: Peer) -> float:
        if a.site == b.site:
            return self.sites[a.site].inside_bytes_per_s
        return min(self.sites[a.site].uplink_bytes_per_s, self.sites[b.site].uplink_bytes_per_s)

    def noisy(self, value: float) -> float:
        return value * self.rng.uniform(1 - self.faults.noise, 1 + self.faults.noise)

    def lost(self) -> bool:
        return self.faults.loss > 0 and self.rng.random() < self.faults.loss

    # --- the board

    def store(self, peer: Peer, record: Record) -> None:
        key, subkey = records.place(record)
        self.watch(type(record).__name__, 1)
        if self.lost():
            return
        seen_from = self.now + self.rng.uniform(0, self.faults.delay_s)
        before = [e for e in self.board[key].get(subkey.hex(), ()) if e.seen_from <= self.now]
        entry = Entry(record, self.now + TTL_S, seen_from, frozenset((peer.side,)))
        self.board[key][subkey.hex()] = (*before[-1:], entry)

    def read(self, peer: Peer, keys: Iterable[str]) -> list[Record]:
        out: list[Record] = []
        for key in keys:
            if self.lost():
                continue
            entries = self.board.get(key, {})
            for subkey, versions in list(entries.items()):
                if versions[-1].until < self.now:
                    del entries[subkey]
                    continue
                seen = [e for e in versions if e.seen_from <= self.now <= e.until]
                if seen and (len(self.sides) == 1 or peer.side in seen[-1].sides):
                    out.append(seen[-1].record)
        return out

    # --- rounds

    def step(self, seconds: float = ROUND_S) -> None:
        """One refresh round, or less: peers come when they are due, several times while they are new."""
        end = self.now + seconds
        due = [(p.due, p.name) for p in self.peers.values() if p.alive and p.due < end]
        heapq.heapify(due)
        while due:
            at, name = heapq.heappop(due)
            peer = self.peers[name]
            if peer.alive and at == peer.due:
                self.now = at
                self._round(peer)
                if peer.due < end:
                    heapq.heappush(due, (peer.due, name))
        self.now = end
        for key, entries in list(self.board.items()):  # nodes drop what has expired, read or not
            for subkey in [s for s, versions in entries.items() if versions[-1].until < self.now]:
                del entries[subkey]
            if not entries:
                del self.board[key]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.step()

    def _round(self, peer: Peer) -> None:
        m, now = peer.machine, self.now + peer.skew_s
        self._read_for(peer, m.reads(), now)
        for name in m.pings(self.rng.sample(self.alive_names, min(24, len(self.alive_names)))):
            other = self.peers.get(name)  # None: dead for so long that the world has forgotten it
            self.watch("ping", 1)
            if other is None or not other.alive or other.side != peer.side or self.lost():
                m.missed(name)
            else:
                m.heard(name, self.noisy(self.rtt_s(peer, other)), other.machine.beat(), now)
        self._probe_for(peer, m.probe(now), now)
        before = m.fence
        stand = peer.stand = m.decide(now)
        peer.due = self.now + stand.next_s * self.rng.uniform(0.95, 1.05)
        if m.fence != before and before:
            peer.changes += 1
        if stand.reason:
            self.events.append(f"{self.now:.0f} {peer.name[-6:]} site {peer.site}: {stand.reason}")
        self.store(peer, peer_record(peer, now))
        self.store(peer, stand.links)
        for record in (stand.record, stand.head, stand.resigned):
            if record is not None:
                self.store(peer, record)

    def _probe_for(self, peer: Peer, name: str | None, now: float) -> None:
        if name is None:
            return
        self.watch("probe", 1)
        other = self.peers.get(name)
        if other is not None and other.alive and other.side == peer.side and not self.lost():
            rate = self.bytes_per_s(peer, other)
            peer.machine.rated(name, self.noisy(rate), self.noisy(rate), now)

    def _read_for(self, peer: Peer, wants: Wants, now: float) -> None:
        m = peer.machine
        self.watch("read leader", wants.leader_of is not None)
        self.watch("read index", 4 * wants.index)
        self.watch("read shard", len(wants.shards))
        if wants.leader_of is not None:
            found = self.read(peer, (leader_key(wants.leader_of),))
            m.saw_leaders([r for r in found if isinstance(r, FenceRecord)], now)
        if wants.index:
            m.saw_index([r for r in self.read(peer, index_keys()) if isinstance(r, FenceHead)], now)
        if wants.shards:
            beats = self.read(peer, [f"fence/{m.fence}/{s}" for s in wants.shards])
            links = self.read(peer, [f"links/{m.fence}/{s}" for s in wants.shards])
            m.saw_members(
                [r for r in beats if isinstance(r, PeerRecord)], [r for r in links if isinstance(r, LinksRecord)], now
            )

    # --- looking at it

    def living(self) -> list[Peer]:
        return [p for p in self.peers.values() if p.alive]

    def fences(self) -> dict[str, list[Peer]]:
        found: dict[str, list[Peer]] = {}
        for p in self.living():
            found.setdefault(p.machine.fence, []).append(p)
        return found

    def leaders(self, fence: str) -> list[Peer]:
        return [p for p in self.living() if p.machine.fence == fence and p.machine.leading]

    def index(self, now: float) -> dict[str, FenceHead]:
        newest = [versions[-1] for key in index_keys() for versions in self.board.get(key, {}).values()]
        return leads([e.record for e in newest if isinstance(e.record, FenceHead) and e.until >= now], now)

    def rand_index(self) -> float:
        return adjusted_rand_index([(p.machine.fence or p.name, p.site) for p in self.living()])

    def one_leader_each(self) -> bool:
        return all(len(self.leaders(fence)) == 1 for fence in self.fences() if fence)


def peer_record(peer: Peer, now: float) -> PeerRecord:
    device = Device(
        kind="cpu", name="AMD EPYC 7763 64-Core Processor", flops_per_s=1.2e11, memory_bytes_per_s=2.1e10,
        memory_bytes=16 << 30, free_bytes=12 << 30,
    )  # fmt: skip
    stand = peer.stand
    return PeerRecord(
        peer=peer.name, version="0.1.0", devices=(device,),
        addresses=(f"/ip4/203.0.113.7/tcp/31330/p2p/{peer.name}",),
        state="busy" if peer.work else "free", work=peer.work, fence=stand.fence if stand else "0",
        leader=stand.leader if stand else "", term=stand.term if stand else 0, published=round(now, 2),
    )  # fmt: skip


def adjusted_rand_index(pairs: Sequence[tuple[object, object]]) -> float:
    """Hubert and Arabie (1985) over (label, truth) per item: 1 for equal partitions, about 0 for unrelated ones."""

    def choose2(counts: Iterable[int]) -> float:
        return sum(n * (n - 1) / 2 for n in counts)

    both = choose2(collections.Counter(pairs).values())
    first = choose2(collections.Counter(a for a, _ in pairs).values())
    second = choose2(collections.Counter(b for _, b in pairs).values())
    total = choose2([len(pairs)])
    expected = first * second / total if total else 0.0
    top = (first + second) / 2
    return 1.0 if top == expected else (both - expected) / (top - expected)

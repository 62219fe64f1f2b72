"""Fences without a network: rules, the machine's transitions, rates, coordinates, the link book, the door."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht import fence_records, records
from dht import fence_rules as rules
from dht.clock import SwarmClock
from dht.coordinates import Coordinate, from_point, moved, predict_rtt_s
from dht.door import Door, check_ban, check_swarm_name, parse_swarm_key, swarm_secret
from dht.errors import InputError, RecordError
from dht.fence_records import (
    LEASE_S,
    MAX_LED_LATELY,
    MEMBERS_STAY_S,
    Beat,
    FenceHead,
    FenceLink,
    FenceRecord,
    LedLately,
    LinkFigure,
    LinksRecord,
    LinkSummary,
    leads,
    probe_turn,
    rank,
)
from dht.fences import FenceMachine
from dht.identity import Identity, public_key_of
from dht.linkbook import LinkBook
from dht.rates import CHUNK_BYTES, MAX_BYTES, MAX_SEND_S, RateMeter, Window
from dht.reads import BoardReads
from dht.records import Signer, Work
from dht.sights import MAX_SIGHTS, Sights
from tests.dht_samples import NOW, peer_record

PEERS = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 40)]
NAMES = [p.peer_id for p in PEERS]
FENCE = "0123456789abcdef"


def lead(leader: str, **fields: object) -> FenceRecord:
    base: dict[str, object] = {"fence": FENCE, "leader": leader, "term": 1, "score": 0, "members": 2, "published": NOW}
    return FenceRecord(**{**base, **fields})  # type: ignore[arg-type]


# --- records


def test_a_fence_whose_leader_died_is_read_on_for_a_while() -> None:
    """Until a member has stood the index does not name it, yet all its members are there."""
    lately = LedLately()
    assert lately.see(["b", "a"], NOW) == ["a", "b"]
    assert lately.see(["b"], NOW + MEMBERS_STAY_S - 1) == ["a", "b"]
    assert lately.see([], NOW + MEMBERS_STAY_S + 1) == ["b"]
    assert lately.see([], NOW + 3 * MEMBERS_STAY_S) == []


def test_members_are_seen_while_their_fence_has_no_leader() -> None:
    """The index is silent from the end of a dead leader's lease until a member has stood."""
    member = msgspec.structs.replace(peer_record(PEERS[1]), fence=FENCE)

    class Reads(BoardReads):
        heads: list[FenceHead]

        def __init__(self) -> None:
            self._fences, self.clock = LedLately(), SwarmClock()

        async def _read(self, keys: tuple[str, ...], kind: Any, timeout_s: float) -> list[Any]:
            return self.heads if kind is FenceHead else [member] if records.fence_keys(FENCE)[0] in keys else []

    board = Reads()
    head = FenceHead(fence=FENCE, leader=NAMES[0], term=1, score=0, members=2, published=board.clock.now())
    for board.heads in [[head], []]:
        assert asyncio.run(board.peers()) == (member,)


def test_made_up_fences_push_out_none_that_is_led() -> None:
    lately = LedLately()
    made_up = [f"{n:016x}" for n in range(2 * MAX_LED_LATELY)]
    assert lately.see(made_up, NOW) == sorted(made_up)
    found = lately.see([FENCE], NOW + 1)
    assert FENCE in found and len(found) == 1 + MAX_LED_LATELY


def test_a_leaders_record_is_its_own_only() -> None:
    record = lead(NAMES[0], outside=(FenceLink(FENCE, LinkSummary(1, 2, 3, 4.0)),), spares=(NAMES[1],))
    key, subkey = records.place(record)
    value = records.seal(record, Signer(PEERS[0]), expiration=NOW + 45)
    assert records.unseal(records.key_id(key), subkey, value, NOW + 45, now=NOW) == record
    with pytest.raises(RecordError, match="not its subject's"):
        records.seal(record, Signer(PEERS[1]), expiration=NOW + 45)
    with pytest.raises(RecordError, match="another subject's place"):
        records.unseal(records.key_id(records.fence_keys(FENCE)[0]), subkey, value, NOW + 45, now=NOW)


def test_the_largest_records_fit() -> None:
    figure = LinkFigure(PEERS[0].public_key, 1 << 31, 1 << 39, 1 << 39, 1 << 31, True, b"12345678")
    links = LinksRecord(
        peer=NAMES[0], fence=FENCE, links=(figure,) * fence_records.MAX_LINKS, coordinate=(1.5, 2.5, 3.5), published=NOW
    )
    full = lead(
        NAMES[0], outside=(FenceLink(FENCE, LinkSummary(1 << 39, 1 << 31, 1 << 31, 3.3)),) * 12, spares=(NAMES[1],) * 8,
        nominees=(fence_records.Nominee(NAMES[2], NAMES[3], "ab" * 16, 3),) * 2,
    )  # fmt: skip
    for record in (links, full):
        assert len(records.seal(record, Signer(PEERS[0]), expiration=NOW + 45)) <= records.MAX_RECORD_BYTES


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8), st.floats(-90, 5)), min_size=1))
@settings(max_examples=60, deadline=None)
def test_one_record_counts_and_its_lease_runs(drawn: list[tuple[int, int, int, float]]) -> None:
    made = [lead(NAMES[p], term=t, score=s, published=NOW + at) for t, s, p, at in drawn]
    best = leads(made, NOW).get(FENCE)
    alive = [r for r in made if r.published + LEASE_S >= NOW]
    assert (best is None) == (not alive)
    if best is not None:
        assert best in alive
        assert rank(best) == max(map(rank, alive))
    assert leads(list(reversed(made)), NOW).get(FENCE) in (
        None,
        *[r for r in alive if rank(r) == max(map(rank, alive))],
    )


@given(st.floats(1e9, 2e9), st.floats(0.5, 60))
@settings(max_examples=40, deadline=None)
def test_an_eighth_of_a_fence_probes_at_a_time(now: float, slot_s: float) -> None:
    slot = int(now / slot_s)
    turns = [sum(probe_turn(bytes([n]), (slot + k + 0.5) * slot_s, slot_s) for k in range(8)) for n in range(256)]
    assert turns == [1] * 256
    assert sum(probe_turn(bytes([n]), now, slot_s) for n in range(256)) == 32


# --- what a leader publishes


def test_a_silent_member_with_work_gets_a_nominee() -> None:
    run = "ab" * 16
    dead = peer_record(PEERS[0], published=NOW - rules.SILENT_S - 1, work=(Work(run, 3), Work(run, -1)), state="busy")
    slow = peer_record(PEERS[1], published=NOW - 5)
    fast = peer_record(PEERS[2], published=NOW - 5)
    fast = msgspec.structs.replace(fast, devices=(msgspec.structs.replace(fast.devices[0], flops_per_s=9e12),))
    busy = peer_record(PEERS[3], published=NOW - 5, work=(Work(run, 2),), state="busy")
    gone = peer_record(PEERS[4], published=NOW - 500)
    members = {m.peer: m for m in (dead, slow, fast, busy, gone)}
    assert rules.spares(members, NOW) == (NAMES[2], NAMES[1])
    (nominee,) = rules.nominate(members, NOW)
    assert (nominee.dead, nominee.spare, nominee.run, nominee.stage) == (NAMES[0], NAMES[2], run, 3)
    assert rules.nominate({m.peer: m for m in (slow, busy)}, NOW) == ()
    assert rules.nominate({m.peer: m for m in (dead, busy)}, NOW) == ()  # nobody is free


def test_links_are_summed_up_by_fence() -> None:
    inside = LinkFigure(PEERS[1].public_key, 800, 900_000, 1_000_000, 0, False, bytes.fromhex(FENCE))
    out = LinkFigure(PEERS[2].public_key, 40_000, 8_000, 20_000, 0, False, b"\1" * 8)
    found = [LinksRecord(peer=NAMES[n], fence=FENCE, links=(inside, out)) for n in range(3)]
    own, others = rules.link_summaries(FENCE, found)
    assert (own.kbps, own.rtt_us, own.pairs) == (900_000, 800, 3)
    assert [(link.fence, link.out.kbps) for link in others] == [("01" * 8, 8_000)]


# --- the machine


def machine(index: int = 0, **fields: int) -> FenceMachine:
    return FenceMachine(NAMES[index], random.Random(index), **fields)


def member_of(leader: int, *, score: int = 0, **fields: object) -> Beat:
    return Beat(fence=FENCE, leader=NAMES[leader], term=1, score=score, members=3, **fields)  # type: ignore[arg-type]


def joined(index: int, leader: int, now: float) -> FenceMachine:
    m = machine(index)
    for k in range(2):
        m.heard(NAMES[leader], 1e-3, member_of(leader), now + k)
        m.decide(now + k)
    assert (m.fence, m.leader) == (FENCE, NAMES[leader])
    return m


def test_a_newcomer_joins_a_near_leader_and_not_a_far_one() -> None:
    far = machine(1)
    for k in range(2):
        far.heard(NAMES[0], 0.08, member_of(0), NOW + k)
        far.heard(NAMES[5], 1e-3, Beat(score=9), NOW + k)
        stand = far.decide(NOW + k)
    assert stand.fence == records.NO_FENCE
    assert joined(1, 0, NOW).leader == NAMES[0]


def test_without_a_leader_it_founds_a_fence_after_a_while() -> None:
    m = machine(0)
    at = [n for n in range(20) if m.decide(NOW + 5 * n).record is not None]
    assert 1 <= at[0] <= 4
    assert m.leading
    assert m.decide(NOW + 200).record is not None


def test_a_leader_that_is_gone_is_followed_by_a_higher_term() -> None:
    m = joined(1, 0, NOW)
    m.saw_leaders([lead(NAMES[0])], NOW + 2)
    now = NOW + LEASE_S - 1
    while now < NOW + LEASE_S + 40 and not m.leading:
        now += 5
        m.missed(NAMES[0])
        m.decide(now)
    assert m.leading
    assert m.term == 2
    assert now > NOW + LEASE_S
    m.saw_leaders([lead(NAMES[3], term=2, score=5, published=now)], now + 1)  # another stood too, and outranks
    stand = m.decide(now + 1)
    assert (stand.record, m.leader) == (None, NAMES[3])


def test_a_ping_that_the_leader_answers_keeps_its_lease() -> None:
    m = joined(1, 0, NOW)
    for k in range(40):
        m.heard(NAMES[0], 1e-3, member_of(0), NOW + 5 * k)
        m.decide(NOW + 5 * k)
    assert m.leader == NAMES[0]


def test_of_two_leaders_of_one_site_the_lower_merges() -> None:
    low = machine(0)
    while not low.leading:
        low.decide(NOW + 5 * low._rounds)
    other = "f" * 16
    for k in range(2):
        beat = Beat(fence=other, leader=NAMES[1], term=1, score=7, members=3)
        low.heard(NAMES[1], 1e-3, beat, NOW + 100 + k)
        stand = low.decide(NOW + 100 + k)
    assert (low.fence, low.leader) == (other, NAMES[1])
    assert stand.resigned is not None
    assert stand.resigned.resigned_to == NAMES[1]


@given(st.lists(st.tuples(st.integers(0, 38), st.floats(1e-4, 1.0), st.booleans()), max_size=300), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_whatever_is_heard_tables_stay_bounded_and_records_valid(
    heard: list[tuple[int, float, bool]], seed: int
) -> None:
    m = FenceMachine(NAMES[0], random.Random(seed))
    for k, (peer, rtt_s, leading) in enumerate(heard):
        near = tuple(NAMES[(peer + j) % 39] for j in range(4))
        beat = Beat(fence=FENCE if leading else "", leader=NAMES[peer] if leading else "", near=near)
        m.heard(NAMES[peer], rtt_s, beat, NOW + k)
        if k % 10 == 9:
            stand = m.decide(NOW + k)
            for record in (stand.links, stand.record, stand.head, stand.resigned):
                if record is not None:
                    records.seal(record, Signer(PEERS[0]), expiration=NOW + k + 45)
        assert len(m.sights.table) <= MAX_SIGHTS + 17
        assert len(m.sights.hints) <= MAX_SIGHTS + 1


def test_the_table_forgets_the_far_first() -> None:
    sights = Sights("me", random.Random(1))
    for n in range(200):
        sights.heard(f"peer{n}", 1e-3 * (1 + n % 50), Beat(), NOW + n)
    assert len(sights.table) <= MAX_SIGHTS + 17
    assert {round(s.rtt_s, 4) for s in sights.nearest(4)} == {1e-3}


# --- rates


def emulated(
    mbps: float, rtt_s: float, burst_bytes: int = 0, cap_bytes_per_s: float | None = None
) -> tuple[float, int, float]:
    """(measured bytes/s, bytes sent, seconds): a link that serialises at `mbps` after letting a burst through."""
    rate, now, free_at = mbps * 1e6 / 8, 0.0, 0.0
    window, meter = Window(0.0, cap_bytes_per_s), RateMeter()
    acks: list[float] = []
    burst = float(burst_bytes)
    while not window.over(now):
        while window.room(now):
            window.sending(CHUNK_BYTES)
            passed = min(burst, CHUNK_BYTES)
            burst -= passed
            free_at = max(free_at, now) + (CHUNK_BYTES - passed) / rate
            meter.arrived(CHUNK_BYTES, free_at + rtt_s / 2)
            acks.append(free_at + rtt_s)
        if not acks:
            now += window.wait_s(now)
            continue
        now = max(now, acks.pop(0))
        window.acknowledged(CHUNK_BYTES, now)
    return meter.bytes_per_s(), window.sent, acks[-1] if acks else now


# 10 MB are in flight at 1 Gbps and 80 ms, more than the window of 8 MiB: there a probe tells less than there is.
LINKS = [(m, r) for m in (1, 3, 8, 30, 100, 300, 1000) for r in (0.5, 20, 80) if (m, r) != (1000, 80)]


@pytest.mark.parametrize("cap", [2e4, 125e3, 500e3])
def test_a_probe_keeps_to_the_upload_cap_and_finds_it(cap: float) -> None:
    measured, sent, seconds = emulated(300, 0.02, 0, cap)
    assert sent <= CHUNK_BYTES + cap * seconds
    assert seconds < MAX_SEND_S + CHUNK_BYTES / cap + 0.1
    if cap > 1e5:  # of one or two chunks nothing can be said
        assert measured == pytest.approx(cap, rel=0.15)


@pytest.mark.parametrize(("mbps", "rtt_ms"), LINKS)
@pytest.mark.parametrize("burst", [0, 256 << 10])
def test_a_rate_is_measured_within_15_percent(mbps: float, rtt_ms: float, burst: int) -> None:
    measured, sent, seconds = emulated(mbps, rtt_ms / 1e3, min(burst, int(mbps * 1e6 / 8 / 2)))
    assert measured == pytest.approx(mbps * 1e6 / 8, rel=0.15)
    assert sent <= MAX_BYTES
    assert seconds <= MAX_SEND_S + 1.5


# --- coordinates


def test_coordinates_predict_round_trips_never_measured() -> None:
    rng = random.Random(3)
    places = [(rng.uniform(0, 100), rng.uniform(0, 100)) for _ in range(24)]
    found = [Coordinate() for _ in places]

    def rtt_s(a: int, b: int) -> float:
        return (((places[a][0] - places[b][0]) ** 2 + (places[a][1] - places[b][1]) ** 2) ** 0.5 + 4) / 1e3

    asked = [(a, b) for a in range(24) for b in rng.sample(range(24), 8) if a != b]
    for _ in range(60):
        for a, b in asked:
            found[a] = moved(found[a], found[b], rtt_s(a, b), rng.uniform(0, 6))
    others = [(a, b) for a in range(24) for b in range(a) if (a, b) not in asked and (b, a) not in asked]
    off = sorted(abs(predict_rtt_s(found[a], found[b]) / rtt_s(a, b) - 1) for a, b in others)
    assert off[len(off) // 2] < 0.15


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=4), st.floats(0, 100), st.floats(1e-6, 10))
@settings(max_examples=60, deadline=None)
def test_hostile_coordinates_do_no_harm(point: list[float], error: float, rtt_s: float) -> None:
    there = from_point(tuple(point), error)
    if there is not None:
        own = moved(Coordinate(), there, rtt_s, 1.0)
        assert all(abs(v) <= 1e5 for v in own.point)
        assert 0.01 <= own.error <= 1


# --- the link book


def test_a_link_counts_as_the_lower_of_both_ends() -> None:
    peers = [peer_record(p, fence=FENCE if n < 3 else "f" * 16) for n, p in enumerate(PEERS[:5])]
    links = [
        LinksRecord(peer=NAMES[0], fence=FENCE, links=(LinkFigure(public_key_of(NAMES[1]), 900, 800_000, 500_000),)),
        LinksRecord(peer=NAMES[1], fence=FENCE, links=(LinkFigure(public_key_of(NAMES[0]), 1100, 600_000, 400_000),)),
        LinksRecord(peer=NAMES[3], fence="f" * 16, links=(LinkFigure(public_key_of(NAMES[4]), 900, 9_000, 9_000),)),
    ]
    far = FenceLink("f" * 16, LinkSummary(20_000, 50_000, 9, 1.5))
    view = fence_records.view(lead(NAMES[0], inside=LinkSummary(700_000, 1000, 9, 2.5), outside=(far,)), NOW)
    book = LinkBook(peers, links, [view])
    both = book.link(NAMES[0], NAMES[1])
    assert (both.source, both.bytes_per_s, both.rtt_s) == ("measured", 400_000e3 / 8, 1.1e-3)
    inside = book.link(NAMES[0], NAMES[2])
    assert (inside.source, inside.bytes_per_s) == ("fence", 700_000e3 / 8)
    assert inside.uncertainty == 2.5
    across = book.link(NAMES[0], NAMES[3])
    assert (across.source, across.bytes_per_s) == ("fence", 9_000e3 / 8)  # what the far end reaches at most
    assert across.rtt_s == pytest.approx(0.05)
    assert book.fences() == (tuple(sorted(NAMES[:3])), tuple(sorted(NAMES[3:5])))


# --- the door


def test_a_token_is_worth_nothing_turned_round() -> None:
    key = bytes(range(32))
    a, b = Door(NAMES[0], key=key), Door(NAMES[1], key=key)
    token = a.token(NAMES[1], "/x")
    assert b.proves(NAMES[0], "/x", token)
    assert not b.proves(NAMES[2], "/x", token)
    assert not b.proves(NAMES[0], "/y", token)
    assert not a.proves(NAMES[1], "/x", token)
    assert not b.proves(NAMES[0], "/x", b"")
    assert Door(NAMES[1]).proves(NAMES[0], "/x", b"")


def test_streams_are_shared_out_by_peer_and_range() -> None:
    door = Door(NAMES[0], banned=frozenset({NAMES[5], check_ban("198.51.100.7/24")}))
    assert door.enter(NAMES[5], "", 0.0) == "it is banned here"
    assert door.enter(NAMES[1], "198.51.100.200", 0.0) == "it is banned here"
    assert [door.enter(NAMES[1], "203.0.113.9", 0.0) for _ in range(512)] == [""] * 512
    assert "streams open" in door.enter(NAMES[1], "203.0.113.9", 99.0)
    assert [door.enter(NAMES[2], "203.0.113.10", 0.0) for _ in range(512)] == [""] * 512
    assert "203.0.113.0/24 has" in door.enter(NAMES[3], "203.0.113.11", 0.0)
    assert door.enter(NAMES[3], "203.0.114.11", 0.0) == ""
    for _ in range(512):
        door.leave(NAMES[1], "203.0.113.9")
    assert "a second" in door.enter(NAMES[1], "203.0.113.9", 0.001)
    assert door.enter(NAMES[1], "203.0.113.9", 5.0) == ""


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "/no/such/key"])
def test_a_bad_swarm_key_is_named(text: str) -> None:
    with pytest.raises(InputError, match="swarm key"):
        parse_swarm_key(text)


@pytest.mark.parametrize("text", ["", "Lab", "a b", "-lab", "x" * 33, "lab\n", "a/b"])
def test_a_bad_swarm_name_is_named(text: str) -> None:
    with pytest.raises(InputError, match="no name of a swarm"):
        check_swarm_name(text)


def test_a_name_and_a_key_each_keep_swarms_apart() -> None:
    key, other = bytes(32), bytes(range(32))
    secrets = [swarm_secret(n, k) for n in ("", "lab", "lab2") for k in (None, key, other)]
    assert secrets[0] is None
    assert len(set(secrets)) == 9
    assert swarm_secret("lab", other) == swarm_secret("lab", other)


def test_made_up_members_push_out_none_that_are_known() -> None:
    leader = Identity.from_seed(bytes(32)).peer_id
    machine = FenceMachine(leader, random.Random(1))
    machine.fence, machine.leader = "0" * 16, leader

    def member(number: int) -> records.PeerRecord:
        identity = Identity.from_seed((number + 1).to_bytes(32, "big"))
        return peer_record(identity, fence="0" * 16, published=NOW)

    honest = [member(n) for n in range(60)]
    machine.saw_members(honest, [], NOW)
    machine.saw_members([member(n) for n in range(100, 900)], [], NOW)
    assert len(machine._members) <= 4 * rules.MAX_MEMBERS
    assert {p.peer for p in honest} <= machine._members.keys()

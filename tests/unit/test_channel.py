"""One channel as a state machine: whatever breaks, the receiver takes every frame once and in order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusion_p2p.frame import Frame, Kind
from peer import wire
from peer.channel import Inbox, Outbox, Take
from peer.errors import ResumeGap, StaleError, WireError
from peer.wire import Answer, Cursor, Open

RUN = bytes(16)
LOG = 1 << 20


def outbox(incarnation: int = 0, start: int = 0, log_bytes: int = LOG) -> Outbox:
    return Outbox(RUN, 0, 1, incarnation, log_bytes=log_bytes, start=Cursor(start, 0))


def inbox(incarnation: int = 0, start: int = 0) -> Inbox:
    return Inbox(RUN, 0, 1, incarnation, bound=lambda src, kind, value: 100, start=Cursor(start, 0))


def frame(tick: int, index: int, payload: bytes | None = None) -> Frame:
    return Frame(Kind.ACT, 0, 1, 5, tick, index, f"{tick}/{index}".encode() if payload is None else payload)


def opened(src_incarnation: int = 0, dst_incarnation: int = 0, epoch: int = 1) -> Open:
    return Open(wire.WIRE_VERSION, RUN, epoch, 1, 0, 1, src_incarnation, dst_incarnation)


def connect(out: Outbox, to: Inbox) -> None:
    answer = to.open(opened(out.incarnation, to.incarnation), expected_incarnation=out.incarnation, epoch=1)
    assert answer.refused == ""
    out.resume(answer.cursor)


def deliver(out: Outbox, to: Inbox, most: int = 1 << 30) -> list[Frame]:
    """Move up to `most` records over a perfect stream."""
    got: list[Frame] = []
    while most > 0 and (record := out.take(1)) is not None:
        most -= 1
        verdict = to.header(wire.unpack_header(wire.pack_header(record.header)))
        if record.payload is None:
            assert verdict is Take.HAVE
            to.compare(record.header)
        elif (taken := to.accept(record.header, record.payload)) is not None:
            got.append(taken)
    return got


class Replay(RuleBasedStateMachine):
    """A sender and a receiver that both restart from the newest complete set, over streams that break at any record.

    Tick t has `sizes[t % 3]` frames. `taken` is what the receiver's stage has had since it was last (re)started.
    """

    @initialize(sizes=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)))
    def start(self, sizes: tuple[int, int, int]) -> None:
        self.sizes, self.set_tick = sizes, 0
        self.out, self.to = outbox(), inbox()
        self.tick = self.sent_in_tick = 0  # the sender's position
        self.taken: list[Frame] = []
        self.to_tick = 0  # the receiver's first tick
        self.link()

    def frames_from(self, tick: int) -> list[Frame]:
        return [frame(t, i) for t in range(tick, self.tick + 1) for i in range(self.sizes[t % 3])]

    def link(self) -> None:
        connect(self.out, self.to)

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        for _ in range(count):
            if self.sent_in_tick >= self.sizes[self.tick % 3]:
                self.tick, self.sent_in_tick = self.tick + 1, 0
            else:
                self.out.push(frame(self.tick, self.sent_in_tick))
                self.sent_in_tick += 1

    @rule(count=st.integers(1, 6))
    def move(self, count: int) -> None:
        self.taken += deliver(self.out, self.to, count)

    @rule()
    def acknowledge(self) -> None:
        self.out.ack(self.to.cursor)

    @rule()
    def break_and_reconnect(self) -> None:
        self.link()

    @rule()
    def complete_set(self) -> None:
        """At the last tick that the receiver has finished: both sides may forget what lies before."""
        done = self.tick - 1
        if len(self.taken) >= len(self.frames_from(self.to_tick)) - self.sent_in_tick and done > self.set_tick:
            self.to.advance(done + 1)
            self.set_tick = done + 1
            self.out.trim(self.set_tick)
            self.to.trim(self.set_tick)

    @precondition(lambda self: self.tick >= self.set_tick)
    @rule()
    def receiver_restored(self) -> None:
        self.to = inbox(self.to.incarnation + 1, self.set_tick)
        self.taken, self.to_tick = [], self.set_tick
        self.link()

    @rule()
    def sender_restored(self) -> None:
        self.out = outbox(self.out.incarnation + 1, self.set_tick)
        self.tick, self.sent_in_tick = self.set_tick, 0
        self.link()

    @invariant()
    def every_frame_once_and_in_order(self) -> None:
        if not hasattr(self, "taken"):
            return
        last = max([self.tick, *(f.tick for f in self.taken)])
        expected = [frame(t, i) for t in range(self.to_tick, last + 1) for i in range(self.sizes[t % 3])]
        assert self.taken == expected[: len(self.taken)]
        assert self.to.differing == 0

    def teardown(self) -> None:
        """Whatever happened, one good stream brings the receiver up to date."""
        if hasattr(self, "taken"):
            self.link()
            self.taken += deliver(self.out, self.to)
            expected = self.frames_from(self.to_tick)
            sent = [f for f in expected if (f.tick, f.micro_batch) < (self.tick, self.sent_in_tick)]
            assert self.taken[: len(sent)] == sent


TestReplay = Replay.TestCase
TestReplay.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_frames_that_are_acknowledged_go_and_logged_ones_stay_until_trimmed() -> None:
    plain, logged = outbox(log_bytes=0), outbox()
    for out in (plain, logged):
        to = inbox()
        connect(out, to)
        for t in range(3):
            out.push(frame(t, 0))
        deliver(out, to)
        assert out.held_bytes == 9
        assert out.unacked_bytes == 9
        out.ack(to.cursor)
        assert out.unacked_bytes == 0
    assert plain.held_bytes == 0
    assert logged.held_bytes == 9
    logged.trim(2)
    assert logged.held_bytes == 3


def test_a_log_beyond_its_bound_forgets_the_oldest_and_says_so_when_asked() -> None:
    out, to = outbox(log_bytes=10), inbox()
    connect(out, to)
    for t in range(10):
        out.push(frame(t, 0))
        deliver(out, to)
        out.ack(to.cursor)
    assert out.held_bytes <= 10
    out.resume(Cursor(8, 0))
    with pytest.raises(ResumeGap, match="tick 2"):
        out.resume(Cursor(2, 0))


def test_unsent_frames_are_never_dropped() -> None:
    out, to = outbox(log_bytes=0), inbox()
    connect(out, to)
    out.push(frame(0, 0))
    out.trim(5)
    out.ack(Cursor(9, 0))
    assert deliver(out, to) == [frame(0, 0)]


def test_ticks_never_go_back_on_a_channel() -> None:
    out = outbox()
    out.push(frame(3, 0))
    with pytest.raises(WireError, match="tick 2 after tick 3"):
        out.push(frame(2, 0))


def test_a_skipped_frame_is_noticed() -> None:
    out, to = outbox(), inbox()
    connect(out, to)
    out.push(frame(0, 0))
    out.push(frame(0, 1))
    assert out.take(1) is not None
    second = out.take(1)
    assert second is not None
    with pytest.raises(WireError, match="was expected"):
        to.header(second.header)


def test_a_frame_of_another_epoch_or_incarnation_is_refused() -> None:
    out, to = outbox(incarnation=2), inbox()
    to.open(opened(3), expected_incarnation=3, epoch=1)
    out.push(frame(0, 0))
    out.resume(Cursor())
    record = out.take(1)
    assert record is not None
    with pytest.raises(StaleError, match="incarnation 2"):
        to.header(record.header)


def test_a_frame_beyond_its_bound_is_refused_before_its_payload() -> None:
    out, to = outbox(), inbox()
    connect(out, to)
    out.push(frame(0, 0, bytes(101)))
    record = out.take(1)
    assert record is not None
    with pytest.raises(WireError, match="101 bytes, at most 100"):
        to.header(record.header)


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    out, to = outbox(), inbox()
    connect(out, to)
    out.push(frame(0, 0))
    with pytest.raises(WireError, match="acknowledges"):
        out.ack(Cursor(0, 1))


@pytest.mark.parametrize(
    ("message", "expected", "epoch", "code"),
    [
        (opened(2, 0, 5), 2, 5, ""),
        (opened(1, 0, 5), 2, 5, "stale"),  # an older host of the stage
        (opened(2, 0, 4), 2, 5, "stale"),  # an older trainer session
        (opened(3, 0, 5), 2, 5, "not-yet"),  # a newer host than this plan knows
        (opened(2, 0, 6), 2, 5, "not-yet"),  # a newer trainer session
        (opened(2, 1, 5), 2, 5, "stale"),  # this host is the older one
        (opened(2, 0, 5), None, 5, "not-yet"),
        (Open(1, bytes([1] * 16), 5, 1, 0, 1, 2, 0), 2, 5, "unknown"),
        (Open(1, RUN, 5, 1, 0, 3, 2, 0), 2, 5, "unknown"),
    ],
)
def test_opening_is_fenced(message: Open, expected: int | None, epoch: int, code: str) -> None:
    answer = inbox().open(message, expected_incarnation=expected, epoch=epoch)
    assert answer.refused == code
    assert code or answer == Answer(Cursor())


def test_the_highest_incarnation_seen_stays_in_force() -> None:
    to = inbox()
    assert to.open(opened(4, 0, 7), expected_incarnation=4, epoch=7).refused == ""
    assert to.open(opened(3, 0, 7), expected_incarnation=3, epoch=7).refused == "stale"
    assert to.open(opened(4, 0, 6), expected_incarnation=4, epoch=6).refused == "stale"

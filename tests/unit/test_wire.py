"""The envelope of tensor streams: every header round-trips, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.frame import Frame, Kind
from peer import wire
from peer.errors import WireError

u32 = st.integers(0, 2**32 - 1)
stages = st.integers(-1, 2**15 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    src = draw(stages)
    dst = draw(stages.filter(lambda s: s != src))
    return Frame(
        draw(st.sampled_from(Kind)), src, dst, draw(u32), draw(st.integers(0, 2**64 - 1)), draw(u32),
        draw(st.binary(max_size=300)),
    )  # fmt: skip


@given(frames(), st.binary(min_size=16, max_size=16), u32, u32, u32)
def test_header_round_trips(frame: Frame, run: bytes, epoch: int, incarnation: int, index: int) -> None:
    header = wire.header_of(frame, run=run, epoch=epoch, incarnation=incarnation, index=index)
    raw = wire.pack_header(header)
    assert len(raw) == wire.HEADER_BYTES
    back = wire.unpack_header(raw)
    assert back == header
    assert back.frame(frame.payload) == frame


@given(frames(), st.integers(0, wire.HEADER_BYTES * 8 - 1))
@settings(max_examples=300)
def test_any_flipped_bit_in_a_header_is_noticed(frame: Frame, bit: int) -> None:
    raw = bytearray(wire.pack_header(wire.header_of(frame, run=bytes(16), epoch=1, incarnation=1, index=0)))
    raw[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(WireError):
        wire.unpack_header(bytes(raw))


def test_a_damaged_payload_is_noticed() -> None:
    frame = Frame(Kind.ACT, 0, 1, 7, 3, 2, b"abcdef")
    header = wire.header_of(frame, run=bytes(16), epoch=1, incarnation=1, index=0)
    with pytest.raises(WireError, match="ACT 0->1"):
        header.frame(b"abcdeg")


@given(st.binary(min_size=1, max_size=200), st.data())
def test_flipped_bits_swapped_blocks_and_lost_ends_are_noticed(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << (bit % 8)
    others = {bytes(flipped), payload[:-1], payload + bytes(1), payload[16:32] + payload[:16] + payload[32:]} - {
        payload
    }
    assert wire.digest(payload) not in {wire.digest(other) for other in others}


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.ACT, 0, 1, -1, 0, 0, b""),
        Frame(Kind.ACT, 0, 2**15, 0, 0, 0, b""),
        Frame(Kind.ACT, 0, 1, 0, 2**64, 0, b""),
    ],
)
def test_what_does_not_fit_is_refused_when_sent(frame: Frame) -> None:
    with pytest.raises(WireError):
        wire.pack_header(wire.header_of(frame, run=bytes(16), epoch=1, incarnation=1, index=0))


def test_cursors_are_ordered_by_tick_then_index() -> None:
    assert wire.Cursor(1, 9) < wire.Cursor(2, 0) < wire.Cursor(2, 0).after()
    assert wire.unpack_cursor(wire.pack_cursor(wire.Cursor(2**40, 7))) == wire.Cursor(2**40, 7)


def test_open_and_answer_round_trip() -> None:
    opened = wire.Open(wire.WIRE_VERSION, b"r" * 16, 3, 4, 0, 1, 5, 6)
    raw = wire.pack_message(opened)
    assert wire.message_length(raw[:2]) == len(raw) - 2
    assert wire.unpack_open(raw[2:]) == opened
    answer = wire.Answer(wire.Cursor(3, 4), "stale", "x" * 5000)
    raw = wire.pack_message(answer)
    assert len(raw) <= wire.MAX_OPEN + 2
    assert wire.unpack_answer(raw[2:]).refused == "stale"


def test_other_versions_are_refused_by_number() -> None:
    raw = wire.pack_message(wire.Open(wire.WIRE_VERSION + 1, b"r" * 16, 3, 4, 0, 1, 5, 6))
    with pytest.raises(WireError, match=f"version {wire.WIRE_VERSION + 1}"):
        wire.unpack_open(raw[2:])

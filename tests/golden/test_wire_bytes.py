"""Golden bytes of wire version 2. A change here is a new WIRE_VERSION, never an edit of these strings."""

from __future__ import annotations

from fusion_p2p.frame import TRAINER, Frame, Kind
from peer import wire

RUN = bytes(range(16))


def test_frame_header() -> None:
    frame = Frame(Kind.GRAD, 2, 1, 345, 1 << 33, 6, b"fusion")
    raw = wire.pack_header(wire.header_of(frame, run=RUN, epoch=9, incarnation=4, index=11))
    assert raw.hex() == GOLDEN_HEADER
    assert wire.unpack_header(bytes.fromhex(GOLDEN_HEADER)).frame(b"fusion") == frame


def test_a_payload_s_digest_is_published_gmac() -> None:
    assert wire.digest(b"").hex() == "58e2fccefa7e3061367f1d57a4e7455a"  # test case 1 of the GCM specification


def test_open() -> None:
    opened = wire.Open(2, RUN, 9, 12, TRAINER, 0, 1, 4)
    assert wire.pack_message(opened).hex() == GOLDEN_OPEN
    assert wire.unpack_open(bytes.fromhex(GOLDEN_OPEN)[2:]) == opened


def test_answer() -> None:
    answer = wire.Answer(wire.Cursor(5, 6), "stale", "epoch 1 < 2")
    assert wire.pack_message(answer).hex() == GOLDEN_ANSWER
    assert wire.unpack_answer(bytes.fromhex(GOLDEN_ANSWER)[2:]) == answer


def test_cursor_and_tags() -> None:
    assert wire.pack_cursor(wire.Cursor(5, 6)).hex() == "050000000000000006000000"
    assert {t.name: int(t) for t in wire.Tag} == {"FRAME": 1, "DIGEST": 2, "BEAT": 3, "ACK": 4, "REFUSE": 5}
    assert wire.WIRE_VERSION == 2
    assert wire.HEADER_BYTES == 74


GOLDEN_HEADER = (
    "020402000100000102030405060708090a0b0c0d0e0f090000000400000059010000000000"
    "0002000000060000000b000000060000006b89336e5a6fdfd9248fb0aa532084210b1a93c6"
)
GOLDEN_OPEN = "1a009802c410000102030405060708090a0b0c0d0e0f090cff000104"
GOLDEN_ANSWER = "160093920506a57374616c65ab65706f63682031203c2032"

"""Messages nested a thousand deep in a field that nobody knows: refused as any malformed one, wherever they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dht import probe
from dht.errors import TransportError
from dht.fence_records import Beat
from dht.transport import Stream
from fusion_p2p.errors import FrameError
from fusion_p2p.frame import Frame, Kind, StepHeader, TickReport
from fusion_p2p.stage import _decode
from peer import wire
from peer.daemon_session import _stage_of
from peer.errors import SignatureError, WireError
from peer.protocol import BlobRef, SessionCert, Signed, StageOffer
from peer.signing import new_session_key, open_signed, public_bytes, sign
from peer.trainer_ticks import TickBook
from tests.simulated_time import simulate
from tests.unit.test_numeric_log import BASE

DEEP = b"\x91" * 1000 + b"\x90"


def nested(message: msgspec.Struct) -> bytes:
    """The same with one field more."""
    raw = msgspec.msgpack.encode(message)
    fields = msgspec.msgpack.decode(raw)
    if isinstance(fields, list):
        return b"\xdc" + (len(fields) + 1).to_bytes(2, "big") + b"".join(map(msgspec.msgpack.encode, fields)) + DEEP
    pairs = b"".join(msgspec.msgpack.encode(k) + msgspec.msgpack.encode(v) for k, v in fields.items())
    return b"\xde" + (len(fields) + 1).to_bytes(2, "big") + pairs + b"\xa1?" + DEEP


def report() -> None:
    book = TickBook(2, 1, 0)
    tick = book.release(StepHeader(True, 0, (1,)), 0, 0.0)
    done = nested(TickReport(0.0, 0.0, 0.0, 0.0))
    book.take(Frame(Kind.DONE, 0, -1, 0, tick, 0, done), 0.0)


def header() -> None:
    _decode(msgspec.msgpack.Decoder(StepHeader), nested(StepHeader(True, 0, (1,))), "the header")


def answer() -> None:
    wire.unpack_answer(nested(wire.Answer(wire.Cursor())))


@pytest.mark.parametrize(("arrives", "error"), [(report, FrameError), (header, FrameError), (answer, WireError)])
def test_what_comes_on_streams_is_refused(arrives: Callable[[], None], error: type[Exception]) -> None:
    with pytest.raises(error, match="malformed"):
        arrives()


def test_an_answer_to_a_ping_is_a_failure_of_that_peer_alone() -> None:
    raw = nested(Beat())
    assert len(raw) <= probe.MAX_BEAT

    class Transport:
        async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> Stream:
            reader = asyncio.StreamReader()
            reader.feed_data(2 * (len(raw).to_bytes(2, "big") + raw))
            return Stream(peer, reader, Silent())  # type: ignore[arg-type]

    class Silent:
        def write(self, data: bytes) -> None: ...

        def close(self) -> None: ...

    async def main() -> None:
        transport: Any = Transport()

        async def seen_at(peer: str) -> str:
            return ""

        with pytest.raises(TransportError, match="answers no ping: maximum recursion"):
            await probe.Prober(transport, Beat, seen_at=seen_at).ping("12D3KooW")

    simulate(main())


def test_an_offer_that_cannot_be_read_is_refused() -> None:
    offer = StageOffer(
        assignment=Signed(b"\x81\xa1?" + DEEP, b"k" * 32, b"s" * 64), numerics=BASE, window=1, opdag=b"",
        state=BlobRef("", 0, ()), first_tick=0,
    )  # fmt: skip
    assert _stage_of(offer) == -1


def test_a_session_of_an_epoch_that_no_header_holds_is_refused() -> None:
    key = new_session_key()
    cert = SessionCert(run="r", session_key=public_bytes(key), trainer_peer="t", epoch=1 << 40, expires=1.0)
    with pytest.raises(SignatureError, match="no SessionCert"):
        open_signed(sign(cert, key), SessionCert, public_bytes(key))

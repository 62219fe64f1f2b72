"""Control messages: a large one on a slow link is no silence, a stuck link is; what was queued stays whole."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from peer.control_io import MessageStream
from peer.protocol import Heartbeat, Renew, Signed, ToVolunteer
from tests.simulated_time import SimulatedLoop
from tests.unit.test_links import run

DECODER: msgspec.msgpack.Decoder[ToVolunteer] = msgspec.msgpack.Decoder(ToVolunteer)
LARGE = Renew(cert=Signed(b"x" * 100_000, b"", b""))
PATIENCE_S = 0.3


class SlowLink:
    """Both ends of a stream that carries `bytes_per_turn` every hundredth of a second."""

    def __init__(self, bytes_per_turn: int) -> None:
        self.reader, self.buffer, self.rate = asyncio.StreamReader(), bytearray(), bytes_per_turn
        self.moved = asyncio.Event()
        self.task = asyncio.ensure_future(self._carry())

    async def _carry(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.reader.feed_data(bytes(self.buffer[: self.rate]))
            del self.buffer[: self.rate]
            self.moved.set()

    @property
    def transport(self) -> SlowLink:
        return self

    def get_write_buffer_size(self) -> int:
        return len(self.buffer)

    def write(self, data: bytes) -> None:
        self.buffer += data

    async def drain(self) -> None:
        while self.buffer:
            self.moved.clear()
            await self.moved.wait()

    def stream(self) -> MessageStream[ToVolunteer]:
        return MessageStream(self.reader, cast(Any, self), DECODER)


def test_a_large_message_on_a_slow_link_is_no_silence() -> None:
    async def main() -> None:
        link = SlowLink(1000)  # a second for all of it
        stream = link.stream()
        sending = asyncio.ensure_future(stream.send(LARGE, timeout_s=PATIENCE_S))
        assert await stream.receive(timeout_s=PATIENCE_S) == LARGE
        await sending
        link.task.cancel()

    run(main())


def test_a_link_that_takes_nothing_is_given_up_at_either_end() -> None:
    async def main() -> None:
        link = SlowLink(0)
        stream = link.stream()
        with pytest.raises(TimeoutError):
            await stream.send(LARGE, timeout_s=PATIENCE_S)
        with pytest.raises(TimeoutError):
            await stream.receive(timeout_s=PATIENCE_S)
        link.task.cancel()

    run(main())


def test_a_send_that_is_cancelled_leaves_the_stream_in_order() -> None:
    async def main() -> None:
        link = SlowLink(20_000)
        stream = link.stream()
        sending = asyncio.ensure_future(stream.send(LARGE, timeout_s=PATIENCE_S))
        await link.moved.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await stream.send(Heartbeat(), timeout_s=PATIENCE_S)
        assert await stream.receive(timeout_s=PATIENCE_S) == LARGE
        assert await stream.receive(timeout_s=PATIENCE_S) == Heartbeat()
        link.task.cancel()

    run(main())


def test_a_stream_that_ends_inside_a_message_has_ended() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((50).to_bytes(4, "little") + b"half")
        reader.feed_eof()
        stream: MessageStream[ToVolunteer] = MessageStream(reader, cast(Any, None), DECODER)
        assert await stream.receive(timeout_s=60.0) is None

    run(main())


@pytest.mark.parametrize(("comes_s", "heard"), [(0.5, True), (9.0, False)])
def test_who_was_stopped_itself_does_not_take_the_other_end_for_dead(comes_s: float, heard: bool) -> None:
    """A process that was stopped for a minute has the other end's heartbeat a little later: it is still waited for."""

    async def main() -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        assert isinstance(loop, SimulatedLoop)
        stream: MessageStream[ToVolunteer] = MessageStream(reader, cast(Any, None), DECODER)
        raw = msgspec.msgpack.encode(Heartbeat())
        receiving = asyncio.ensure_future(stream.receive(timeout_s=8.0))
        await asyncio.sleep(1.0)
        loop.call_later(60.0 + comes_s, reader.feed_data, len(raw).to_bytes(4, "little") + raw)
        loop.freeze(60.0)
        if heard:
            assert await receiving == Heartbeat()
        else:
            with pytest.raises(TimeoutError):
                await receiving

    run(main())

"""Links over an in-memory transport: order, resume after a cut, back-pressure, fencing, silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
import pytest

from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader
from peer.channel_io import ChannelSettings
from peer.links import LinkEvent, Links
from peer.protocol import Endpoint
from peer.ratelimit import Limiter
from tests.memory_transport import Network
from tests.simulated_time import simulate

RUN = "ab" * 16
FAST = ChannelSettings(beat_s=0.02, dead_s=0.2, backoff_max_s=0.05, ack_every_s=0.0)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await coroutine

    simulate(bounded())


def endpoint(stage: int, incarnation: int = 0, peer: str | None = None) -> Endpoint:
    peer = peer or f"peer{stage}"
    return Endpoint(stage=stage, peer=peer, endpoint=f"e{stage}-{peer}-{incarnation}", incarnation=incarnation)


def act(tick: int, micro_batch: int, payload: bytes, src: int = 0, dst: int = 1) -> Frame:
    return Frame(Kind.ACT, src, dst, 7, tick, micro_batch, payload)


def links(network: Network, me: Endpoint, events: list[LinkEvent] | None = None, **kw: Any) -> Links:
    kw.setdefault("settings", FAST)
    if events is not None:
        kw["on_event"] = events.append
    return Links(network.transport(me.peer), me, RUN, 1, bound=lambda src, kind, value: 1 << 20, **kw)


@contextlib.asynccontextmanager
async def pair(network: Network, **kw: Any) -> AsyncIterator[tuple[Links, Links]]:
    ends = endpoint(0), endpoint(1)
    async with links(network, ends[0], **kw) as a, links(network, ends[1], **kw) as b:
        a.update(ends, 1)
        b.update(ends, 1)
        yield a, b


async def take(b: Links, count: int) -> list[Frame]:
    got: list[Frame] = []
    async for frame in b.frames():
        got.append(frame)
        if len(got) == count:
            break
    return got


def test_frames_arrive_once_and_in_order_though_the_stream_is_cut_often() -> None:
    async def main() -> None:
        network = Network()
        sent = [act(t, m, bytes([t, m]) * 500) for t in range(30) for m in range(5)]
        async with pair(network) as (a, b):

            async def cut() -> None:
                while True:
                    await asyncio.sleep(0.01)
                    network.cut("peer1")

            cutter = asyncio.ensure_future(cut())
            reader = asyncio.ensure_future(take(b, len(sent)))
            for frame in sent:
                await a.send(frame)
                await asyncio.sleep(0.001)
            assert await reader == sent
            cutter.cancel()
            assert network.opened > 3
            assert b.get_nowait() is None
            assert a.bytes_sent()["0-1"] >= sum(len(f.payload) for f in sent)

    run(main())


def test_a_frame_of_many_chunks_and_an_empty_one() -> None:
    async def main() -> None:
        async with pair(Network()) as (a, b):
            sent = [act(0, 0, bytes(range(256)) * 3000), act(0, 1, b"")]
            for frame in sent:
                await a.send(frame)
            assert await take(b, 2) == sent

    run(main())


def test_a_sender_waits_while_too_much_is_unacknowledged_and_a_receiver_that_takes_frees_it() -> None:
    async def main() -> None:
        settings = ChannelSettings(beat_s=0.02, dead_s=5, ack_every_s=0.0, unacked_bytes=4000, queue_bytes=4000)
        async with pair(Network(), settings=settings) as (a, b):
            sending = asyncio.ensure_future(_send_all(a, [act(0, m, bytes(1000)) for m in range(40)]))
            await asyncio.wait({sending}, timeout=0.1)
            assert not sending.done()
            assert not a.wait_room(0)
            assert a.held_bytes() <= 6000
            assert b.held_bytes() <= 6000
            assert len(await take(b, 40)) == 40
            await sending
            assert a.wait_room(0) or a.held_bytes() > 4000

    run(main())


async def _send_all(a: Links, frames: list[Frame]) -> None:
    for frame in frames:
        await a.send(frame)


def test_logged_frames_are_sent_again_to_a_restored_receiver_until_trimmed() -> None:
    async def main() -> None:
        network, events = Network(), list[LinkEvent]()
        old, new = endpoint(1), endpoint(1, 1, "peer1b")
        async with links(network, endpoint(0), events, logged=lambda dst: True) as a:
            async with links(network, old) as b:
                a.update([old], 1)
                b.update([endpoint(0)], 1)
                sent = [act(t, 0, bytes([t])) for t in range(6)]
                await _send_all(a, sent)
                assert await take(b, 6) == sent
            a.trim(3)
            async with links(network, new, start_tick=3) as c:
                c.update([endpoint(0)], 2)
                a.update([new], 2)
                assert await take(c, 3) == sent[3:]
                await a.send(act(6, 0, b"6"))
                assert (await take(c, 1))[0].tick == 6
            gap = endpoint(1, 2, "peer1c")
            async with links(network, gap, start_tick=1) as d:
                d.update([endpoint(0)], 3)
                a.update([gap], 3)
                await _until(lambda: any(e.code == "gap" for e in events))

    run(main())


async def _until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def test_a_restored_sender_offers_what_the_receiver_has_by_hash_and_differences_are_seen() -> None:
    async def main() -> None:
        network, events = Network(), list[LinkEvent]()
        frames = [act(t, 0, bytes([t]) * 5000) for t in range(4)]
        async with links(network, endpoint(1), events) as b:
            b.update([endpoint(0)], 1)
            async with links(network, endpoint(0)) as a:
                a.update([endpoint(1)], 1)
                await _send_all(a, frames)
                assert await take(b, 4) == frames
            again = endpoint(0, 1, "peer0b")
            async with links(network, again, start_tick=1) as a2:
                b.update([again], 2)
                a2.update([endpoint(1)], 2)
                await _send_all(a2, [frames[1], act(2, 0, b"x" * 5000), frames[3], act(4, 0, b"new")])
                assert await take(b, 1) == [act(4, 0, b"new")]
                assert a2.bytes_sent()["0-1"] < 1000
            assert b.differing() == 1

    run(main())


def test_a_replaced_host_is_refused_and_told_so() -> None:
    async def main() -> None:
        network, events = Network(), list[LinkEvent]()
        async with links(network, endpoint(0), events) as a, links(network, endpoint(1)) as b:
            a.update([endpoint(1)], 1)
            b.update([endpoint(0, 3)], 1)
            await a.send(act(0, 0, b"old"))
            await _until(lambda: any(e.code == "stale" for e in events))
            assert b.get_nowait() is None

    run(main())


def test_other_addresses_cut_no_stream_and_count_from_the_next_try() -> None:
    async def main() -> None:
        network, tried = Network(), list[tuple[str, ...]]()
        async with pair(network) as (a, b):
            await a.send(act(0, 0, b"one"))
            await take(b, 1)
            transport: Any = a.transport
            connect = transport.connect

            async def watched(peer: str, addresses: tuple[str, ...], **kw: Any) -> None:
                tried.append(addresses)
                await connect(peer, addresses, **kw)

            transport.connect = watched
            opened = network.opened
            a.update([msgspec.structs.replace(endpoint(1), addresses=("/elsewhere",))], 1)
            await a.send(act(0, 1, b"two"))
            await take(b, 1)
            assert (network.opened, tried) == (opened, [])
            network.cut("peer1")
            await a.send(act(0, 2, b"three"))
            await take(b, 1)
            assert tried[0] == ("/elsewhere",)

    run(main())


def test_a_stranger_gets_nothing_in() -> None:
    async def main() -> None:
        network = Network()
        async with links(network, endpoint(0, 0, "stranger")) as a, links(network, endpoint(1)) as b:
            a.update([endpoint(1)], 1)
            b.update([endpoint(0, 0, "peer0")], 1)
            await a.send(act(0, 0, b"forged"))
            await _until(lambda: network.opened > 2)
            assert b.get_nowait() is None
            assert a.waits()[0].phase == "connect"

    run(main())


def test_an_oversized_frame_ends_the_stream_and_is_reported_at_both_ends() -> None:
    async def main() -> None:
        network, mine, theirs = Network(), list[LinkEvent](), list[LinkEvent]()
        async with links(network, endpoint(0), mine) as a, links(network, endpoint(1), theirs) as b:
            a.update([endpoint(1)], 1)
            b.update([endpoint(0)], 1)
            await a.send(act(0, 0, bytes((1 << 20) + 1)))
            await _until(lambda: any(e.code == "frame" for e in theirs) and any(e.code == "refused" for e in mine))
            assert "at most 1048576" in next(e.reason for e in theirs if e.code == "frame")

    run(main())


def test_a_frozen_peer_is_lost_and_a_healed_one_is_back() -> None:
    async def main() -> None:
        network, events = Network(), list[LinkEvent]()
        async with links(network, endpoint(0), events) as a, links(network, endpoint(1)) as b:
            a.update([endpoint(1)], 1)
            b.update([endpoint(0)], 1)
            await a.send(act(0, 0, b"1"))
            await take(b, 1)
            for pipe in network.pipes:
                pipe.flow.clear()
                pipe.mute = True
            network.dead.add("peer1")
            await _until(lambda: any(e.code == "lost" for e in events))
            assert any("no byte" in e.reason for e in events if e.code == "broken")
            network.dead.clear()
            await _until(lambda: any(e.code == "back" for e in events))
            await a.send(act(0, 1, b"2"))
            assert (await take(b, 1))[0].micro_batch == 1

    run(main())


def test_a_capped_sender_is_slow_but_never_silent() -> None:
    async def main() -> None:
        events: list[LinkEvent] = []
        limiter = Limiter(400e3)  # a whole chunk would take longer than `dead_s`
        async with pair(Network(), events=events, limiter=limiter) as (a, b):
            sent = [act(0, m, bytes(600_000)) for m in range(2)]
            await _send_all(a, sent)
            assert await take(b, 2) == sent
        assert not [e for e in events if e.code in ("broken", "lost")]

    run(main())


def test_a_host_without_a_lease_sends_nothing() -> None:
    async def main() -> None:
        async with pair(Network()) as (a, b):
            await a.send(act(0, 0, b"1"))
            await take(b, 1)
            a.hold()
            await a.send(act(0, 1, b"2"))
            waiting = asyncio.ensure_future(take(b, 1))
            await asyncio.wait({waiting}, timeout=0.3)
            assert not waiting.done()
            a.release()
            assert (await waiting)[0].micro_batch == 1

    run(main())


def test_older_plans_are_ignored() -> None:
    async def main() -> None:
        network = Network()
        async with links(network, endpoint(0)) as a:
            a.update([endpoint(1, 2)], 5)
            a.update([endpoint(1, 1)], 4)
            assert a.plan == 5

    run(main())


def test_post_from_another_thread() -> None:
    async def main() -> None:
        async with pair(Network()) as (a, b):
            await asyncio.to_thread(lambda: [a.post(act(0, m, b"x")) for m in range(10)])
            assert [f.micro_batch for f in await take(b, 10)] == list(range(10))

    run(main())


@pytest.mark.parametrize("tick", [0, 3])
def test_a_done_frame_moves_every_cursor_to_the_next_tick(tick: int) -> None:
    async def main() -> None:
        async with pair(Network()) as (a, b):
            await a.send(act(tick, 0, b"x"))
            await take(b, 1)
            await b.send(Frame(Kind.DONE, 1, -1, 0, tick, 0, b""))
            assert b.cursors()[0].tick == tick + 1

    run(main())


def test_ticks_far_ahead_wait_in_their_channel_and_hold_up_nobody_else() -> None:
    """A replay sends a hundred ticks at once; a stage takes those that it can use, of every source."""

    async def main() -> None:
        network = Network()
        ends = endpoint(0), endpoint(1), endpoint(2)
        settings = ChannelSettings(beat_s=0.02, dead_s=5, ack_every_s=0.0, queue_bytes=20_000)
        came = asyncio.Event()
        async with (
            links(network, ends[0], settings=settings) as a,
            links(network, ends[2], settings=settings) as c,
            links(network, ends[1], settings=settings, notify=came.set) as b,
        ):
            for end in (a, b, c):
                end.update(ends, 1)
            for tick in range(100):
                await a.send(act(tick, 0, bytes(1000)))
            while b.held_bytes() <= settings.queue_bytes:
                came.clear()
                await came.wait()
            assert [_tick(b.get_nowait(3)) for _ in range(5)] == [0, 1, 2, 3, -1]
            assert b.held_bytes() < 60_000  # the rest is not even read
            await c.send(act(1, 0, b"", src=2))
            while (frame := b.get_nowait(3)) is None:
                came.clear()
                await came.wait()
            assert (frame.src, frame.tick) == (2, 1)
            assert [f.tick for f in await take(b, 96)] == list(range(4, 100))

    run(main())


def _tick(frame: Frame | None) -> int:
    return -1 if frame is None else frame.tick


def test_real_traffic_tells_how_fast_a_peer_takes_bytes() -> None:
    async def main() -> None:
        found: list[tuple[str, int, float]] = []
        rate = 2e6
        limiter = Limiter(rate, burst=1 << 12)
        async with pair(Network(), limiter=limiter, observed=lambda *spell: found.append(spell)) as (a, b):
            await a.send(act(0, 0, b"first"))  # the stream is up
            assert await take(b, 1)
            for m in range(1, 5):
                await a.send(act(0, m, bytes(200_000)))
            assert len(await take(b, 4)) == 4
            while not found:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ((peer, count, seconds),) = found
        assert peer == "peer1" and 800_000 <= count <= 800_005
        assert count / seconds < 1.3 * rate

    run(main())


def test_work_counts_when_its_tick_has_ended_and_was_trained_on() -> None:
    """Three micro-batches of an evaluation, two of a step, one of a step that has not ended."""

    async def main() -> None:
        ends = endpoint(TRAINER), endpoint(0), endpoint(1)
        network = Network()
        async with links(network, ends[0]) as t, links(network, ends[1]) as a, links(network, ends[2]) as b:
            for end in (t, a, b):
                end.update(ends, 1)
            for tick, training in ((0, False), (1, True), (2, True)):
                header = msgspec.msgpack.encode(StepHeader(training, 0, (1,) * 3))
                await t.send(Frame(Kind.STEP, TRAINER, 1, 0, tick, 0, header))
                for micro_batch in range(3 - tick):
                    await a.send(act(tick, micro_batch, b"x"))
            await take(b, 9)
            assert b.accepted({0: 7.0})[0].flops == 0
            for tick, flops in ((0, 0.0), (1, 14.0)):
                await b.send(Frame(Kind.DONE, 1, TRAINER, 0, tick, 0, b""))
                assert b.accepted({0: 7.0})[0].flops == flops

    run(main())

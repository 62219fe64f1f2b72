"""An outbox that is half full goes to disk, within its part of it, and comes back byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.channel import Inbox, Outbox
from peer.channel_io import ChannelSettings
from peer.link_ends import LinkEvent
from peer.spill import PREFIX, Spill
from peer.wire import Cursor
from tests.memory_transport import Network
from tests.unit.test_channel import RUN, connect, frame
from tests.unit.test_links import act, endpoint, links, run, take

SETTINGS = ChannelSettings(
    beat_s=0.02, dead_s=2.0, ack_every_s=0.0, log_bytes=4000, spill_bytes=40_000, unacked_bytes=2000
)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def test_what_is_kept_leaves_memory_is_read_back_and_goes_with_the_set(tmp_path: Path) -> None:
    async def main() -> None:
        network, spill = Network(), Spill(tmp_path, "cpu", 30_000)
        ends = endpoint(0), endpoint(1)
        sent = [act(tick, 0, bytes([tick]) * 1000) for tick in range(24)]
        async with links(network, ends[0], settings=SETTINGS, spill=spill, logged=lambda dst: True) as a:
            a.update(ends, 1)
            async with links(network, ends[1], settings=SETTINGS) as b:
                b.update(ends, 1)
                taking = asyncio.create_task(take(b, len(sent)))
                for f in sent:
                    await a.send(f)
                assert await taking == sent
            assert a.outbox_share() > 1 and files(tmp_path)
            for _ in range(500):  # the last ones are still on their way
                if a.held_bytes() <= 4000 and spill.used_bytes == sum(p.stat().st_size for p in files(tmp_path)):
                    break
                await asyncio.sleep(0.01)
            assert a.held_bytes() <= 4000 and 0 < spill.used_bytes <= 30_000
            again = endpoint(0), endpoint(1, 1)  # rebuilt from the set at tick 0
            async with links(network, again[1], settings=SETTINGS) as b:
                a.update(again, 2)
                b.update(again, 2)
                assert await take(b, len(sent)) == sent
            a.trim(20)
            assert a.outbox_share() == 1.0 and a.held_bytes() + spill.used_bytes >= 4000
            a.trim(24)
            # A thread may be writing still: its file goes once it is back.
            while files(tmp_path) or spill.used_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not files(tmp_path)

    run(main())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"?" * path.stat().st_size)])
def test_what_the_disk_has_lost_is_a_gap_of_the_sender_and_no_neighbours_fault(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async def main() -> None:
        network, spill, events = Network(), Spill(tmp_path, "cpu", 30_000), list[LinkEvent]()
        ends = endpoint(0), endpoint(1)
        sent = [act(tick, 0, bytes([tick]) * 1000) for tick in range(24)]
        async with links(network, ends[0], events, settings=SETTINGS, spill=spill, logged=lambda dst: True) as a:
            a.update(ends, 1)
            async with links(network, ends[1], settings=SETTINGS) as b:
                b.update(ends, 1)
                taking = asyncio.create_task(take(b, len(sent)))
                for f in sent:
                    await a.send(f)
                assert await taking == sent
            while not files(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for path in files(tmp_path):
                damage(path)
            again = endpoint(0), endpoint(1, 1)  # rebuilt from the set at tick 0
            other: list[LinkEvent] = []
            async with links(network, again[1], other, settings=SETTINGS) as b:
                a.update(again, 2)
                b.update(again, 2)
                while not any(e.code == "gap" for e in events):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert "kept on disk for stage 1 cannot be read" in next(e.reason for e in events if e.code == "gap")
            assert not [e for e in (*events, *other) if e.code in ("frame", "refused", "lost")]

    run(main())


def test_a_full_disk_leaves_what_memory_may_hold_until_the_next_set() -> None:
    class Stored:
        dropped = 0

        def read(self) -> bytes:
            return b"x"

        def drop(self) -> None:
            Stored.dropped += 1

    out = Outbox(RUN, 0, 1, 0, log_bytes=100, start=Cursor(0, 0), spill_bytes=1000)
    inbox = Inbox(RUN, 0, 1, 0, bound=lambda *_: 100, start=Cursor(0, 0))
    connect(out, inbox)
    for tick in range(10):
        out.push(frame(tick, 0, b"x" * 20))
        out.take(1)
    out.ack(Cursor(10, 0))
    first = out.spillable()
    assert [k.cursor.tick for k in first] == [0, 1]  # a quarter, rounded up
    out.spilled(first, [Stored(), Stored()])
    assert (out.held_bytes, out.disk_bytes, out.memory_bytes) == (200, 40, 160) and out.crowded
    out.disk_is_full()
    assert out.held_bytes == out.memory_bytes == 100 and not out.spillable() and not out.crowded
    assert Stored.dropped == 2
    out.trim(5)
    assert out.spillable()


def test_room_is_shared_and_given_back(tmp_path: Path) -> None:
    spill = Spill(tmp_path, "cpu", 100)
    first = spill.write([b"a" * 60, b"b" * 10])
    assert first is not None and spill.write([b"c" * 40]) is None
    assert [s.read() for s in first] == [b"a" * 60, b"b" * 10]
    first[0].drop()
    assert spill.write([b"c" * 40]) is None
    first[1].drop()
    again = spill.write([b"c" * 40])
    assert again is not None and again[0].read() == b"c" * 40
    files(tmp_path)[0].write_bytes(b"c")
    with pytest.raises(OSError, match="truncated: 1 of 40 bytes"):
        again[0].read()
    assert not files(tmp_path) or (Spill(tmp_path, "cpu", 100).used_bytes == 0 and not files(tmp_path))

"""Pipes between peers that nobody can dial: sealed end to end, joined at a host, resumed at another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dht import door
from dht.door import Door
from dht.errors import PeerUnreachable
from dht.identity import Identity
from dht.records import PeerRecord
from dht.transport import Stream
from peer import pipe_host, pipe_seal, pipes
from peer.blobs import BlobStore, fetch_blob, serve_blobs
from peer.channel_io import ChannelSettings
from peer.control_io import MessageStream
from peer.errors import BlobError
from peer.pipe_host import PIPE, PipeHost
from peer.pipe_seal import Handshake, Sealed, Sealer, Unreadable
from peer.pipe_service import pipe_hosts
from peer.pipes import Pipes, circuit, hosts_of
from peer.protocol import BLOBS, CONTROL, BlobRef, data_protocol
from peer.ratelimit import Limiter
from peer.selfdial import SelfDial
from tests.memory_transport import MemoryTransport, Network
from tests.simulated_time import simulate

SECRET = b"these are somebody's gradients " * 40


def key(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


def address(peer: str) -> str:
    return f"/ip4/192.0.2.1/tcp/1/p2p/{peer}"


class Peer:
    """A peer with its pipes; private unless `public`."""

    def __init__(self, network: Network, folder: Path, number: int, hosts: list[str], *, public: bool = False) -> None:
        self.identity = key(number)
        self.inner = network.transport(self.identity.peer_id)
        folder = folder / str(number)
        folder.mkdir()
        self.dial = SelfDial(self.inner, folder)

        async def find() -> list[str]:
            return hosts

        self.pipes = Pipes(self.inner, self.identity, folder, find=find, deliver=self.dial.local)
        if public:
            self.pipes.dialled_at = (address(self.identity.peer_id),)
        else:
            network.private.add(self.identity.peer_id)


async def echo(stream: Stream) -> None:
    stream.writer.write(stream.remote.encode())
    while data := await stream.reader.read(1 << 16):
        stream.writer.write(data)
        await stream.writer.drain()


class World:
    def __init__(self) -> None:
        self.network = Network()
        self.hosts: list[tuple[MemoryTransport, PipeHost]] = []
        self.peers: list[Peer] = []


@contextlib.asynccontextmanager
async def world(folder: Path, *, hosts: int = 1, public: bool = False) -> AsyncIterator[World]:
    """Two peers, the first may be public, the second rests at all hosts and serves BLOBS and CONTROL as echoes."""
    w = World()
    for number in range(hosts):
        transport = w.network.transport(key(100 + number).peer_id)
        host = PipeHost(transport, 1e9)
        await host.start()
        w.hosts.append((transport, host))
    offered = [address(t.peer_id) for t, _ in w.hosts]
    w.peers = [Peer(w.network, folder, 1, offered, public=public), Peer(w.network, folder, 2, offered)]
    for peer in w.peers:
        await peer.pipes.start()
    caller, called = w.peers
    called.pipes.rest()
    assert await called.pipes.until_rested(5)
    while len(called.pipes.addresses()) < hosts:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for protocol in (BLOBS, CONTROL):
        await called.dial.serve(protocol, echo)
    await caller.dial.connect(called.dial.peer_id, called.pipes.addresses())
    try:
        yield w
    finally:
        for peer in w.peers:
            await peer.pipes.close()
            await peer.dial.close()
        for transport, _ in w.hosts:
            await transport.close()


async def exchange(stream: Stream, remote: str, data: bytes) -> None:
    async with asyncio.timeout(120):
        assert (await stream.reader.readexactly(len(remote))).decode() == remote
        stream.writer.write(data)
        await stream.writer.drain()
        assert await stream.reader.readexactly(len(data)) == data
    stream.writer.close()


@pytest.mark.parametrize("protocol", [BLOBS, CONTROL])
def test_two_private_peers_exchange_bytes_that_the_host_cannot_read(tmp_path: Path, protocol: str) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            stream = await caller.dial.open_stream(called.dial.peer_id, protocol)
            assert stream.remote == called.dial.peer_id
            await exchange(stream, caller.dial.peer_id, SECRET * 1000)
            assert SECRET not in w.network.wire
            carried = w.hosts[0][1].carried
            assert len(SECRET) * 1000 < carried[caller.dial.peer_id] < 1.01 * len(SECRET) * 1000 + 1000

    simulate(main())


def test_a_snapshot_of_a_holder_that_nobody_can_dial_comes_through_a_pipe_by_what_its_ref_says(tmp_path: Path) -> None:
    """As an executor has it from a stage's offer: no other process's knowledge of addresses, no connection so far."""

    async def main() -> None:
        async with world(tmp_path) as w:
            fetcher, holder = w.peers
            kept, fetched = BlobStore(tmp_path / "kept"), BlobStore(tmp_path / "fetched")
            blob, size = kept.put([SECRET * 1000])
            await holder.dial.stop_serving(BLOBS)
            await serve_blobs(
                holder.dial, kept, lambda peer, run, blob: True, limiter=Limiter(None), settings=ChannelSettings()
            )
            where = {holder.dial.peer_id: (address(holder.dial.peer_id), *holder.pipes.addresses())}
            executor = SelfDial(fetcher.inner, fetcher.dial.folder)
            with pytest.raises(BlobError, match="could not be fetched"):
                ref = BlobRef(blob, size, (holder.dial.peer_id,))
                await fetch_blob(executor, fetched, "r", ref, max_bytes=size)
            ref = BlobRef(blob, size, (holder.dial.peer_id,), where)
            path = await fetch_blob(executor, fetched, "r", ref, max_bytes=size)
            assert path.read_bytes() == SECRET * 1000
            assert SECRET not in w.network.wire
            fetched.delete(blob)
            await fetch_blob(executor, fetched, "r", BlobRef(blob, size, ref.holders), max_bytes=size)  # still known

    simulate(main())


def test_a_caller_that_can_be_dialled_is_dialled_and_nothing_is_piped(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, public=True) as w:
            caller, called = w.peers
            stream = await caller.dial.open_stream(called.dial.peer_id, CONTROL)
            async with asyncio.timeout(120):
                assert (await stream.reader.readexactly(52)).decode() == caller.dial.peer_id
            stream.writer.close()
            assert w.hosts[0][1].carried.total() == 0
            assert frozenset((caller.dial.peer_id, called.dial.peer_id)) in w.network.linked

    simulate(main())


def test_a_pipe_stays_while_one_end_only_listens_and_goes_once_both_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe_host, "IDLE_S", 0.2)

    async def tell(stream: Stream) -> None:
        for _ in range(8):
            stream.writer.write(b"snapshot")
            await asyncio.sleep(0.1)
        await stream.reader.read()

    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            await called.dial.stop_serving(BLOBS)
            await called.dial.serve(BLOBS, tell)
            stream = await caller.dial.open_stream(called.dial.peer_id, BLOBS)
            async with asyncio.timeout(120):
                assert await stream.reader.read(-1) == b"snapshot" * 8
            stream.writer.close()

    simulate(main())


def test_tensor_streams_can_be_called_back_and_others_stay(tmp_path: Path) -> None:
    """As they are once there is a direct connection: whoever wrote to them opens others."""

    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            there = called.dial.peer_id
            await called.dial.serve(data_protocol("x"), echo)
            assert not caller.pipes.talking
            tensors = await caller.dial.open_stream(there, data_protocol("x"))
            control = await caller.dial.open_stream(there, CONTROL)
            async with asyncio.timeout(60):
                for stream in (tensors, control):
                    assert await stream.reader.readexactly(len(caller.dial.peer_id))
                assert caller.pipes.talking == {there} and called.pipes.talking == {caller.dial.peer_id}
                assert called.pipes.end_calls(caller.dial.peer_id) == 0  # it opened none
                assert caller.pipes.end_calls(there) == 1
                assert await tensors.reader.read(1) == b""
            control.writer.write(b"still here")
            async with asyncio.timeout(60):
                assert await control.reader.readexactly(10) == b"still here"
            control.writer.close()
            async with asyncio.timeout(60):
                while caller.pipes.talking or called.pipes.talking:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    simulate(main())


def test_a_stream_ends_with_its_host_and_the_next_goes_by_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, hosts=2) as w:
            caller, called = w.peers
            stream = await caller.dial.open_stream(called.dial.peer_id, BLOBS)
            stream.writer.write(b"x")
            async with asyncio.timeout(120):
                await stream.reader.readexactly(53)
            (used,) = [t for t, host in w.hosts if host.pipes]
            w.network.dead.add(used.peer_id)
            w.network.cut(used.peer_id)
            async with asyncio.timeout(120):
                assert await stream.reader.read() == b""
            stream = await caller.dial.open_stream(called.dial.peer_id, BLOBS)
            await exchange(stream, caller.dial.peer_id, SECRET)
            assert all(used.peer_id not in a for a in called.pipes.addresses())

    simulate(main())


def test_a_host_that_does_not_answer_is_asked_last_from_then_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, hosts=2) as w:
            caller, called = w.peers
            first = hosts_of(called.pipes.addresses())[0]
            (frozen, handle), (other, _) = sorted(
                ((t, host.handle) for t, host in w.hosts), key=lambda pair: not first.endswith(pair[0].peer_id)
            )
            asked = 0

            async def silent(stream: Stream) -> None:
                nonlocal asked
                asked += 1
                await asyncio.Event().wait()

            await frozen.serve(PIPE, silent)
            took: list[float] = []
            for _ in range(3):
                start = asyncio.get_running_loop().time()
                stream = await caller.dial.open_stream(called.dial.peer_id, BLOBS, timeout_s=60)
                took.append(asyncio.get_running_loop().time() - start)
                await exchange(stream, caller.dial.peer_id, SECRET)
            assert asked == 1
            assert took[0] >= pipe_host.RING_S > 10 * max(took[1:])
            w.network.dead.add(other.peer_id)  # and one that cannot be dialled comes after one that fell silent once
            await frozen.serve(PIPE, handle)
            for _ in range(2):
                stream = await caller.dial.open_stream(called.dial.peer_id, BLOBS, timeout_s=60)
                await exchange(stream, caller.dial.peer_id, SECRET)
            assert caller.pipes._silent == {other.peer_id: 1}

    simulate(main())


def test_a_stream_whose_asker_has_gone_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits no longer than the called peer takes to answer."""

    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            call = caller.pipes._call
            closed: list[Sealed] = []
            done = asyncio.Event()

            async def late(wanted: pipes.Through) -> Any:
                found = await call(wanted)
                assert isinstance(found, Sealed)
                monkeypatch.setattr(found, "close", lambda: (closed.append(found), done.set()))
                await asyncio.sleep(30)
                return found

            monkeypatch.setattr(caller.pipes, "_call", late)
            with pytest.raises(PeerUnreachable, match="its pipes do not answer"):
                await caller.dial.open_stream(called.dial.peer_id, BLOBS, timeout_s=10)
            async with asyncio.timeout(120):
                await done.wait()
            assert len(closed) == 1

    simulate(main())


def test_a_host_that_answers_itself_is_found_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            mallory = key(66)

            async def pose(stream: Stream) -> None:
                talk = MessageStream(stream.reader, stream.writer, pipe_host._DECODER, limit=4096)
                await talk.receive(timeout_s=60)
                await talk.send(pipe_host.Joined(), timeout_s=60)
                await pipe_seal.answer(stream, mallory, caller.dial.peer_id)

            await w.hosts[0][0].serve(PIPE, pose)
            with pytest.raises(PeerUnreachable, match="whoever answers in the pipe is not peer"):
                await caller.dial.open_stream(called.dial.peer_id, BLOBS)

    simulate(main())


def test_two_private_peers_without_a_host_are_told_in_plain_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            w.hosts[0][1]._refuses = lambda: "12.0 of 12.0 GB (--monthly-gb) passed this month"
            with pytest.raises(PeerUnreachable, match=r"need a public one that offers a pipe.*--relay-mbps.*12\.0 GB"):
                await caller.dial.open_stream(called.dial.peer_id, BLOBS)
            w.hosts[0][1]._refuses = lambda: ""
            w.hosts[0][1]._open[caller.dial.peer_id] = pipe_host.MAX_PER_PEER
            with pytest.raises(PeerUnreachable, match="has 16 pipes here"):
                await caller.dial.open_stream(called.dial.peer_id, BLOBS)

    simulate(main())


def test_hosts_that_are_none_stand_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full or malformed ones come first: the third is found at the next look, and called by way of."""
    monkeypatch.setattr(pipes, "LOOK_S", 0.05)
    monkeypatch.setattr(pipe_host, "MAX_RESTING", 1)

    async def main() -> None:
        async with world(tmp_path) as w:
            full = address(w.hosts[0][0].peer_id)
            transport = w.network.transport(key(110).peer_id)
            await PipeHost(transport, 1e9).start()
            third = Peer(
                w.network, tmp_path, 3, ["nonsense", full, "/ip4/300.0.0.1/tcp/1/p2p/x", address(key(110).peer_id)]
            )
            await third.pipes.start()
            third.pipes.rest()
            await third.dial.serve(BLOBS, echo)
            assert await third.pipes.until_rested(10)
            assert third.pipes.addresses() == (circuit(address(key(110).peer_id), third.dial.peer_id),)
            caller = w.peers[0]
            known = ("nonsense/p2p-circuit/x", f"/ip4/300.0.0.1/tcp/1/p2p/x/p2p-circuit/p2p/{third.dial.peer_id}")
            await caller.dial.connect(third.dial.peer_id, (*known, *third.pipes.addresses()))
            await exchange(await caller.dial.open_stream(third.dial.peer_id, BLOBS), caller.dial.peer_id, SECRET)
            await third.pipes.close()
            await third.dial.close()
            await transport.close()

    simulate(main())


def test_who_is_banned_does_not_come_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_host, "RING_S", 0.2)

    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            called.pipes._gate = Door(called.dial.peer_id, banned=frozenset({caller.dial.peer_id}))
            with pytest.raises(PeerUnreachable, match="does not answer"):
                await caller.dial.open_stream(called.dial.peer_id, BLOBS)

    simulate(main())


def test_who_comes_through_pipes_has_no_more_streams_than_who_dials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_STREAMS_PER_PEER", 2)

    async def main() -> None:
        async with world(tmp_path) as w:
            caller, called = w.peers
            streams = [await caller.dial.open_stream(called.dial.peer_id, BLOBS) for _ in range(3)]
            remote = len(caller.dial.peer_id)
            for stream in streams[:2]:
                assert await stream.reader.readexactly(remote) == caller.dial.peer_id.encode()
            assert await streams[2].reader.read() == b""
            streams[0].writer.close()
            while called.pipes._gate._per_peer[caller.dial.peer_id] == 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await exchange(await caller.dial.open_stream(called.dial.peer_id, BLOBS), caller.dial.peer_id, SECRET)

    simulate(main())


def test_one_address_range_does_not_crowd_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 seats four go to one range however many identities it makes up; when all are taken a newcomer gets one of
    the fullest range; pipes alike."""
    monkeypatch.setattr(pipe_host, "MAX_RESTING", 16)
    monkeypatch.setattr(pipe_host, "RESTING_PER_RANGE", 4)
    monkeypatch.setattr(pipe_host, "PIPES_PER_RANGE", 2)
    network, ranges = Network(), dict[str, str]()

    async def range_of(peer: str) -> str:
        return ranges[peer]

    async def main() -> None:
        transport = network.transport(key(100).peer_id)
        host = PipeHost(transport, 1e9, range_of=range_of)
        await host.start()

        async def ask(number: int, place: str, message: pipe_host.ToHost) -> object:
            me = network.transport(key(number).peer_id)
            ranges[me.peer_id] = place
            stream = await me.open_stream(transport.peer_id, PIPE)
            talk = MessageStream(stream.reader, stream.writer, pipes._FROM_HOST, limit=4096)
            await talk.send(message, timeout_s=60)
            answer = await talk.receive(timeout_s=60)
            return "" if isinstance(answer, pipe_host.Alive) else answer

        crowd = [await ask(n, "203.0.113.0/24", pipe_host.Rest()) for n in range(1, 8)]
        assert crowd[:4] == [""] * 4
        assert crowd[4:] == [pipe_host.Refuse("4 peers of 203.0.113.0/24 rest here")] * 3
        for n in range(12):
            assert await ask(20 + n, f"198.51.{n // 2}.0/24", pipe_host.Rest()) == ""
        assert host.resting == 16
        assert await ask(50, "192.0.2.0/24", pipe_host.Rest()) == ""
        assert host.resting == 16 and sum(s.range == "203.0.113.0/24" for s in host._resting.values()) == 3
        host._open_from["192.0.2.0/24"] = 2
        refused = await ask(60, "198.18.0.0/24", pipe_host.Call(key(50).peer_id))
        assert refused == pipe_host.Refuse("192.0.2.0/24 have 2 pipes here")
        await transport.close()

    simulate(main())


def test_the_largest_promise_is_not_asked_first_by_all() -> None:
    def record(number: int, mbps: float) -> PeerRecord:
        peer = key(number).peer_id
        return PeerRecord(
            peer=peer, version="1", devices=(), addresses=(address(peer),), reach="direct", relay_mbps=mbps
        )

    known = [record(k, 1e6 if k == 1 else 200.0) for k in range(1, 9)]
    firsts = {pipe_hosts(known, key(k).peer_id)[0] for k in range(50, 90)}
    assert len(firsts) > 4
    assert pipe_hosts([record(1, 5.0), record(2, 50.0)], "me")[0] == address(key(2).peer_id)


def test_a_stranger_cannot_answer_a_ring(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            host, other = w.hosts[0][1], w.network.transport(key(9).peer_id)
            future: asyncio.Future[Stream | None] = asyncio.get_running_loop().create_future()
            host._waiting[bytes(16)] = pipe_host._Waiting(w.peers[1].dial.peer_id, future)
            stream = await other.open_stream(w.hosts[0][0].peer_id, PIPE)
            talk = MessageStream(stream.reader, stream.writer, pipe_host._DECODER, limit=4096)
            await talk.send(pipe_host.Answer(bytes(16)), timeout_s=60)
            async with asyncio.timeout(120):
                assert await stream.reader.read() == b""
            assert not future.done()

    simulate(main())


# --- the seal


def shaken() -> tuple[Handshake, Handshake]:
    a, b = Handshake(key(1), key(2).peer_id, calling=True), Handshake(key(2), key(1).peer_id, calling=False)
    a.hear(b.mine)
    b.hear(a.mine)
    return a, b


def test_both_ends_have_the_same_two_keys() -> None:
    a, b = shaken()
    b.check(a.signature())
    a.check(b.signature())
    assert a.keys() == b.keys()[::-1]
    assert a.keys()[0] != a.keys()[1]
    assert shaken()[0].keys() != a.keys()


def test_a_signature_of_another_exchange_role_or_peer_is_refused() -> None:
    a, b = shaken()
    other, _ = shaken()
    for wrong in (other.signature(), a.signature()[::-1], b.signature(), b"", bytes(64)):
        with pytest.raises(Unreadable):
            b.check(wrong)
    with pytest.raises(Unreadable):
        a.check(a.signature())  # sent back


def test_a_key_of_small_order_is_refused() -> None:
    a, _ = shaken()
    a.hear(bytes(32))
    with pytest.raises(Unreadable):
        a.keys()


def test_records_open_once_in_order_and_unchanged() -> None:
    sealer = Sealer(bytes(32))
    records = [sealer.seal(bytes([i]) * 5) for i in range(3)]
    assert len({r[4:] for r in (Sealer(bytes(32)).seal(b"same"), sealer.seal(b"same"))}) == 2
    opener = Sealer(bytes(32))
    assert opener.open(records[0][:4], records[0][4:]) == bytes(5)
    for bad in (records[0], records[2], records[1][:-1] + b"\0", records[1][:10]):
        with pytest.raises(Unreadable):
            Sealer(bytes(32)).open(bad[:4], bad[4:]) if bad is not records[0] else opener.open(bad[:4], bad[4:])


def test_addresses_by_way_of_a_host() -> None:
    host, me = address(key(100).peer_id), key(1).peer_id
    assert hosts_of((address(me), circuit(host, me), circuit(host, me))) == (host,)
    assert hosts_of((address(me), "nonsense")) == ()

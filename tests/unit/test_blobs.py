"""Blobs over an in-memory transport: authorisation, resume, several holders, verification, bounds."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from dht.errors import InputError
from peer import blobs
from peer.blobs import Authorise, BlobStore, fetch_blob, serve_blobs
from peer.channel_io import ChannelSettings
from peer.errors import BlobError, DiskFull
from peer.protocol import BLOBS, BlobRef
from peer.ratelimit import Bucket, Limiter
from tests.memory_transport import MemoryTransport, Network
from tests.simulated_time import simulate

FAST = ChannelSettings(beat_s=0.05, dead_s=0.3, backoff_max_s=0.01)
DATA = os.urandom(1 << 20)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await coroutine

    simulate(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (each turn of the loop lets the transfer go on)
        await asyncio.sleep(0)


async def holder(network: Network, name: str, folder: Path, allow: Authorise | None = None) -> BlobStore:
    store = BlobStore(folder / name)
    await serve_blobs(
        network.transport(name), store, allow or (lambda peer, run, blob: True), limiter=Limiter(None), settings=FAST
    )
    return store


async def fetch(
    network: Network, ref: BlobRef, folder: Path, name: str = "me", max_bytes: int = 1 << 24
) -> tuple[BlobStore, Path]:
    store, transport = BlobStore(folder / name), network.transport(name)
    return store, await fetch_blob(transport, store, "r", ref, max_bytes=max_bytes, settings=FAST)


def test_a_holder_with_an_address_that_is_none_stands_in_nobodys_way(tmp_path: Path) -> None:
    """What a peer publishes as its address reaches others in a ref."""

    async def main() -> None:
        network = Network()
        blob, size = (await holder(network, "h", tmp_path)).put([DATA])
        transport, store = network.transport("me"), BlobStore(tmp_path / "me")
        connect, asked = transport.connect, list[str]()

        async def parsing(peer: str, addresses: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
            asked.append(peer)
            if peer != "h":
                raise InputError(f"{addresses[0]!r} is no address")
            await connect(peer, addresses, timeout_s=timeout_s)

        transport.connect = parsing  # type: ignore[method-assign]
        liars = tuple(f"liar{k}" for k in range(8))
        ref = BlobRef(blob, size, (*liars, "h"), dict.fromkeys(liars, ("nonsense",)))
        path = await fetch_blob(transport, store, "r", ref, max_bytes=size, settings=FAST)
        assert path.read_bytes() == DATA
        assert asked[-1] == "h" and len(asked) > 1

    run(main())


def test_a_blob_is_fetched_verified_and_kept(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put([DATA[:1000], DATA[1000:]]), holders=("h",))
        assert ref.hash == hashlib.blake2b(DATA, digest_size=32).hexdigest()
        store, path = await fetch(network, ref, tmp_path)
        assert path.read_bytes() == DATA == store.get(ref)
        assert store.hashes() == {ref.hash}
        assert path.stat().st_mode & 0o077 == 0

    run(main())


def test_a_fetch_goes_on_at_another_holder_where_the_first_broke_off(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        for name in ("a", "b"):
            ref = BlobRef(*(await holder(network, name, tmp_path)).put(DATA), holders=("a", "b"))
        fetching = asyncio.ensure_future(fetch(network, ref, tmp_path))
        await until(lambda: sum(p.bytes for p in network.pipes) >= len(DATA) // 2)
        (pipe,) = network.pipes
        first = pipe.bytes
        network.dead.add(pipe.acceptor)
        network.cut(pipe.acceptor)
        await until(lambda: bool(network.pipes))
        (second,) = network.pipes
        assert second.acceptor != pipe.acceptor
        await fetching
        assert first + second.bytes < len(DATA) * 1.5

    run(main())


def test_a_lying_holder_costs_only_time(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        good, bad = await holder(network, "good", tmp_path), await holder(network, "bad", tmp_path)
        ref = BlobRef(*good.put(DATA), holders=("bad", "good"))
        bad.path(ref.hash).write_bytes(bytes(len(DATA)))
        _, path = await fetch(network, ref, tmp_path, "trusting")  # whose own order of holders begins with the bad one
        assert path.read_bytes() == DATA and network.opened == 2
        with pytest.raises(BlobError, match="bad: its bytes do not match the hash"):
            await fetch(network, BlobRef(ref.hash, ref.size, ("bad",)), tmp_path, "other")
        assert not list((tmp_path / "other").iterdir())

    run(main())


def test_only_peers_that_are_named_are_served(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        asked: list[tuple[str, str, str]] = []

        def allow(peer: str, run: str, blob: str) -> bool:
            asked.append((peer, run, blob))
            return False

        store = await holder(network, "h", tmp_path, allow)
        ref = BlobRef(*store.put(b"secret"), holders=("h",))
        with pytest.raises(BlobError, match="no such blob for you"):
            await fetch(network, ref, tmp_path)
        assert asked[0] == ("me", "r", ref.hash)

    run(main())


def test_sizes_are_bounded_before_anything_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put(DATA), holders=("h",))
        with pytest.raises(BlobError, match="at most 1000"):
            await fetch(network, ref, tmp_path, max_bytes=1000)
        with pytest.raises(BlobError, match="expected 7"):
            await fetch(network, BlobRef(ref.hash, 7, ("h",)), tmp_path)
        assert network.opened == 3  # one holder, asked in each round of the second fetch only

    run(main())


def test_a_silent_holder_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        silent: MemoryTransport = network.transport("silent")

        asked: list[str] = []

        async def handle(stream: Any) -> None:
            asked.append(stream.remote)
            await asyncio.Event().wait()

        await silent.serve(BLOBS, handle)
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put(DATA), holders=("silent", "h"))
        await fetch(network, ref, tmp_path, "hopeful")  # whose own order of holders begins with the silent one
        assert asked == ["hopeful"]

    run(main())


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_only_hashes_name_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(BlobError):
        BlobStore(tmp_path).path(name)


def test_the_upload_cap_is_an_average_with_a_bounded_burst() -> None:
    bucket = Bucket(1000.0, burst=500, now=0.0)
    now, sent = 0.0, 0
    for _ in range(100):
        now += bucket.delay(100, now)
        sent += 100
    assert sent <= 500 + 1000 * now + 1e-6
    assert now == pytest.approx((sent - 500) / 1000)
    assert bucket.delay(500, now + 100) == 0.0
    assert bucket.delay(100, now + 100) > 0.0


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_cap_on_the_disk_is_never_passed(tmp_path: Path) -> None:
    """By what is written here nor by what is fetched, other processes' files in the folder counted; nothing is left of
    what did not fit."""

    async def main() -> None:
        network = Network()
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put(DATA), holders=("h",))
        store = BlobStore(tmp_path / "capped", len(DATA) + 1000)
        (tmp_path / "capped" / "of another process").write_bytes(bytes(500))
        pieces = [b"x" * 1000] * (len(DATA) // 1000 + 2)
        with pytest.raises(DiskFull, match=r"within --disk: .* raise --disk"):
            store.put(pieces)
        assert held(tmp_path / "capped") == 500
        await fetch_blob(network.transport("me"), store, "r", ref, max_bytes=1 << 24, settings=FAST)
        assert held(tmp_path / "capped") == len(DATA) + 500
        other = BlobRef(*BlobStore(tmp_path / "h").put(bytes(501)), holders=("h",))
        with pytest.raises(DiskFull, match="--disk"):
            await fetch_blob(network.transport("me"), store, "r", other, max_bytes=1 << 24, settings=FAST)
        assert held(tmp_path / "capped") == len(DATA) + 500

    run(main())


def test_a_full_disk_ends_a_fetch_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "_append_to", lambda part: (open("/dev/full", "ab", buffering=0), 0))  # noqa: SIM115

    async def main() -> None:
        network = Network()
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put(DATA), holders=("h", "h"))
        with pytest.raises(DiskFull, match=f"no space left on the disk of {tmp_path / 'me'}"):
            await fetch(network, ref, tmp_path)

    run(main())


def test_one_peer_gets_so_many_streams_and_another_still_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_SERVED_PER_PEER", 1)

    async def main() -> None:
        network = Network()
        ref = BlobRef(*(await holder(network, "h", tmp_path)).put(DATA), holders=("h",))
        greedy = await network.transport("greedy").open_stream("h", BLOBS, timeout_s=1.0)
        await asyncio.sleep(0)
        with pytest.raises(BlobError, match="busy"):
            await fetch(network, ref, tmp_path, "greedy")
        _, path = await fetch(network, ref, tmp_path, "modest")
        assert path.read_bytes() == DATA
        greedy.writer.close()

    run(main())


def test_six_fetch_from_three_of_which_one_dies_at_half(tmp_path: Path) -> None:
    """Whoever loses its holder takes up where it broke off; nobody sends faster than its cap."""
    rate, burst = 3e6, 64 << 10

    class Counting(Limiter):
        passed = 0

        async def take(self, count: int) -> None:
            await super().take(count)
            self.passed += count

    async def main() -> None:
        network, names = Network(), ("h0", "h1", "h2")
        limiters = {name: Counting(rate, burst=burst) for name in names}
        for name in names:
            store = BlobStore(tmp_path / name)
            blob, size = store.put(DATA)
            await serve_blobs(network.transport(name), store, lambda *_: True, limiter=limiters[name], settings=FAST)
        begin = asyncio.get_running_loop().time()
        ref = BlobRef(blob, size, names)
        tasks = [asyncio.create_task(fetch(network, ref, tmp_path, f"joiner{k}")) for k in range(6)]
        await until(lambda: sum(limiter.passed for limiter in limiters.values()) > 3 * size)
        victim = max(names, key=lambda name: limiters[name].passed)
        network.dead.add(victim)
        await network.peers[victim].close()
        for store, path in await asyncio.gather(*tasks):
            assert path.read_bytes() == DATA and store.hashes() == {blob}
        elapsed = asyncio.get_running_loop().time() - begin
        assert all(limiter.passed <= rate * elapsed + burst + (1 << 17) for limiter in limiters.values())
        assert sum(limiter.passed for limiter in limiters.values()) < 6 * size + 6 * (256 << 10) + (1 << 16)
        assert sum(limiter.passed > size for limiter in limiters.values()) >= 2  # they share the work

    run(main())

"""What a volunteer keeps for others: within its share of the disk, for the named only, until the next sets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from peer.blobs import BlobStore, serve_blobs
from peer.buddy import Buddy
from peer.channel_io import ChannelSettings
from peer.protocol import BlobRef, Keep
from peer.ratelimit import Limiter
from tests.memory_transport import Network
from tests.unit.test_links import run

SETTINGS = ChannelSettings(beat_s=0.05, dead_s=2.0, open_s=0.5, backoff_max_s=0.05)


class _Usage(NamedTuple):
    free: int


class Scene:
    """A holder that serves everybody, and a buddy; `disk_bytes` are free when nothing is kept."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, disk_bytes: int = 1 << 20) -> None:
        self.network = Network()
        self.theirs, self.ours = BlobStore(root / "theirs"), BlobStore(root / "ours")
        self.buddy = Buddy(self.network.transport("buddy"), self.ours, root / "ours", SETTINGS)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(disk_bytes - self.ours.size_bytes()))

    async def start(self) -> None:
        served = self.network.transport("host")
        await serve_blobs(served, self.theirs, lambda *_: True, limiter=Limiter(None), settings=SETTINGS)

    async def keep(self, stage: int, tick: int, data: bytes, run: str = "r") -> str:
        """Why it is not kept, "" if it is."""
        blob, size = self.theirs.put(data)
        message = Keep(run=run, stage=stage, tick=tick, state=BlobRef(blob, size, ("host",)), readers=("reader",))
        return (await self.buddy.keep(message, "trainer")).reason


def test_the_newest_sets_are_kept_for_the_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        await scene.start()
        for tick in range(4):
            assert await scene.keep(0, tick, bytes([tick])) == ""
        newest, gone = scene.theirs.put(bytes([3]))[0], scene.theirs.put(bytes([1]))[0]
        assert len(scene.ours.hashes()) == 2 and not scene.ours.has(gone)
        assert all(scene.buddy.may_fetch(peer, "r", newest) for peer in ("reader", "trainer"))
        assert not scene.buddy.may_fetch("stranger", "r", newest)
        assert not scene.buddy.may_fetch("reader", "another run", newest)
        scene.buddy.drop_run("r")
        assert not scene.ours.hashes()

    run(main())


def test_what_another_keeps_by_now_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage that it is asked for no more: two sets later it has nothing, and so has one that is only told."""

    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        await scene.start()
        await scene.keep(0, 10, b"a")
        await scene.keep(0, 20, b"b")
        await scene.keep(1, 20, b"c")
        assert len(scene.ours.hashes()) == 3
        await scene.keep(1, 30, b"d")
        assert len(scene.ours.hashes()) == 3 and not scene.ours.has(scene.theirs.put(b"a")[0])
        scene.buddy.complete("another", 40)
        scene.buddy.complete("r", 40)
        assert scene.ours.hashes() == {scene.theirs.put(b"d")[0]}
        await scene.keep(0, 20, b"b")  # the run went back to an older set
        assert scene.ours.hashes() == {scene.theirs.put(b"b")[0]}
        scene.buddy.complete("r", 50)
        scene.buddy.complete("r", 60)
        assert not scene.ours.hashes() and not scene.buddy.keeps_for("r")

    run(main())


def test_all_that_is_kept_stays_within_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch, disk_bytes=40_000)
        await scene.start()
        said = [await scene.keep(stage, 0, bytes([stage]) * 3000, run=f"run {stage}") for stage in range(8)]
        assert said[:3] == [""] * 3 and all("no room for 3000 bytes" in reason for reason in said[3:])
        assert scene.ours.size_bytes() == 9000

    run(main())


@pytest.mark.parametrize("ref", [BlobRef("../x", 1, ("host",)), BlobRef("0" * 64, -5, ("host",))])
def test_what_is_no_blob_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: BlobRef) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        kept = await scene.buddy.keep(Keep(run="r", stage=0, tick=0, state=ref, readers=()), "trainer")
        assert kept.reason and scene.network.opened == 0

    run(main())


def test_bytes_that_a_hosted_stage_has_too_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        await scene.start()
        blob = scene.theirs.put(b"the same")[0]
        scene.buddy.others_want = lambda wanted: wanted == blob
        for tick in range(4):
            assert await scene.keep(0, tick, b"the same" if tick == 0 else bytes([tick])) == ""
        scene.buddy.drop_run("r")
        assert scene.ours.hashes() == {blob}

    run(main())

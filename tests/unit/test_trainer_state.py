"""The run folder: what is written is read back; what is damaged or foreign is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry, Numerics
from fusion_p2p.settings import OptimizerSpec
from peer import trainer_ladder
from peer.errors import BlobError
from peer.protocol import RunSpec, Signed
from peer.trainer_state import Audited, Manifest, Progress, RunFolder, StageFile

NUMERICS = Numerics(cuts=(3,), micro_batches=2, micro_batch_size=4)
OPDAG = b'{"opset":"1"}'


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def signed(body: msgspec.Struct) -> Signed:
    return Signed(body=msgspec.msgpack.encode(body), key=bytes(32), signature=bytes(64))


def new_folder(path: Path, run: str = "ab" * 16) -> RunFolder:
    folder = RunFolder(path)
    spec = RunSpec(
        run=run,
        name="n",
        owner=bytes(32),
        opdag_hash=digest(OPDAG),
        seed=1,
        optimizer=OptimizerSpec(kind="sgd", lr=0.1),
        created=1.0,
    )
    folder.create(signed(spec), OPDAG)
    return folder


def save(folder: RunFolder, tick: int, *, run: str = "ab" * 16) -> Manifest:
    data = {0: b"zero%d" % tick, 1: b"one" * tick}
    manifest = Manifest(
        run=run,
        opdag_hash=digest(OPDAG),
        tick=tick,
        step=tick,
        epoch=1,
        numerics=NUMERICS,
        stages=tuple(StageFile(stage=k, hash=digest(d), size=len(d)) for k, d in data.items()),
        data_state=b"\x00position",
    )
    for snapshot in data.values():
        folder.blobs.put(snapshot)
    folder.save_set(manifest)
    return manifest


def test_a_run_folder_is_read_back(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    assert folder.spec()[1].name == "n"
    assert folder.opdag() == OPDAG
    for first in (0, 7):
        folder.append_numerics(signed(NumericLogEntry(first_step=first, numerics=NUMERICS)))
    assert [e.first_step for _, e in folder.numeric_log()] == [0, 7]
    folder.write_progress(Progress(name="n", run="r", phase="training", epoch=1, tick=3, step=3, loss=1.5))
    assert folder.progress().loss == 1.5


def test_a_start_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Not the codecs' figures of another model either."""
    folder = new_folder(tmp_path / "run")
    folder.append_numerics(signed(NumericLogEntry(first_step=0, numerics=NUMERICS)))
    folder.append_audit([Audited(0, 1.5, {})])
    (folder.root / trainer_ladder.FILE).write_text("[]")
    folder.forget_start()
    assert not list(folder.root.iterdir())


def test_two_newest_sets_are_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    manifests = [save(folder, tick) for tick in (4, 8, 100)]
    assert folder.sets() == [8, 100]
    assert folder.manifest() == manifests[-1]
    assert folder.manifest(8) == manifests[1]
    assert folder.snapshots(folder.manifest(8)) == {0: b"zero8", 1: b"one" * 8}
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]


def test_blobs_of_forgotten_sets_go(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for tick in (1, 2, 3):
        save(folder, tick)
    assert folder.blobs.hashes() == {e.hash for tick in (2, 3) for e in folder.manifest(tick).stages}


def test_damage_is_named(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    manifest = save(folder, 4)
    path = folder.blobs.path(manifest.stages[1].hash)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"stage 1\) is truncated: 11 of 12 bytes"):
        folder.snapshots(manifest)
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(InputError, match=r"stage 1\) is damaged"):
        folder.snapshots(manifest)
    path.unlink()
    with pytest.raises(InputError, match=r"stage 1\) cannot be read"):
        folder.snapshots(manifest)
    (tmp_path / "opdag.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="another run"):
        folder.opdag()


def test_a_set_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    save(folder, 4, run="cd" * 16)
    with pytest.raises(InputError, match="belongs to run cdcd"):
        folder.manifest()


def test_a_set_without_its_blobs_is_none(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    manifest = save(folder, 4)
    folder.blobs.delete(manifest.stages[0].hash)
    with pytest.raises(BlobError, match="stage 0's snapshot at tick 5"):
        folder.save_set(msgspec.structs.replace(manifest, tick=5))
    assert folder.sets() == [4]


def test_a_spec_is_immutable(tmp_path: Path) -> None:
    new_folder(tmp_path)
    with pytest.raises(InputError, match="fusion-run resume"):
        new_folder(tmp_path)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no spec\.json"):
        RunFolder(tmp_path).spec()
    with pytest.raises(InputError, match="no complete set"):
        RunFolder(tmp_path).manifest()


def test_a_damaged_newest_set_gives_way_to_the_older_one(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    save(folder, 4)
    newest = save(folder, 8)
    path = folder.blobs.path(newest.stages[1].hash)
    path.write_bytes(path.read_bytes()[:-1])
    (said,) = folder.mend()
    assert str(path) in said and "truncated: 23 of 24 bytes" in said
    assert said.endswith("going on from the set at tick 4")
    assert folder.manifest().tick == 4
    assert not path.exists()  # else the same weights, trained again, would be taken for had
    assert folder.mend() == []


@pytest.mark.parametrize("part", ["manifest", "snapshot"])
def test_where_no_set_is_whole_nothing_is_removed(tmp_path: Path, part: str) -> None:
    folder = new_folder(tmp_path)
    for tick in (4, 8):
        manifest = save(folder, tick)
        (folder.blobs.path(manifest.stages[0].hash) if part == "snapshot" else folder._set_path(tick)).write_bytes(b"")
        if part == "manifest":
            break
    with pytest.raises(InputError, match=r"truncated|damaged"):
        folder.mend()
    assert folder.sets()

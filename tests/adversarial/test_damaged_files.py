"""What lies on disk between sessions may be damaged, cut off or another program's: rebuilt, or refused in one line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.estimator import load_table, table_name
from peer.caps import MonthlyCap
from peer.errors import RefusedError
from peer.trainer_ladder import FILE, kept
from peer.trainer_state import RunFolder
from peer.volunteer_files import KeptFences, OpDags

DAMAGE = (
    b"",
    b"\xff\xfe\0",
    b"{",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b'{"zz":' + b"[" * 100_000,
    b"\0" * 100,
    b'{"month":3,"times":7}',
    b"[[1,2,3]]",
    b'{"x":[1,-9999999999999999999999]}',
)
CACHES: dict[str, Callable[[Path], object]] = {
    "traffic.json": lambda folder: MonthlyCap(folder, 10).look(os.getpid(), "2026-11"),
    "fences.json": KeptFences,
    table_name("cpu"): lambda folder: load_table(folder, "cpu"),
    FILE: kept,
    "hosts.json": lambda folder: RunFolder(folder).hosts(),
}
STATE: dict[str, Callable[[RunFolder], object]] = {
    "epoch": RunFolder.next_epoch,
    "released.jsonl": lambda run: run.released(0),
    "progress.json": RunFolder.progress,
    "spec.json": RunFolder.spec,
    "numeric_log.jsonl": RunFolder.numeric_log,
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_begun_anew(tmp_path: Path, name: str, damage: bytes) -> None:
    (tmp_path / name).write_bytes(damage)
    CACHES[name](tmp_path)


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("damage", [d for d in DAMAGE if d not in (b"", b"{}", b"7")])
def test_damaged_state_is_refused_by_file(tmp_path: Path, name: str, damage: bytes) -> None:
    (tmp_path / name).write_bytes(damage)
    with pytest.raises(InputError, match=name) as error:
        STATE[name](RunFolder(tmp_path))
    assert "\n" not in str(error.value)


def test_a_damaged_opdag_is_asked_for_again(tmp_path: Path) -> None:
    raw = b"what a trainer sent"
    name = hashlib.blake2b(raw, digest_size=32).hexdigest()
    kept_dags = OpDags(tmp_path)
    assert kept_dags.checked(name, raw) == raw and kept_dags.known() == (name,)
    (tmp_path / "opdags" / name).write_bytes(raw[:-1])
    (tmp_path / "opdags" / f"{name}.part").write_bytes(raw[:3])
    again = OpDags(tmp_path)
    assert again.known() == () and not any((tmp_path / "opdags").iterdir())
    assert again.checked(name, raw) == raw
    (tmp_path / "opdags" / name).write_bytes(raw[1:])  # while it runs
    with pytest.raises(RefusedError, match="signed hash"):
        again.checked(name, b"")
    assert again.known() == () and again.checked(name, raw) == raw

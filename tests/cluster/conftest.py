"""A working folder for trainers; afterwards nothing that was started from it is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working folder; afterwards no process that was started from it is left."""
    yield tmp_path
    left = [
        p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("FUSION_TEST") == str(tmp_path)
    ]
    for process in left:
        process.kill()
    assert not left
    temporary = tmp_path / "tmp"
    assert not temporary.exists() or not [p.name for p in temporary.iterdir() if p.name.startswith("fusion")]

"""A working folder for trainers; afterwards nothing that was started from it is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dht.p2pd import clear_leftovers

ENDING_S = 120.0  # for children of what was killed, which see their parent's end on their own


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working folder; afterwards no process that was started from it is left."""
    yield tmp_path
    ours = [
        p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("FUSION_TEST") == str(tmp_path)
    ]
    _, left = psutil.wait_procs(ours, timeout=ENDING_S)
    for process in left:
        process.kill()
    assert not left
    temporary = tmp_path / "tmp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        clear_leftovers()  # of a volunteer that was killed: the next that starts there would, and there is none
    assert not temporary.exists() or not [p.name for p in temporary.iterdir() if p.name.startswith("fusion")]

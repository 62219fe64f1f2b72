"""For every test: one hypothesis profile, and nothing left running or lying in the temporary folder at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from dht.p2pd import clear_leftovers

# The same examples on every machine, however loaded it is: a slow machine is no failure.
settings.register_profile("fusion", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fusion")

# On models this small a second thread only spins, and eight times as long. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MARK = "FUSION_TEST_SESSION"
ENDING_S = 180.0


def _ours(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Processes started by tests carry a mark in their environment; their temporary files lie in one folder."""
    mark, before = uuid.uuid4().hex, tempfile.tempdir
    folder = Path(tempfile.mkdtemp(prefix="ft-"))  # short: Unix socket paths have 107 bytes
    os.environ[MARK] = mark
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["FUSION_HOME"] = str(folder / "home")  # nobody's own keys, and no other worker's
    yield
    until = time.monotonic() + ENDING_S
    while (left := _ours(mark)) and time.monotonic() < until:
        psutil.wait_procs(left, timeout=0.5)
    clear_leftovers()  # of peers that tests killed: the next peer that starts would, and there is none
    tempfile.tempdir = before
    names = [" ".join(p.cmdline())[:120] for p in left if p.is_running()]
    files = sorted(p.name for p in folder.iterdir() if p.name.startswith("fusion"))
    for process in left:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    assert not names, f"still running: {names}"
    assert not files, f"left in the temporary folder: {files}"

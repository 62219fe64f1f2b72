"""For every test: one hypothesis profile, the same dice and settings whatever ran before it in the same process, and
nothing left running or lying in the temporary folder at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import sys
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

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background: children inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "FUSION_TEST_SESSION"
ROOMS = ("dht", "fusion_p2p", "peer")
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


def _loggers() -> list[logging.Logger]:
    """Ours and the root's."""
    known = logging.root.manager.loggerDict.items()
    return [logging.root, *(x for n, x in known if isinstance(x, logging.Logger) and n.split(".")[0] in ROOMS)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: what is drawn without a seed is the same in every order of tests."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a command line run in this process sets for the whole of it is set back: environment, folder, logging."""
    environ, folder, torch = dict(os.environ), os.getcwd(), sys.modules.get("torch")
    levels = {logger: logger.level for logger in _loggers()}
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) if torch is not None else None
    yield
    os.chdir(folder)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    for logger in _loggers():
        if logger.level != (level := levels.get(logger, logging.NOTSET)):
            logger.setLevel(level)
    if torch is not None and before is not None:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:  # it has ended
        return ""


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
    names = [name for p in left if (name := _name(p))]
    files = sorted(p.name for p in folder.iterdir() if p.name.startswith("fusion"))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    assert not names, f"still running: {names}"
    assert not files, f"left in the temporary folder: {files}"

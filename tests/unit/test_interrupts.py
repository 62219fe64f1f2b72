"""Whoever wants a program of ours to end sees it end, whatever hangs in it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STUCK = """
import pathlib, signal, sys, time
from peer import interrupts
import peer.lab.local_swarm as swarm
interrupts.END_S = float(sys.argv[1])
interrupts.end_in_time("test")
folder = swarm._temporary_folder("fusion-local-")
child = swarm.subprocess.Popen(["sleep", "900"], start_new_session=True)
swarm._running.add(child)
with interrupts.undisturbed():
    print(folder, child.pid, flush=True)
    while True:
        time.sleep(1)
"""


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # dead, but nobody here reaps it
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("budget", "signals"), [("0.3", [signal.SIGINT]), ("500", [signal.SIGINT, signal.SIGTERM])])
def test_a_hanging_process_ends_after_its_budget_or_at_the_second_signal(budget: str, signals: list[int]) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK, budget], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    folder, pid = process.stdout.readline().decode().split()
    for number in signals:
        process.send_signal(number)
    word = {130: "Ctrl-C", 143: "SIGTERM"}[process.wait(200)]  # the system may deliver the second one first
    assert not Path(folder).exists()
    until = time.monotonic() + 150
    while runs(int(pid)):  # killed, and no child of this process
        assert time.monotonic() < until
        time.sleep(0.05)
    assert process.stderr is not None
    assert process.stderr.read().decode().splitlines() == [f"test: ended by {word}, at once"]

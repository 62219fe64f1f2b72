"""`fusion-monitor top` in real terminals (tmux) of two sizes, and where the output is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.cluster import monitor_swarm
from tests.cluster.monitor_swarm import Swarm

pytestmark = pytest.mark.timeout(900)

TOP = [sys.executable, "-m", "dht.cli_monitor", "top", "--every", "1", "--swarm"]


class Terminal:
    """One tmux server of its own, with one window of this size."""

    def __init__(self, folder: Path, name: str, width: int, height: int, command: str) -> None:
        self._socket = str(folder / f"tmux-{name}")
        self._tmux("new-session", "-d", "-x", str(width), "-y", str(height), command)
        self._tmux("set-option", "-g", "status", "off")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", self._socket, *arguments], capture_output=True, text=True, timeout=120
        )
        return done.stdout

    def screen(self) -> list[str]:
        return self._tmux("capture-pane", "-p").split("\n")

    def close(self) -> None:
        self._tmux("kill-server")


@contextlib.contextmanager
def terminal(folder: Path, width: int, height: int, command: str) -> Iterator[Terminal]:
    opened = Terminal(folder, f"{width}", width, height, command)
    try:
        yield opened
    finally:
        opened.close()


async def shown(window: Terminal, *words: str, timeout_s: float = 300.0) -> list[str]:
    """The screen, once all `words` are on it."""
    end = time.monotonic() + timeout_s
    while missing := [w for w in words if w not in "\n".join(lines := await asyncio.to_thread(window.screen))]:
        assert time.monotonic() < end, f"{missing} not in:\n" + "\n".join(lines)
        await asyncio.sleep(0.2)
    return lines


async def until_shown(swarm: Swarm, window: Terminal, *words: str) -> list[str]:
    """Meanwhile its leaders renew their leases."""

    async def renew() -> None:
        while True:
            swarm.add_fences()
            await asyncio.sleep(5.0)

    renewing = asyncio.create_task(renew())
    try:
        return await shown(window, *words)
    finally:
        renewing.cancel()


async def fill(swarm: Swarm) -> None:
    swarm.add_peers(14)
    swarm.add_fences()
    swarm.step = 20
    swarm.say("stage 2 moved: link 1-2 narrowed to 6 Mbps")
    swarm.start_run([1, 4, 7, 5])
    await swarm.board.flush()


def test_in_terminals_of_two_sizes(tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here; .ci/browser installs it")

    async def main() -> None:
        async with monitor_swarm.swarm(tmp_path) as swarm:
            await fill(swarm)
            command = f"env -u COLUMNS -u LINES FUSION_HOME={tmp_path} LANG=C.UTF-8 {shlex.join([*TOP, swarm.address])}"
            with terminal(tmp_path, 80, 24, command) as small, terminal(tmp_path, 200, 50, command) as large:
                told = "14 peers", "3 fences", "step 21/500", "loss", "stage 1 computes", "busy", "more", "events"
                lines = await until_shown(swarm, small, "gpt2-bible", *told, "narrowed to 6 Mbps")
                assert len([x for x in lines if x]) <= 24 and max(map(len, lines)) <= 80
                told = "FENCE", "a1a1a1a1", "HOURS", "22:00-07:00", "VERSION", "0.1.0", "relay", "8x", "940 Mbit/s"
                lines = await until_shown(swarm, large, "gpt2-bible", *told)
                text = "\n".join(lines)
                assert len([x for x in lines if x]) <= 50 and max(map(len, lines)) <= 200
                assert sum("free" in x or "busy" in x or "paused" in x for x in lines) >= 14  # every peer fits
                assert "\ufffd" not in text and "Traceback" not in text
                swarm.advance(100)
                await shown(small, "step 121/500")
                await shown(large, "step 121/500")

    uvloop.run(main())


def test_plain_lines_where_the_output_is_no_terminal(tmp_path: Path) -> None:
    async def main() -> None:
        async with monitor_swarm.swarm(tmp_path) as swarm:
            await fill(swarm)
            process = await asyncio.create_subprocess_exec(
                *TOP, swarm.address, stdout=asyncio.subprocess.PIPE, env={**os.environ, "FUSION_HOME": str(tmp_path)}
            )
            assert process.stdout is not None
            heard: list[str] = []
            try:
                async with asyncio.timeout(300):
                    while not any("peers=14" in line for line in heard) or not any(
                        "run gpt2" in line for line in heard
                    ):
                        heard.append((await process.stdout.readline()).decode())
                    swarm.publish_peer(0, state="left")  # leaves at once, with a word
                    while not any("left" in line and "event" in line for line in heard):
                        heard.append((await process.stdout.readline()).decode())
            finally:
                process.terminate()
                async with asyncio.timeout(300):
                    assert await process.wait() == 143
            text = "".join(heard)
            assert "\x1b" not in text  # no colours, no cursor
            assert "step=21/500" in text and "loss=" in text and 'bound="stage 1 computes' in text

    uvloop.run(main())

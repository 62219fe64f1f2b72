"""Real peers on loopback, each a process of its own with its p2pd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

AT_ONCE = 4
ENDING_S = 180.0
JOIN_S, SEEN_S = 300.0, 400.0
TRIES = 5


class Member:
    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self.process, self.peer, self.ready = process, str(hello["peer"]), float(hello["ready"])
        self.addresses: list[str] = hello["addresses"]

    async def ask(self, line: str, timeout_s: float = SEEN_S) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(timeout_s):
            answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return answer


class Cluster:
    """`seen_s`: for each peer that joined, the seconds from its node's start until every other one saw its record."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.seen_s: list[float] = []

    @property
    def names(self) -> list[str]:
        return list(self.members)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, folder: Path, count: int, *, measured: int = 6) -> AsyncIterator[Cluster]:
        """The last `measured` join one after the other and are timed; the others join AT_ONCE at a time."""
        cluster = cls()
        try:
            await cluster.join(folder / "0", ())
            boot = tuple(cluster.members[cluster.names[0]].addresses[:1])
            for first in range(1, count - measured, AT_ONCE):
                batch = range(first, min(first + AT_ONCE, count - measured))
                await asyncio.gather(*(cluster.join(folder / str(i), boot) for i in batch))
            for i in range(count - measured, count):
                new = await cluster.join(folder / str(i), boot)
                others = [m for m in cluster.members.values() if m is not new]
                seen = await asyncio.gather(*(m.ask(f"until {new.peer}") for m in others))
                cluster.seen_s.append(max(s["at"] for s in seen) - new.ready)
            yield cluster
        finally:
            await cluster.close()

    async def join(self, folder: Path, bootstrap: tuple[str, ...], *, port: int = 0) -> Member:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.cluster.swarm_peer", str(folder), str(port), *bootstrap,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(JOIN_S):
            member = Member(process, json.loads(await process.stdout.readline()))
        self.members[member.peer] = member
        return member

    async def until_one(self, timeout_s: float = SEEN_S) -> float:
        """Seconds until every member sees every other one."""
        start = time.monotonic()
        others = [(m, peer) for m in self.members.values() for peer in self.members if peer != m.peer]
        async with asyncio.timeout(timeout_s):
            for member, peer in others:
                await member.ask(f"until {peer}", timeout_s)
        return time.monotonic() - start

    async def kill(self, peers: list[str]) -> None:
        """SIGKILL; their p2pds die with them."""
        for peer in peers:
            self.members[peer].process.send_signal(signal.SIGKILL)
        for peer in peers:
            await self.members.pop(peer).process.wait()

    async def read_all(self, rounds: int) -> tuple[list[float], int]:
        """Every living peer reads the board `rounds` times, one after the other: (seconds each, records missed)."""
        times, missing = [], 0
        for _ in range(rounds):
            for member in self.members.values():
                answer = await self._read(member)
                times.append(float(answer["seconds"]))
                missing += len(set(self.members) - set(answer["peers"]))
        return times, missing

    async def _read(self, member: Member) -> dict[str, Any]:
        """Asked a few times at once if the machine let calls time out: a record that is hidden stays so meanwhile."""
        for _ in range(TRIES):
            answer = await member.ask("peers")
            if not answer["error"] and set(self.members) <= set(answer["peers"]):
                break
        return answer

    async def close(self) -> None:
        """The end of its input ends a member."""
        for member in self.members.values():
            if member.process.stdin is not None:
                member.process.stdin.close()
        ending = [asyncio.create_task(m.process.wait()) for m in self.members.values()]
        if ending and (late := (await asyncio.wait(ending, timeout=ENDING_S))[1]):
            for member in self.members.values():
                if member.process.returncode is None:
                    member.process.kill()
            await asyncio.wait(late)
            raise AssertionError(f"{len(late)} peers did not end within {ENDING_S:g} s")

"""torch.distributed.pipelining on a lab: workers started once, in the peers' namespaces and under their CPU shares."""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from peer.lab.netns import Lab
from tests.netlab import model as m

START_S, JOB_S, END_S = 300.0, 1200.0, 5.0
PORT = 29500
SHORT_S = 10.0  # a step shorter than this is repeated


class RivalFailed(Exception):
    """A worker ended or said nothing in time; the text has its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalRun:
    """One device order; `layers` by stage. `step_s`: from the first worker's begin to the last one's end."""

    order: tuple[str, ...]
    layers: tuple[int, ...]
    step_times_s: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return statistics.median(self.step_times_s[1:] or self.step_times_s)


class Rivals:
    """A context manager; `run` may be called several times. RivalFailed."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._workers: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []

    def __enter__(self) -> Self:
        peers = self._lab.bed.peers
        try:
            for rank, peer in enumerate(peers):
                command = [sys.executable, "-m", "tests.netlab.rival", str(rank), str(len(peers)), peers[0].address]
                worker = subprocess.Popen(
                    [*self._lab.enter(peer.name), *command, str(PORT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log(rank),
                    text=True,
                    bufsize=1,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                )
                self._workers.append(worker)
            self._hear("ready", START_S)
            for worker, peer in zip(self._workers, peers, strict=True):  # loading torch is no part of a step
                self._lab.quotas.hold(peer.name, worker.pid)
            self._tell("")
            self._hear("joined", START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, order: Sequence[int], stages: Sequence[tuple[int, int]], steps: int) -> RivalRun:
        """`order[k]`: index of the peer that has stage k."""
        self._tell(json.dumps({"order": list(order), "stages": [list(s) for s in stages], "steps": steps}))
        found = [json.loads(line) for line in self._hear(None, JOB_S * steps)]
        spans = [[tuple(t) for t in f["times"]] for f in found]
        times = [max(s[k][1] for s in spans) - min(s[k][0] for s in spans) for k in range(steps)]
        return RivalRun(
            order=tuple(self._lab.bed.peers[p].name for p in order),
            layers=tuple(b - a for a, b in stages),
            step_times_s=tuple(times),
            losses=tuple(found[order[-1]]["losses"]),
        )

    def measured(self, order: Sequence[int], stages: Sequence[tuple[int, int]]) -> RivalRun:
        """One step; where that is short, three more after it that count."""
        first = self.run(order, stages, 1)
        return first if first.step_s > SHORT_S else self.run(order, stages, 4)

    def close(self) -> None:
        """Idempotent."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait(END_S)
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        continue
        self._workers.clear()
        for log in self._logs:
            log.close()
        self._logs.clear()

    def _tell(self, line: str) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(line + "\n")
                worker.stdin.flush()
            except OSError:
                raise RivalFailed(self._words()) from None

    def _hear(self, expected: str | None, timeout_s: float) -> list[str]:
        until, lines = time.monotonic() + timeout_s, []
        for worker in self._workers:
            assert worker.stdout is not None
            ready, _, _ = select.select([worker.stdout], [], [], max(0.0, until - time.monotonic()))
            line = worker.stdout.readline().strip() if ready else ""
            if not line or (expected is not None and line != expected):
                raise RivalFailed(f"torch.distributed.pipelining: no answer within {timeout_s:.0f} s: {self._words()}")
            lines.append(line)
        return lines

    def _log(self, rank: int) -> IO[str]:
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in `close`
        self._logs.append(log)
        return log

    def _words(self) -> str:
        """The last line of a worker that failed by itself, not because another did."""
        said = []
        for log in self._logs:
            log.seek(0)
            said += [line for line in log.read().splitlines() if "Error" in line]
        said.sort(key=lambda line: "Connection" in line)
        return said[0][:300] if said else "no worker said why"


def shuffled(peers: int, seed: int) -> list[int]:
    order = list(range(peers))
    random.Random(seed).shuffle(order)
    return order


def equal_layers(lab: Lab) -> list[tuple[int, int]]:
    return m.shares([1.0] * len(lab.bed.peers))


def by_speed(lab: Lab, order: Sequence[int]) -> list[tuple[int, int]]:
    return m.shares([lab.bed.peers[p].cores for p in order])


def as_dict(run: RivalRun) -> dict[str, Any]:
    return {
        "order": list(run.order),
        "layers": list(run.layers),
        "step_s": run.step_s,
        "step_times_s": list(run.step_times_s),
        "losses": list(run.losses),
        "tokens_per_s": m.TOKENS / run.step_s,
    }

"""Event-driven simulation of one training step of a chain: the schedule as data (DESIGN section 5).

Rules: one compute queue per device, backward first, micro-batches in order; one queue per link direction (or one per
device's uplink with `shared_nic`), then latency; a stage holds at most `windows[k]` micro-batches between their
forward and their backward; codecs take compute time at both ends. Devices of one pool share `cores`: n busy devices
on c cores each run at min(1, c/n). All times in seconds from the step's start.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from fusion_p2p.errors import InputError
from fusion_p2p.planner.costs import Chain, Costs

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True)
class Pool:
    """Devices (indices) that share `cores` processor cores, one core per busy device at most."""

    devices: tuple[int, ...]
    cores: float


@dataclass(frozen=True)
class Options:
    windows: tuple[int, ...] | None = None  # per stage; None: as many as there are micro-batches
    shared_nic: bool = False
    pools: tuple[Pool, ...] = ()


class Span(NamedTuple):
    """Work of one micro-batch: `kind` "F" or "B" computes at stage `stage`, or sends from it (`to` the other stage)."""

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    to: int | None = None  # None: compute


@dataclass(frozen=True)
class Schedule:
    """`spans` in order of their end. `peak[k]`: most micro-batches stage k held at once."""

    step_s: float
    spans: tuple[Span, ...]
    peak: tuple[int, ...]
    stages: int

    def busy_s(self, stage: int) -> float:
        return sum(s.end_s - s.start_s for s in self.spans if s.to is None and s.stage == stage)

    def grid(self, columns: int = 100) -> list[str]:
        """One text row per stage, one column per step_s/columns: "." idle, else the micro-batch's last digit for a
        forward and a letter (a..j) for a backward."""
        rows = [["."] * columns for _ in range(self.stages)]
        width = self.step_s / columns or 1.0
        for s in self.spans:
            if s.to is None:
                mark = str(s.micro_batch % 10) if s.kind == FORWARD else "abcdefghij"[s.micro_batch % 10]
                for c in range(int(s.start_s / width), max(int(s.start_s / width) + 1, round(s.end_s / width))):
                    if c < columns:
                        rows[s.stage][c] = mark
        return ["".join(r) for r in rows]


@dataclass
class _Stage:
    device: int
    forward_s: float
    backward_s: float
    window: int
    ready: list[tuple[int, int]] = field(default_factory=list)  # heap of (0 backward | 1 forward, micro-batch)
    held: int = 0
    peak: int = 0

    @property
    def able(self) -> bool:
        """Whether something waits that the window allows."""
        return bool(self.ready) and (self.ready[0][0] == 0 or self.held < self.window)


@dataclass
class _Job:
    stage: int
    kind: str
    micro_batch: int
    start_s: float
    left_s: float  # at full speed
    pool: int


def simulate(costs: Costs, chain: Chain, options: Options | None = None, *, spans: bool = True) -> Schedule:
    """One step of `chain`. InputError if a window is smaller than 1. `spans` False: times and peaks only, sooner."""
    simulation = _Simulation(costs, chain, options or Options())
    return simulation.run() if spans or not simulation.is_plain else simulation.run_plain()


class _Simulation:
    def __init__(self, costs: Costs, chain: Chain, options: Options) -> None:
        w, h = costs.w, chain.hosts
        count = len(h)
        windows = options.windows or (costs.m,) * count
        if len(windows) != count or min(windows) < 1:
            raise InputError(f"windows {windows} do not give each of {count} stages at least 1 micro-batch")
        bounds = chain.bounds(w.atoms)
        size = [r.byte_share * float(w.cut_bytes[p]) for r, p in zip(chain.rungs, chain.cuts, strict=True)]
        encode = [
            r.encode_s_per_element * float(costs.elements[p]) for r, p in zip(chain.rungs, chain.cuts, strict=True)
        ]
        decode = [
            r.decode_s_per_element * float(costs.elements[p]) for r, p in zip(chain.rungs, chain.cuts, strict=True)
        ]
        self.stages = []
        for k, d in enumerate(h):
            f = float(costs.forward_s[d, bounds[k + 1]] - costs.forward_s[d, bounds[k]])
            b = float(costs.backward_s[d, bounds[k + 1]] - costs.backward_s[d, bounds[k]])
            f += (decode[k - 1] if k else 0.0) + (encode[k] if k < count - 1 else 0.0)
            b += (encode[k - 1] if k else 0.0) + (decode[k] if k < count - 1 else 0.0)
            self.stages.append(_Stage(d, f, b, windows[k]))
        bw, lat = costs.net.bandwidth_bytes_per_s, costs.net.latency_s
        self.send: dict[tuple[int, int], tuple[float, float]] = {}
        for k in range(count - 1):
            for a, b2 in ((k, k + 1), (k + 1, k)):
                i, j = h[a], h[b2]
                local = i == j
                self.send[a, b2] = (0.0, 0.0) if local else (size[k] / float(bw[i, j]), float(lat[i, j]))
        self.m, self.options = costs.m, options
        self.shared_s = costs.score(chain).shared_s  # once a step, before and after the micro-batches
        self.pool_of: dict[int, int] = {d: n for n, p in enumerate(options.pools) for d in p.devices}
        self.cores: Mapping[int, float] = {n: p.cores for n, p in enumerate(options.pools)}
        self.of_device: dict[int, list[int]] = {}
        for k, d in enumerate(h):
            self.of_device.setdefault(d, []).append(k)
        self.running: dict[int, _Job] = {}
        self.clock: dict[int, float] = {n: 0.0 for n in self.cores}  # when a pool's jobs were last advanced
        self.stamp: dict[int, int] = {n: 0 for n in self.cores}
        self.link_free: dict[object, float] = {}
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.serial = 0
        self.spans: list[Span] = []

    def _at(self, t: float, what: str, *args: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (t, self.serial, what, args))

    def run(self) -> Schedule:
        for m in range(self.m):
            heapq.heappush(self.stages[0].ready, (1, m))
        for d in self.of_device:
            self._start(d, 0.0)
        end = 0.0
        while self.events:
            t, _, what, args = heapq.heappop(self.events)
            if what == "arrive":
                k, kind, m = args
                heapq.heappush(self.stages[k].ready, (kind, m))
                self._start(self.stages[k].device, t)
            elif what == "done":
                self._finish(args[0], t)
                end = max(end, t)
            else:
                self._pool_tick(args[0], args[1], t)
                end = max(end, t)
        spans = tuple(sorted(self.spans, key=itemgetter(4, 3, 1)))
        end += self.shared_s
        return Schedule(end, spans, tuple(s.peak for s in self.stages), len(self.stages))

    @property
    def is_plain(self) -> bool:
        """Whether every device hosts one stage and has its cores and links to itself."""
        return len(self.of_device) == len(self.stages) and not self.pool_of and not self.options.shared_nic

    def run_plain(self) -> Schedule:
        """`run` for plain chains, without spans: frames come in order, so two counts a direction are a queue."""
        last, push, pop = len(self.stages) - 1, heapq.heappush, heapq.heappop
        seconds = [(s.backward_s, s.forward_s) for s in self.stages]
        windows = [s.window for s in self.stages]
        ready = [[0] * (last + 1), [self.m, *[0] * last]]  # backwards, forwards that wait at each stage
        held, peak, busy = [0] * (last + 1), [0] * (last + 1), [False] * (last + 1)
        hops = [[self.send.get((k, k + step), (0.0, 0.0)) for k in range(last + 1)] for step in (-1, 1)]
        free = [[0.0] * (last + 1), [0.0] * (last + 1)]
        events: list[tuple[float, int, int, int]] = []  # (time, serial, stage, 0 backward | 1 forward | 2, 3 done)
        serial, end, k, t = 0, 0.0, 0, 0.0
        while True:
            if not busy[k]:
                kind = 0 if ready[0][k] else 1
                if ready[kind][k] and (kind == 0 or held[k] < windows[k]):
                    ready[kind][k] -= 1
                    if kind:
                        held[k] += 1
                        peak[k] = max(peak[k], held[k])
                    busy[k] = True
                    serial += 1
                    push(events, (t + seconds[k][kind], serial, k, 2 + kind))
            if not events:
                break
            t, _, k, kind = pop(events)
            if kind < 2:
                ready[kind][k] += 1
                continue
            end, busy[k] = t, False
            kind -= 2
            if kind and k == last:
                ready[0][k] += 1
            elif kind or k:
                takes, latency = hops[kind][k]
                start = max(t, free[kind][k])
                free[kind][k] = start + takes
                serial += 1
                push(events, (start + takes + latency, serial, k + (1 if kind else -1), kind))
            if not kind:
                held[k] -= 1
        return Schedule(end + self.shared_s, (), tuple(peak), last + 1)

    def _start(self, device: int, t: float) -> None:
        """Give an idle device its next job: backward before forward, later stages first, then micro-batch order."""
        if device in self.running:
            return
        able = [k for k in self.of_device[device] if self.stages[k].able]
        if not able:
            return
        k = able[0] if len(able) == 1 else min(able, key=lambda k: (self.stages[k].ready[0][0], -k))
        s = self.stages[k]
        kind, m = heapq.heappop(s.ready)
        if kind == 1:
            s.held += 1
            s.peak = max(s.peak, s.held)
        seconds = s.forward_s if kind == 1 else s.backward_s
        pool = self.pool_of.get(device, -1)
        job = _Job(k, FORWARD if kind == 1 else BACKWARD, m, t, seconds, pool)
        if pool < 0:
            self.running[device] = job
            self._at(t + seconds, "done", device)
        else:
            self._advance(pool, t)
            self.running[device] = job
            self._schedule_pool(pool, t)

    def _finish(self, device: int, t: float) -> None:
        job = self.running.pop(device)
        k, m = job.stage, job.micro_batch
        self.spans.append(Span(job.kind, k, m, job.start_s, t))
        last = len(self.stages) - 1
        if job.kind == FORWARD:
            if k == last:
                heapq.heappush(self.stages[k].ready, (0, m))
            else:
                self._transmit(k, k + 1, 1, m, t)
        else:
            self.stages[k].held -= 1
            if k > 0:
                self._transmit(k, k - 1, 0, m, t)
        self._start(device, t)

    def _transmit(self, a: int, b: int, kind: int, m: int, t: float) -> None:
        seconds, latency = self.send[a, b]
        queue: object = self.stages[a].device if self.options.shared_nic and seconds > 0 else (a, b)
        start = max(t, self.link_free.get(queue, 0.0))
        self.link_free[queue] = start + seconds
        if seconds > 0 or latency > 0:
            self.spans.append(Span(FORWARD if kind == 1 else BACKWARD, a, m, start, start + seconds, to=b))
        self._at(start + seconds + latency, "arrive", b, kind, m)

    # --- processor sharing

    def _jobs(self, pool: int) -> list[tuple[int, _Job]]:
        return [(d, j) for d, j in self.running.items() if j.pool == pool]

    def _rate(self, pool: int, jobs: Sequence[object]) -> float:
        return min(1.0, self.cores[pool] / max(1, len(jobs)))

    def _advance(self, pool: int, t: float) -> None:
        jobs = self._jobs(pool)
        done = (t - self.clock[pool]) * self._rate(pool, jobs)
        for _, j in jobs:
            j.left_s = max(0.0, j.left_s - done)
        self.clock[pool] = t

    def _schedule_pool(self, pool: int, t: float) -> None:
        jobs = self._jobs(pool)
        self.stamp[pool] += 1
        if jobs:
            soonest = min(j.left_s for _, j in jobs)
            self._at(t + soonest / self._rate(pool, jobs), "pool", pool, self.stamp[pool])

    def _pool_tick(self, pool: int, stamp: int, t: float) -> None:
        if stamp != self.stamp[pool]:
            return
        self._advance(pool, t)
        over = [d for d, j in self._jobs(pool) if j.left_s <= 1e-15 + 1e-12 * t]
        for d in over:
            self._finish(d, t)
        self._advance(pool, t)
        self._schedule_pool(pool, t)

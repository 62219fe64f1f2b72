"""What a chain of stages costs: DESIGN section 5's objective, the one place that knows the formula.

step = one micro-batch's round trip + (M - 1) x the slowest of (stage forward + backward with its codecs, transfer).
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fusion_p2p.planner.ladder import Ladder, Rung
from fusion_p2p.planner.network import MEMORY_SHARE, Network
from fusion_p2p.planner.workload import Floats, Workload

if TYPE_CHECKING:
    from fusion_p2p.planner.dp_tables import Memory

INF = float("inf")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """`hosts[k]` (device index) holds stage k; stage k ends at cuts[k]; `rungs[k]` is the codec of hop k -> k+1."""

    hosts: tuple[int, ...]
    cuts: tuple[int, ...]
    rungs: tuple[Rung, ...]

    def bounds(self, atoms: int) -> tuple[int, ...]:
        """Stage k holds atoms bounds[k] .. bounds[k+1]-1."""
        return (0, *self.cuts, atoms)


@dataclass(frozen=True)
class Score:
    """Seconds. `stage_s`: forward + backward + codec work of each stage; `hop_s`: the slower direction's transfer,
    without latency; `fits` False: some stage exceeds its device's memory."""

    step_s: float
    round_trip_s: float
    bottleneck_s: float
    stage_s: tuple[float, ...]
    hop_s: tuple[float, ...]
    compute_s: float  # of one round trip: stages
    transfer_s: float  # of one round trip: bytes over bandwidth
    latency_s: float  # of one round trip
    codec_s: float  # of one round trip
    shared_s: float  # once a step: tied weights to their other users and gradients back
    fits: bool


class Costs:
    """Seconds of every piece, for one workload, network, micro-batch count and ladder."""

    def __init__(
        self, w: Workload, net: Network, micro_batches: int, ladder: Ladder, window: int | None = None
    ) -> None:
        self.w, self.net, self.m, self.ladder = w, net, micro_batches, ladder
        self.window = min(window or micro_batches, micro_batches)
        times = [d.atom_times(w) for d in net.devices]
        self.forward_s = _running(np.array([t.forward_s for t in times]))
        self.backward_s = _running(np.array([t.backward_s for t in times]))
        self.work_s = self.forward_s + self.backward_s  # (D, n+1): device's seconds for atoms before a position
        kept = np.add(*w.atom_bytes()) + (1 if w.recompute else self.window) * w.stash_bytes
        self.held_bytes = _running(kept[None, :])[0]  # of the parts of a stage's memory that add up over its atoms
        self.end_bytes = w.frame_bytes(self.window)
        self.begin_bytes = self.end_bytes + (self.window * w.cut_bytes[: w.atoms + 1] if w.recompute else 0.0)
        self.room_bytes = np.array(
            [MEMORY_SHARE * d.memory_bytes if d.accepts and d.confirmed else -1.0 for d in net.devices]
        )
        self.memory_of: dict[bytes, Memory] = {}  # by positions, as the dynamic programme finds it
        self.shares = np.array([r.byte_share for r in ladder.rungs])
        self.elements = w.cut_bytes / w.wire_bytes_per_element
        self.cut_allowed = w.cut_allowed()
        bw, lat = net.bandwidth_bytes_per_s, net.latency_s
        with np.errstate(divide="ignore"):
            self.forward_s_per_byte = np.array(1.0 / bw)  # [i, j]: activations i -> j
        np.fill_diagonal(self.forward_s_per_byte, 0.0)
        lat = np.where(np.eye(len(net), dtype=bool), 0.0, lat)
        self.backward_s_per_byte = self.forward_s_per_byte.T
        self.slow_s_per_byte = np.maximum(self.forward_s_per_byte, self.backward_s_per_byte)
        self.both_s_per_byte = self.forward_s_per_byte + self.backward_s_per_byte
        self.both_latency_s = lat + lat.T
        caps = [d.upload_bytes_per_step for d in net.devices]
        self.upload_bytes = np.array([INF if c is None else c for c in caps])

    def with_slower_links(self, factor: float) -> Costs:
        """The same problem with every bandwidth divided by `factor`."""
        other = copy.copy(self)
        other.forward_s_per_byte = self.forward_s_per_byte * factor
        other.backward_s_per_byte = self.backward_s_per_byte * factor
        other.slow_s_per_byte = self.slow_s_per_byte * factor
        other.both_s_per_byte = self.both_s_per_byte * factor
        return other

    def without_shared(self, room: float = 1.0) -> Costs:
        """The same problem as if no weight were tied, and with `room` times the memory."""
        other = copy.copy(self)
        other.w, other.memory_of = replace(self.w, shared=()), {}
        other.room_bytes = self.room_bytes * room
        return other

    def subset(self, keep: list[int]) -> Costs:
        """The same problem on these devices only, in this order."""
        if keep == list(range(len(self.net))):
            return self
        return Costs(self.w, self.net.subset(keep), self.m, self.ladder, self.window)

    def rungs_at(self, hosts: tuple[int, ...], cuts: tuple[int, ...], bottleneck_s: float) -> tuple[Rung, ...]:
        """The first rung of every hop whose transfer is at most tau x bottleneck, else the last."""
        if len(self.ladder.rungs) == 1:
            return self.ladder.rungs * len(cuts)
        h = np.array(hosts)
        dense_s = self.w.cut_bytes[list(cuts)] * self.slow_s_per_byte[h[:-1], h[1:]]
        share = self.ladder.tau * bottleneck_s * (1 + 1e-12) / np.maximum(dense_s, 1e-30)
        index = np.searchsorted(-self.shares, -share, side="left")
        return tuple(self.ladder.rungs[min(i, len(self.shares) - 1)] for i in index)

    def fit(self, hosts: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[Chain, Score]:
        """The chain with codecs for the smallest bottleneck that is consistent with them, and its score."""
        bounds = (0, *cuts, self.w.atoms)
        b = max(self.work_s[h, bounds[k + 1]] - self.work_s[h, bounds[k]] for k, h in enumerate(hosts))
        while True:
            chain = Chain(hosts, cuts, self.rungs_at(hosts, cuts, b))
            score = self.score(chain)
            if score.bottleneck_s <= b * (1 + 1e-9) or len(self.ladder.rungs) == 1:
                return chain, score
            b = score.bottleneck_s

    def stage_bytes(self, bounds: Sequence[int]) -> Floats:
        """Memory of each of the stages that these positions bound, as `Workload.stage_bytes` has it."""
        at = np.asarray(bounds)
        lo, hi = at[:-1], at[1:]
        scratch = np.maximum.reduceat(self.w.stash_bytes[: at[-1]], lo)
        out: Floats = self.held_bytes[hi] - self.held_bytes[lo] + self.begin_bytes[lo] + self.end_bytes[hi] + scratch
        for w in self.w.shared:
            out[(lo > w.first) & (lo <= w.last) & (hi > w.last)] += 2 * w.size_bytes
        return out

    def span_bytes(self, at: Ints) -> Floats:
        """(m, m) [p, q]: the same of a stage of atoms at[p]..at[q]-1; 0 where p >= q."""
        most = np.append(np.maximum.reduceat(self.w.stash_bytes, at[:-1]), 0.0)
        scratch = np.maximum.accumulate(np.triu(np.broadcast_to(most, (len(at), len(at)))), axis=1)
        scratch = np.roll(scratch, 1, axis=1)  # atoms before at[q]
        held = self.held_bytes[at]
        whole = held[None, :] - held[:, None] + self.begin_bytes[at][:, None] + self.end_bytes[at][None, :] + scratch
        for w in self.w.shared:
            whole[np.ix_((at > w.first) & (at <= w.last), at > w.last)] += 2 * w.size_bytes
        return np.triu(whole, 1)

    def score(self, chain: Chain) -> Score:
        """The objective of one chain, with its parts."""
        bounds = chain.bounds(self.w.atoms)
        h = np.array(chain.hosts)
        lo, hi = np.array(bounds[:-1]), np.array(bounds[1:])
        stage = self.work_s[h, hi] - self.work_s[h, lo]
        compute = float(stage.sum())
        cuts = np.array(chain.cuts, dtype=np.int64)
        share = np.array([r.byte_share for r in chain.rungs])
        size = self.w.cut_bytes[cuts] * share
        codec = np.array([r.encode_s_per_element + r.decode_s_per_element for r in chain.rungs]) * self.elements[cuts]
        stage[:-1] += codec
        stage[1:] += codec
        a, b = h[:-1], h[1:]
        hop = size * self.slow_s_per_byte[a, b]
        transfer = float((size * self.both_s_per_byte[a, b]).sum())
        latency = float(self.both_latency_s[a, b].sum())
        load = stage
        if len(set(chain.hosts)) < len(chain.hosts):  # a peer that absorbed a neighbour's stage hosts both
            load = np.bincount(h, weights=stage)
        bottleneck = float(max(load.max(), hop.max(initial=0.0)))
        shared = self._shared_s(bounds, chain.hosts)
        trip = compute + transfer + latency + 2 * float(codec.sum()) + shared
        used = np.bincount(h, weights=self.stage_bytes(bounds))[h]
        upload = np.zeros(len(h))
        upload[:-1] += size * self.m
        upload[1:] += size * self.m
        fits = bool((used <= self.room_bytes[h]).all() and (upload <= self.upload_bytes[h]).all())
        return Score(
            step_s=trip + (self.m - 1) * bottleneck,
            round_trip_s=trip,
            bottleneck_s=bottleneck,
            stage_s=tuple(stage.tolist()),
            hop_s=tuple(hop.tolist()),
            compute_s=compute,
            transfer_s=transfer,
            latency_s=latency,
            codec_s=2 * float(codec.sum()),
            shared_s=shared,
            fits=fits and bool(self.cut_allowed[cuts].all()),
        )

    def _shared_s(self, bounds: tuple[int, ...], hosts: tuple[int, ...]) -> float:
        total = 0.0
        for w in self.w.shared:
            a = hosts[bisect_right(bounds, w.first) - 1]
            b = hosts[bisect_right(bounds, w.last) - 1]
            if a != b:
                total += w.size_bytes * float(self.both_s_per_byte[a, b]) + float(self.both_latency_s[a, b])
        return total


def _running(a: Floats) -> Floats:
    return np.concatenate([np.zeros((len(a), 1)), np.cumsum(a, axis=1)], axis=1)

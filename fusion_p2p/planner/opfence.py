"""OP-Fence: the plan of least step time over fences, orders, cuts and codecs (FusionLLM 4; DESIGN 5)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner import bound, dp, exact, orders
from fusion_p2p.planner.bound import Component
from fusion_p2p.planner.costs import Chain, Costs, Score
from fusion_p2p.planner.dp import Ints
from fusion_p2p.planner.fences import Fences, find_fences
from fusion_p2p.planner.workload import Floats

MOST_DEVICES = 40  # considered for one chain where skipping is allowed; longer chains pay in latency
LOCAL_ORDERS = 24  # neighbour orders of one round of local search
SPREAD = np.array([1.02, 1.2, 1.45, 1.8, 2.4, 3.5])  # first thresholds, in units of the bound's bottleneck


@dataclass(frozen=True)
class Best:
    """The best chain found so far for one order."""

    chain: Chain
    score: Score
    order: orders.Order
    threshold_s: float


@dataclass(eq=False)
class Search:
    """One planning problem. `run` gives the finalists, best first."""

    costs: Costs
    skip: bool = True
    local_rounds: int = 12
    finalists: int = 3
    pinned: tuple[int, ...] | None = None  # only these positions may be cut
    comps: list[Component] = field(init=False)
    fences: Fences = field(init=False)

    def run(self) -> list[Best]:
        costs = self.costs
        self.comps = bound.components(costs, must_use_all=not self.skip)
        if not self.comps:
            raise InputError("no peer offers memory for a stage; ask volunteers to raise their memory cap")
        self.group = dp.groups_of(costs)
        self.trip, _ = bound.cheapest_hop(costs)
        keep = self._devices()
        self.fences = find_fences(costs.net, self._typical_bytes())
        fences = tuple(g for f in self.fences if (g := tuple(d for d in f if d in keep)))
        whole = costs.work_s[:, -1]
        at = self._fine_positions()
        if self.skip and len(keep) <= exact.MOST_DEVICES:
            small = exact.best_of_all_orders(costs, sorted(keep), self._allowed())
            if small is None or not small[1].fits:
                raise InputError(self._shortage())
            return [Best(*small, small[0].hosts, small[1].bottleneck_s)]
        candidates = orders.candidate_orders(fences, self.trip, whole)
        if not self.skip:  # both ends of the model lie on given devices: the direction matters
            candidates = orders.distinct(o for c in candidates for o in (c, c[::-1]))
        found = self._screen(candidates, at)
        if not found:
            raise InputError(self._shortage())
        found = [self._polish(b) for b in self._refine(found[: self.finalists], at)]
        found.sort(key=lambda b: (not b.score.fits, b.score.step_s))
        if self.local_rounds and len(keep) > 1:
            found = self._local(found)
        return found

    def _allowed(self) -> Ints:
        n = self.costs.w.atoms
        if self.pinned is not None:
            return np.array([0, *self.pinned, n], dtype=np.int64)
        return np.flatnonzero(self.costs.cut_allowed)

    def _typical_bytes(self) -> float:
        inner = self.costs.w.cut_bytes[1:-1]
        return float(np.median(inner)) * self.costs.ladder.rungs[-1].byte_share if len(inner) else 1.0

    def _devices(self) -> set[int]:
        """Devices of the most promising components, fastest first, at most MOST_DEVICES."""
        usable = [i for i in range(len(self.costs.net)) if self.costs.room_bytes[i] > 0]
        if not self.skip or len(usable) <= MOST_DEVICES:
            return set(usable)
        keep: dict[int, None] = {}
        for c in self.comps:
            for d in c.members[: c.count + max(2, c.count // 3)]:
                keep.setdefault(int(d))
                if len(keep) >= MOST_DEVICES:
                    return set(keep)
        return set(keep)

    # --- thresholds

    def _screen(self, candidates: list[orders.Order], at: Ints) -> list[Best]:
        """Every order at a few thresholds, all hops charged the dearest codec; best chains, best first."""
        thresholds = self.comps[0].bottleneck_s * SPREAD
        for _ in range(8):
            found = self._best_of(candidates, thresholds, at, relaxed=True)
            if found:
                return found
            thresholds = thresholds * 3.0
            at = self._allowed()
        return []

    def _best_of(
        self, candidates: list[orders.Order], thresholds: Floats, at: Ints, *, relaxed: bool = False
    ) -> list[Best]:
        """The best chains of the best few orders over all thresholds (one sweep), best first."""
        t = dp.build(self.costs, thresholds, at, self.group, relaxed=relaxed)
        n, b = len(candidates), len(thresholds)
        f = dp.sweep(t, np.repeat(np.array(candidates), b, axis=0), np.tile(np.arange(b), n), skip=self.skip)
        value = (f.round_trip_s + (self.costs.m - 1) * np.tile(thresholds, n)).reshape(n, b)
        out = []
        limit = np.sort(value.min(axis=1))[min(n, 4) - 1]
        for i in range(n):
            j = int(value[i].argmin())
            if np.isfinite(value[i, j]) and value[i, j] <= limit:
                chain, score = self._fit(*f.chain(i * b + j), float(thresholds[j]))
                out.append(Best(chain, score, candidates[i], float(thresholds[j])))
        out.sort(key=lambda x: (not x.score.fits, x.score.step_s))
        return list({x.chain: x for x in reversed(out)}.values())[::-1]

    def _fit(self, hosts: tuple[int, ...], cuts: tuple[int, ...], threshold: float) -> tuple[Chain, Score]:
        at = Chain(hosts, cuts, self.costs.rungs_at(hosts, cuts, threshold))
        options = [(at, self.costs.score(at))]
        if len(self.costs.ladder.rungs) > 1:
            options.append(self.costs.fit(hosts, cuts))
        return min(options, key=lambda o: (not o[1].fits, o[1].step_s))

    def _fine_positions(self) -> Ints:
        """Allowed positions but those with at least twice the bytes of a position at most 1/8 of the pace away."""
        allowed = self._allowed()
        if self.costs.ladder.rungs[-1].encode_s_per_element == 0.0 or not self.skip:
            return allowed
        fastest = self.costs.work_s[:, allowed].min(axis=0)
        near = self.comps[0].bottleneck_s / 8
        size = self.costs.w.cut_bytes[allowed]
        low = np.searchsorted(fastest, fastest - near)
        high = np.searchsorted(fastest, fastest + near, side="right")
        least = np.array([size[a:b].min() for a, b in zip(low, high, strict=True)])
        keep = (size < 2 * least) | (fastest == 0)
        keep[[0, -1]] = True
        out: Ints = allowed[keep]
        return out

    def _refine(self, found: list[Best], at: Ints) -> list[Best]:
        """Narrow the threshold around the best ones, orders and their reverses, in two sweeps."""
        both = orders.distinct(o for b in found for o in (b.order, b.order[::-1]))
        middle = sorted({b.threshold_s for b in found})
        grid = np.unique(np.concatenate([m * np.geomspace(1 / 1.3, 1.25, 7) for m in middle]))
        found = (self._best_of(both, grid, at) + found)[: self.finalists]
        fine = found[0].threshold_s * np.geomspace(0.96, 1.03, 7)
        again = self._best_of(orders.distinct(b.order for b in found[:2]), fine, at)
        return sorted([*again, *found], key=lambda b: (not b.score.fits, b.score.step_s))[: self.finalists]

    def _polish(self, best: Best) -> Best:
        """Move single cuts to any allowed neighbour position while that helps."""
        allowed = self._allowed()
        for _ in range(2):
            before = best.score.step_s
            for k in range(len(best.chain.cuts)):
                here = int(np.searchsorted(allowed, best.chain.cuts[k]))
                for p in allowed[max(1, here - 3) : here + 4]:
                    cuts = (*best.chain.cuts[:k], int(p), *best.chain.cuts[k + 1 :])
                    bounds = (0, *cuts, self.costs.w.atoms)
                    if p != best.chain.cuts[k] and bounds[k] < p < bounds[k + 2]:
                        chain, score = self._fit(best.chain.hosts, cuts, best.threshold_s)
                        if score.fits and score.step_s < best.score.step_s * (1 - 1e-9):
                            best = Best(chain, score, best.order, best.threshold_s)
            if best.score.step_s >= before * (1 - 1e-4):
                break
        return best

    def _local(self, found: list[Best]) -> list[Best]:
        """Hill climbing over orders: move, reverse and swap runs of a fence, move single devices."""
        rng = random.Random(len(self.costs.net))
        at = self._fine_positions()
        fence_of = {d: n for n, f in enumerate(self.fences) for d in f}
        best, idle = found[0], 0
        for _ in range(self.local_rounds):
            order = self._short_order(best)
            near = orders.neighbours(order, fence_of, rng, LOCAL_ORDERS)
            thresholds = best.threshold_s * np.array([0.93, 0.98, 1.0])
            tried = self._best_of(near, thresholds, at)
            tried = [self._polish(b) for b in tried[:2]]
            better = min(tried, key=lambda b: (not b.score.fits, b.score.step_s), default=best)
            if better.score.fits and better.score.step_s < best.score.step_s * (1 - 1e-6):
                best, idle = better, 0
                found = [best, *found][: self.finalists]
            elif (idle := idle + 1) == 3:
                break
        refined = [self._polish(b) for b in self._refine([best], at)[:1]]
        return sorted([*refined, *found], key=lambda b: (not b.score.fits, b.score.step_s))[: self.finalists]

    def _short_order(self, best: Best) -> orders.Order:
        """The order without most of the devices that the chain skips: only the fastest eight of them stay."""
        if not self.skip:
            return best.order
        used = set(best.chain.hosts)
        spare = sorted((d for d in best.order if d not in used), key=lambda d: float(self.costs.work_s[d, -1]))[:8]
        return tuple(d for d in best.order if d in used or d in spare)

    def _shortage(self) -> str:
        need = self.costs.held_bytes[-1]
        have = float(self.costs.room_bytes[self.costs.room_bytes > 0].sum())
        return (
            f"no plan fits: the model needs {need / 2**30:.2f} GiB, the peers offer {have / 2**30:.2f} GiB usable "
            f"(largest {self.costs.room_bytes.max() / 2**30:.2f}); "
            "raise memory caps, add peers or use fewer micro-batches"
        )

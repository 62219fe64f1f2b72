"""OP-Fence: the plan of least step time over fences, orders, cuts and codecs (FusionLLM 4; DESIGN 5)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner import bound, dp, exact, orders, rings
from fusion_p2p.planner.bound import Component
from fusion_p2p.planner.costs import INF, Chain, Costs, Score
from fusion_p2p.planner.dp_tables import Ints, build, groups_of
from fusion_p2p.planner.fences import Fences, find_fences
from fusion_p2p.planner.workload import Floats

LEAST_DEVICES, MOST_DEVICES = 28, 64  # considered for one chain that may skip; longer chains pay in latency
SCREEN_POSITIONS = 144
FASTEST = 8  # devices that are always considered
NEAR = 4  # a cut may wait for a cheaper one up to 1/NEAR of the pace away
SPARE = 12  # devices that no chain found so far uses, kept in orders that are looked at closely
SCREENED = 8  # orders whose chains are scored after screening
WRAPPED = 2.0  # of its memory that a chain may take which another device relieves at both ends
RINGS, STARTS = 8, 6  # of tied weights: rings polished; devices tried for the first stage
WIDE = 3  # orders looked at closely where there is time for a local search
IDLE = 6  # rounds of local search without a gain, after which it ends
LOCAL_ORDERS = 24  # neighbour orders of one round of local search
DOUBT, RISK = 1.5, 1 / 3  # links may be this many times slower than measured; the weight of that case
SPREAD = np.array([1.02, 1.2, 1.45, 1.8, 2.4, 3.5])  # first thresholds, in units of the bound's bottleneck


@dataclass(frozen=True)
class Best:
    """The best chain found so far for one order."""

    chain: Chain
    score: Score
    order: orders.Order
    threshold_s: float


@dataclass(frozen=True, eq=False)
class Searched:
    """Finalists, best first, over the whole network's device indices; the bound and fences they are judged by."""

    finalists: list[Best]
    lower_bound_s: float
    fences: Fences


def search(costs: Costs, *, skip: bool, local_rounds: int, pinned: tuple[int, ...] | None = None) -> Searched:
    """Plan on the most promising devices; on more of them where those lack the memory."""
    comps = bound.components(costs, must_use_all=not skip)
    if not comps:
        raise InputError("no peer offers memory for a stage; ask volunteers to raise their memory cap")
    fences = find_fences(costs.net, costs.w.typical_cut_bytes() * costs.ladder.rungs[-1].byte_share)
    usable = np.flatnonzero(costs.room_bytes > 0).tolist()
    first = (
        min(MOST_DEVICES, max(LEAST_DEVICES, *(2 * c.count for c in comps[:2]))) if not local_rounds else MOST_DEVICES
    )
    limits = [len(usable)] if not skip else sorted({min(len(usable), n) for n in (first, 160, len(usable))})
    for limit in limits:
        keep = sorted(_promising(costs, comps, usable, limit))
        inner = Search(costs.subset(keep), _among(fences, keep), comps[0].bottleneck_s, skip, local_rounds, pinned)
        found = inner.run()
        if found:
            return Searched([_renamed(b, keep) for b in found], comps[0].bound_s, fences)
    raise InputError(_shortage(costs))


def _promising(costs: Costs, comps: list[Component], usable: list[int], limit: int) -> set[int]:
    """Devices of the best neighbourhoods and components, and the fastest of all; then the roomiest."""
    if limit >= len(usable):
        return set(usable)
    keep: dict[int, None] = {}
    sets = [c.members[: c.count + max(2, c.count // 3)] for c in comps[:2]]
    near = bound.neighbourhoods(costs, comps[0].bottleneck_s)
    fastest = np.argsort(np.where(costs.room_bytes > 0, costs.work_s[:, -1], np.inf), kind="stable")[:FASTEST]
    for chosen in [*near[:1], *sets[:1], fastest, *near[1:], *sets[1:]]:
        for d in chosen.tolist():
            keep.setdefault(d)
            if len(keep) >= limit:
                return set(keep)
    for d in sorted(usable, key=lambda d: -float(costs.room_bytes[d])):
        if len(keep) < limit:
            keep.setdefault(d)
    return set(keep)


def _among(fences: Fences, keep: list[int]) -> Fences:
    where = {d: i for i, d in enumerate(keep)}
    return tuple(g for f in fences if (g := tuple(where[d] for d in f if d in where)))


def _renamed(b: Best, keep: list[int]) -> Best:
    hosts = tuple(keep[h] for h in b.chain.hosts)
    return replace(b, chain=replace(b.chain, hosts=hosts), order=tuple(keep[d] for d in b.order))


def _shortage(costs: Costs) -> str:
    room = costs.room_bytes[costs.room_bytes > 0]
    whole = float(costs.stage_bytes((0, costs.w.atoms))[0])
    if whole <= room.sum():
        most = float(costs.stage_bytes(range(costs.w.atoms + 1)).max())
        return (
            f"no plan fits: the largest atom needs {most / 2**30:.2f} GiB and the largest peer offers "
            f"{room.max() / 2**30:.2f} GiB usable; raise memory or upload caps, or use fewer micro-batches"
        )
    return (
        f"no plan fits: the model needs {whole / 2**30:.2f} GiB, the peers offer "
        f"{room.sum() / 2**30:.2f} GiB usable; raise memory caps, add peers or use fewer micro-batches"
    )


@dataclass(eq=False)
class Search:
    """One planning problem over all devices of `costs`. `run` gives the finalists, best first; none if nothing fits."""

    costs: Costs
    fences: Fences
    pace_s: float  # bottleneck at the lower bound
    skip: bool
    local_rounds: int
    pinned: tuple[int, ...] | None  # only these positions may be cut
    finalists: int = 3

    @property
    def wide(self) -> int:
        """Orders of the screening that are looked at closely."""
        return WIDE if self.local_rounds else 2

    def run(self) -> list[Best]:
        costs = self.costs
        devices = range(len(costs.net))
        if self.skip and len(devices) <= exact.MOST_DEVICES:
            return self._small()
        self.group = groups_of(costs)
        trip, _ = bound.cheapest_hop(costs)
        candidates = orders.candidate_orders(self.fences, trip, costs.work_s[:, -1])
        if not self.skip:  # both ends of the model lie on given devices: the direction matters
            candidates = orders.distinct(o for c in candidates for o in (c, c[::-1]))
        at = self._fine_positions()
        found = self._screen(candidates, self._thinned(at))
        if not found:
            return []
        found = [self._polish(b) for b in self._refine(self._short(found[: self.wide]), at)]
        found.sort(key=_rank)
        if self.local_rounds:
            found = self._local(found)
        found = [b for b in [*found, *self._rings(found), *self._hedged(found, at)] if b.score.fits]
        return sorted(found, key=lambda b: regret_s(costs, b.chain, b.score))[: self.finalists]

    def _small(self) -> list[Best]:
        """The true optimum, and rings where weights are tied."""
        costs, at = self.costs, self._allowed()
        every = range(len(costs.net))
        found = [exact.best_of_all_orders(costs, every, at)]
        if costs.w.shared:
            found.append(exact.best_of_all_orders(costs.without_shared(), every, at))
            roomy = costs.without_shared(WRAPPED)
            found += [exact.best_of_all_orders(roomy, [d for d in every if d != x], at) for x in every]
        chains = [(c.hosts, c.cuts, s.bottleneck_s) for c, s in (f for f in found if f is not None)]
        best = [Best(*self._fit(h, cuts, pace_s), h, pace_s) for h, cuts, pace_s in chains]
        best += self._rings(best)
        return sorted((b for b in best if b.score.fits), key=_rank)[:1]

    def _rings(self, found: list[Best]) -> list[Best]:
        """Chains that end where they begin, where a tied weight would else travel; the best few, polished."""
        if not self.costs.w.shared or self.pinned is not None or not self.skip:
            return []
        order = found[0].order if found else tuple(range(len(self.costs.net)))
        made = []
        for hosts, cuts in rings.candidates(self.costs, [b.chain for b in found], self._allowed()):
            chain, score = self.costs.fit(hosts, cuts)
            if score.fits:
                made.append(Best(chain, score, order, score.bottleneck_s))
        return [self._polish(b) for b in sorted(made, key=_rank)[:RINGS]]

    def _hedged(self, found: list[Best], at: Ints) -> list[Best]:
        """Chains along the best orders that would be best if every link were DOUBT times slower than measured."""
        thresholds = found[0].threshold_s * np.geomspace(0.95, 1.2, 7)
        order = orders.distinct(b.order for b in found[:2])
        return [self._polish(b) for b in self._best_of(order, thresholds, at, doubt=DOUBT)[:2]]

    def _allowed(self) -> Ints:
        n = self.costs.w.atoms
        if self.pinned is not None:
            return np.array([0, *self.pinned, n], dtype=np.int64)
        return np.flatnonzero(self.costs.cut_allowed)

    def _screen(self, candidates: list[orders.Order], at: Ints) -> list[Best]:
        """Every order at a few thresholds, all hops charged the dearest codec; best chains, best first.

        Higher thresholds follow while nothing fits or the best is at the top, and could still pay.
        """
        thresholds = self.pace_s * SPREAD
        found: list[Best] = []
        for _ in range(12):
            found = sorted([*self._best_of(candidates, thresholds, at, relaxed=True), *found], key=_rank)
            top = float(thresholds[-1])
            if found and (found[0].threshold_s < top * 0.999 or top * self.costs.m > found[0].score.step_s):
                break
            thresholds = thresholds * float(SPREAD[-1] / SPREAD[0])
        return found

    def _best_of(
        self,
        candidates: list[orders.Order],
        thresholds: Floats,
        at: Ints,
        *,
        relaxed: bool = False,
        doubt: float = 1.0,
        beat_s: float = INF,
        starts: Sequence[int | None] = (),
    ) -> list[Best]:
        """The best chains of the best few orders over their thresholds (one sweep), best first.

        thresholds: (b,) for every order, or (orders, b). Those at which no chain beats `beat_s` are not tried.
        `starts`: per order the device of its first stage, so that tied weights count (empty, or all None: any will do).
        """
        costs = self.costs if doubt == 1.0 else self.costs.with_slower_links(doubt)
        grid = np.broadcast_to(thresholds, (len(candidates), thresholds.shape[-1]))
        paced = (costs.m - 1) * grid
        i, j = np.nonzero(paced + float(costs.work_s[:, -1].min()) < beat_s)
        if not len(i):
            return []
        every, of = np.unique(grid[i, j], return_inverse=True)
        asked = {d for order in candidates for d in order}
        t = build(costs, every, at, self.group, relaxed=relaxed, devices=asked)
        first = np.array(starts)[i] if starts and starts[0] is not None else None
        f = dp.sweep(t, np.array(candidates)[i], of, skip=self.skip, starts=first)
        value = np.full(grid.shape, INF)
        value[i, j] = f.round_trip_s + paced[i, j]
        limit = np.sort(value.min(axis=1))[min(len(candidates), SCREENED if relaxed else 4) - 1]
        out = []
        for n in range(len(candidates)):
            b = int(value[n].argmin())
            if np.isfinite(value[n, b]) and value[n, b] <= limit:
                at_s = float(grid[n, b])
                chain, score = self._fit(*f.chain(int(np.flatnonzero((i == n) & (j == b))[0])), at_s)
                out.append(Best(chain, score, candidates[n], at_s))
        out.sort(key=_rank)
        return list({x.chain: x for x in reversed(out)}.values())[::-1]

    def _fit(self, hosts: tuple[int, ...], cuts: tuple[int, ...], threshold: float) -> tuple[Chain, Score]:
        at = Chain(hosts, cuts, self.costs.rungs_at(hosts, cuts, threshold))
        options = [(at, self.costs.score(at))]
        if len(self.costs.ladder.rungs) > 1:
            options.append(self.costs.fit(hosts, cuts))
        return min(options, key=lambda o: (not o[1].fits, o[1].step_s))

    def _fine_positions(self) -> Ints:
        """Allowed positions but those with at least twice the bytes of a position at most 1/NEAR of the pace away."""
        allowed = self._allowed()
        if self.costs.ladder.rungs[-1].encode_s_per_element == 0.0 or not self.skip:
            return allowed
        fastest = self.costs.work_s[:, allowed].min(axis=0)
        near = self.pace_s / NEAR
        size = self.costs.w.cut_bytes[allowed]
        low = np.searchsorted(fastest, fastest - near)
        high = np.searchsorted(fastest, fastest + near, side="right")
        least = np.array([size[a:b].min() for a, b in zip(low, high, strict=True)])
        keep = (size < 2 * least) | (fastest == 0)
        keep[[0, -1]] = True
        out: Ints = allowed[keep]
        return out

    def _starts(self, found: list[Best]) -> Sequence[int | None]:
        """Devices worth trying for the first stage: those near the last one, where tied weights are to travel."""
        if not self.costs.w.shared:
            return [None]
        w = max(self.costs.w.shared, key=lambda w: w.size_bytes)
        last = [b.chain.hosts[-1] for b in found]
        used = dict.fromkeys(h for b in found for h in b.chain.hosts)
        away = {h: min(float(w.size_bytes * self.costs.both_s_per_byte[h, e]) for e in last) for h in used}
        return sorted(used, key=lambda h: away[h])[:STARTS]

    def _thinned(self, at: Ints) -> Ints:
        """At most about SCREEN_POSITIONS of `at`: of each equal share of the work, the one with the least bytes."""
        if len(at) <= SCREEN_POSITIONS:
            return at
        done = self.costs.work_s[:, at].mean(axis=0)
        share = np.minimum(done / done[-1] * SCREEN_POSITIONS, SCREEN_POSITIONS - 1).astype(np.int64)
        order = np.lexsort((self.costs.w.cut_bytes[at], share))  # by share, then by bytes
        first = np.flatnonzero(np.diff(share[order], prepend=-1))
        keep: Ints = np.unique(np.concatenate([[at[0], at[-1]], at[order[first]]]))
        return keep

    def _refine(self, found: list[Best], at: Ints) -> list[Best]:
        """Narrow the threshold around the best ones, orders and their reverses, in two sweeps."""
        of: dict[tuple[orders.Order, int | None], float] = {}
        for b in found[: self.wide]:
            for order in (b.order, b.order[::-1]):
                for start in self._starts(found[: self.wide]):
                    of.setdefault((order, start), b.threshold_s)
        grid = np.array(list(of.values()))[:, None] * np.geomspace(1 / 1.3, 1.25, 7)
        best_s = found[0].score.step_s if found[0].score.fits else INF
        starts = [start for _, start in of]
        again = self._best_of([order for order, _ in of], grid, at, beat_s=best_s, starts=starts)
        found = sorted([*again, *found], key=_rank)[: self.finalists]
        fine = found[0].threshold_s * np.geomspace(0.96, 1.03, 7)
        ends = {(b.order, b.chain.hosts[0] if self.costs.w.shared else None): None for b in found[: self.wide]}
        starts = [start for _, start in ends]
        again = self._best_of([order for order, _ in ends], fine, at, beat_s=best_s, starts=starts)
        return sorted([*again, *found], key=_rank)[: self.finalists]

    def _polish(self, best: Best) -> Best:
        """Move the cuts beside the slowest stage or hop to allowed positions nearby while that helps."""
        allowed = self._allowed()
        for _ in range(20):
            chain, score = best.chain, best.score
            pace = [*score.stage_s, *score.hop_s]
            slowest = max(range(len(pace)), key=lambda i: pace[i])
            at_stage = slowest < len(chain.hosts)
            cuts = (slowest - 1, slowest) if at_stage else (slowest - len(chain.hosts),)
            options = [self._moved(best, k, allowed) for k in cuts if 0 <= k < len(chain.cuts)]
            better = min((b for o in options for b in o), key=lambda b: b.score.step_s, default=best)
            if better.score.step_s >= score.step_s * (1 - 1e-9):
                break
            best = better
        return best

    def _moved(self, best: Best, k: int, allowed: Ints) -> list[Best]:
        """Chains with cut k at other positions nearby that fit."""
        cuts, bounds = best.chain.cuts, best.chain.bounds(self.costs.w.atoms)
        here = int(np.searchsorted(allowed, cuts[k]))
        out = []
        for p in allowed[max(1, here - 3) : here + 4].tolist():
            if p != cuts[k] and bounds[k] < p < bounds[k + 2]:
                chain, score = self._fit(best.chain.hosts, (*cuts[:k], p, *cuts[k + 1 :]), best.threshold_s)
                if score.fits:
                    out.append(Best(chain, score, best.order, best.threshold_s))
        return out

    def _local(self, found: list[Best]) -> list[Best]:
        """Hill climbing over orders: move, reverse and swap runs of a fence, move single devices."""
        rng = random.Random(len(self.costs.net))
        at = self._fine_positions()
        fence_of = {d: n for n, f in enumerate(self.fences) for d in f}
        best, idle = found[0], 0
        for _ in range(self.local_rounds):
            near = orders.neighbours(best.order, fence_of, rng, LOCAL_ORDERS)
            thresholds = best.threshold_s * np.array([0.93, 0.98, 1.0])
            tried = self._best_of(near, thresholds, at)
            tried = [self._polish(b) for b in tried[:2]]
            better = min(tried, key=_rank, default=best)
            if better.score.fits and better.score.step_s < best.score.step_s * (1 - 1e-6):
                best, idle = better, 0
                found = [best, *found][: self.finalists]
            elif (idle := idle + 1) == IDLE:
                break
        refined = [self._polish(b) for b in self._refine([best], at)[:1]]
        return sorted([*refined, *found], key=_rank)[: self.finalists]

    def _short(self, found: list[Best]) -> list[Best]:
        """With orders that lack most of the devices that none of the chains uses: only the fastest SPARE stay."""
        if not self.skip:
            return found
        keep = {d for b in found for d in b.chain.hosts}
        whole = self.costs.work_s[:, -1]
        left = {d for b in found for d in b.order} - keep
        keep.update(sorted(left, key=lambda d: (float(whole[d]), d))[:SPARE])
        return [replace(b, order=tuple(d for d in b.order if d in keep)) for b in found]


def regret_s(costs: Costs, chain: Chain, score: Score) -> float:
    """Step seconds, moved by RISK towards those that the chain would take with links DOUBT times slower."""
    slower = costs.with_slower_links(DOUBT).score(chain).step_s
    return score.step_s + RISK * (slower - score.step_s)


def _rank(b: Best) -> tuple[bool, float]:
    return not b.score.fits, b.score.step_s

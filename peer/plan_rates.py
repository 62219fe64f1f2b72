"""How fast devices and links really are, kept steady: a figure changes only when it is clearly another. Pure.

A device's correction is its measured over its predicted seconds. It comes from trial steps first, then from what the
stages report of real steps, and stays with the device wherever its stages go. What a stage's pieces take beyond their
prediction from the beginning is the pieces' own, and goes where they go: only a change tells of the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fusion_p2p.plan import Plan
from fusion_p2p.planner import AtomTimes, Link
from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer, SwarmLinks

# New over known, either way, from which a device's correction changes. Noise of +-10% never does, nor a little of
# others' work on a shared machine; and less can hardly bring a gain that outweighs moving.
CLEAR = 1.4
CLEAR_SHAPE = 1.1  # the same for a stage's pieces, beside the other stages'
FORGET_S = 300.0  # until a device that has no stage is given another chance; doubled with each one
MOST_DOUBLED = 2
CLEAR_LINK = 1.5  # the same for a link's rate; probes of a used link vary more
Key = tuple[str, str]  # peer, device


class Rates:
    """Corrections by (peer, device)."""

    def __init__(self) -> None:
        self._known: dict[Key, float] = {}  # by real steps
        self._trial: dict[Key, float] = {}  # by trial steps
        self._shape: list[float] = []  # by atom: seconds over its prediction
        self._idle_since_s: dict[Key, float] = {}
        self._chances: dict[Key, int] = {}

    @property
    def real(self) -> Collection[Key]:
        """Devices of which real steps were seen: no trial step knows better."""
        return self._known.keys()

    def take(self, offers: Iterable[DeviceOffer]) -> None:
        """What trial steps said before the first step."""
        self.hear_trials({(o.peer, o.device): o.correction for o in offers if o.correction != 1.0})

    def hear_trials(self, told: Mapping[Key, float]) -> None:
        """Corrections that trial steps show."""
        self._trial |= told

    def of(self, key: Key) -> float:
        """A device's correction. One that was not seen at work is taken for as far from its trial step, or without
        one from its record's promise, as the others are: what real steps cost beyond, they cost everywhere."""
        if key in self._known or not self._known:
            return self._known.get(key, self._trial.get(key, 1.0))
        if key in self._trial:
            drift = statistics.median(c / self._trial.get(k, c) for k, c in self._known.items())
            return self._trial[key] * drift
        return statistics.median(self._known.values())

    def scaled(self, atoms: Sequence[Atom]) -> list[Atom]:
        """The atoms as heavy as they showed to be."""
        pairs = zip(atoms, self._shape or [1.0] * len(atoms), strict=True)
        return [a if f == 1.0 else replace(a, heavier=f) for a, f in pairs]

    def shape(
        self,
        bounds: Sequence[int],
        placed: Mapping[int, Key],
        measured_s: Mapping[int, float],
        prior_s: Mapping[int, float],
    ) -> bool:
        """The first look at these cuts (`bounds` of atoms): what a stage takes beyond the others is its pieces' own.
        Whether anything changed."""
        ratio = {k: s / (prior_s[k] * self.of(placed[k])) for k, s in measured_s.items() if prior_s.get(k, 0.0) > 0}
        common = statistics.median(ratio.values()) if ratio else 1.0
        clear = {k: r / common for k, r in ratio.items() if common > 0 and not within(r / common, 1.0, CLEAR_SHAPE)}
        self._shape = self._shape or [1.0] * bounds[-1]
        for k, factor in clear.items():
            for i in range(bounds[k], bounds[k + 1]):
                self._shape[i] *= factor
        return bool(clear)

    def use(self, used: Collection[Key], now_s: float) -> bool:
        """Only these have stages now. Whether another device was given a new chance: what slowed it may be over."""
        for key in used:
            self._idle_since_s.pop(key, None)
        chances = []
        for key in (self._known.keys() | self._trial.keys()) - set(used):
            since_s = self._idle_since_s.setdefault(key, now_s)
            if now_s - since_s >= FORGET_S * 2 ** min(self._chances.get(key, 0), MOST_DOUBLED):
                chances.append(key)
        for key in chances:
            self._chances[key] = self._chances.get(key, 0) + 1
            del self._idle_since_s[key]
            self._known.pop(key, None)
            self._trial.pop(key, None)
        return bool(chances)

    def hear(self, measured: Mapping[Key, float]) -> bool:
        """Corrections that real steps show; whether any is clearly another than what was known."""
        before = {k: self.of(k) for k in measured}
        news = {k: c for k, c in measured.items() if not within(c, before[k], CLEAR)}
        self._known |= before | news
        return bool(news)

    def correct(self, offers: Iterable[DeviceOffer]) -> list[DeviceOffer]:
        """The offers with what is known of their devices."""
        return [replace(o, correction=self.of((o.peer, o.device))) for o in offers]


def within(new: float, old: float, factor: float) -> bool:
    return old > 0 and 1 / factor <= new / old <= factor


def steady(known: SwarmLinks, measured: SwarmLinks) -> SwarmLinks:
    """`measured`, with the known figure of every link that is not clearly faster or slower now."""
    before = {(x.src, x.dst): x for x in known.links}

    def one(new: Link) -> Link:
        old = before.get((new.src, new.dst))
        same = old is not None and within(new.bandwidth_bytes_per_s, old.bandwidth_bytes_per_s, CLEAR_LINK)
        return old if same and old is not None else new

    links = tuple(map(one, measured.links))
    if set(links) == set(known.links) and measured.fences == known.fences:
        return known
    return SwarmLinks(links=links, fences=measured.fences)


def corrections(
    placed: Mapping[int, Key], measured_s: Mapping[int, float], prior_s: Mapping[int, float]
) -> dict[Key, float]:
    """Per device, the seconds of its stages over what its record alone promises; `placed`: stage -> device."""
    seen, promised = dict[Key, float](), dict[Key, float]()
    for stage, key in placed.items():
        if measured_s.get(stage, 0.0) > 0 and prior_s.get(stage, 0.0) > 0:
            seen[key] = seen.get(key, 0.0) + measured_s[stage]
            promised[key] = promised.get(key, 0.0) + prior_s[stage]
    return {key: seen[key] / promised[key] for key in seen}


def corrected(
    plan: Plan,
    atoms: int,
    offers: Sequence[DeviceOffer],
    shape: AtomTimes | None,
    ratio: Mapping[Key, float],
    band: float,
) -> list[DeviceOffer]:
    """The offers as the trial steps of `plan` show them. `ratio`: a device's measured over its promised seconds;
    `shape`: of the trainer's CPU, for devices of its kind that have told none.

    A device within `band` of the median is off by the median, which is what a model's operators cost beyond what rates
    promise; what its stage takes beyond that is its pieces' own and goes where they go. Another is off by its own
    ratio. Either way every stage of `plan` then promises what was measured.
    """

    def shape_of(o: DeviceOffer) -> AtomTimes | None:
        return o.shape if o.shape is not None or o.device_class != "cpu" else shape

    usual = statistics.median(ratio.values())
    shaped = {(o.peer, o.device) for o in offers if shape_of(o) is not None}
    alike = {key for key, r in ratio.items() if key in shaped and within(r, usual, band)}
    pieces, bounds = np.ones(atoms), (0, *plan.numerics.cuts, atoms)
    for p in plan.placement:
        if (p.peer, p.device) in alike:
            pieces[bounds[p.stage] : bounds[p.stage + 1]] = ratio[p.peer, p.device] / usual
    out = []
    for o in offers:
        key, known = (o.peer, o.device), shape_of(o)
        factor = usual if key in alike else ratio.get(key, usual)
        if known is not None:
            told = AtomTimes(forward_s=known.forward_s * pieces, backward_s=known.backward_s * pieces)
            before_s, after_s = (float(t.forward_s.sum() + t.backward_s.sum()) for t in (known, told))
            o, factor = replace(o, shape=told), factor * after_s / before_s
        out.append(replace(o, correction=o.correction * factor))
    return out


def names(offers: Sequence[DeviceOffer]) -> frozenset[Key]:
    return frozenset((o.peer, o.device) for o in offers)

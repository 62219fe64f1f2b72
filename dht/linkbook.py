"""Every link of the swarm from few measurements, each with where it is from and how far it may be off. Pure.

    book = LinkBook(peers, links, fences)      # from Board.peers(), Board.links(), Board.fences()
    book.link(a, b)                            # LinkEstimate from peer a to peer b

Measured is best: a link counts as the lower of both ends' figures. Else the leaders' summaries of the two fences, held
against what each end was measured to reach at most; else only what the ends reach; round trips from coordinates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dht.coordinates import Coordinate, from_point, predict_rtt_s
from dht.fence_records import FenceView, LinkFigure, LinksRecord, LinkSummary
from dht.identity import public_key_of
from dht.records import NO_FENCE, PeerRecord

Source = Literal["measured", "one end", "fence", "ends", "none"]
UNCERTAINTY: dict[Source, float] = {"measured": 1.15, "one end": 1.5, "fence": 2.0, "ends": 4.0, "none": 100.0}
_DEFAULT_RTT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """One direction. `uncertainty`: the rate may be off by this factor both ways. A rate of 0 is unknown."""

    bytes_per_s: float
    rtt_s: float
    uncertainty: float
    source: Source
    relayed: bool = False


class LinkBook:
    """Any link from what peers, links and fences published: measured, of its fences, or guessed from coordinates."""

    def __init__(
        self, peers: Iterable[PeerRecord], links: Iterable[LinksRecord], fences: Iterable[FenceView] = ()
    ) -> None:
        self._fence = {p.peer: p.fence for p in peers}
        self._figures: dict[tuple[bytes, bytes], LinkFigure] = {}  # (publisher, other)
        self._coordinates: dict[str, Coordinate] = {}
        self._up: dict[str, float] = {}
        self._down: dict[str, float] = {}
        self._summaries: dict[tuple[str, str], LinkSummary] = {}
        for record in links:
            self._add(record)
        for fence in fences:
            self._summaries[fence.id, fence.id] = fence.summary
            for link in fence.outside:
                self._summaries[fence.id, link.fence] = link.out

    def _add(self, record: LinksRecord) -> None:
        key = public_key_of(record.peer)
        for figure in record.links:
            self._figures[key, figure.peer] = figure
        there = from_point(record.coordinate, record.error)
        if there is not None:
            self._coordinates[record.peer] = there
        self._up[record.peer] = max((_rate(f.up_kbps) for f in record.links), default=0.0)
        self._down[record.peer] = max((_rate(f.down_kbps) for f in record.links), default=0.0)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(sorted(self._fence))

    def fences(self) -> tuple[tuple[str, ...], ...]:
        """The members of each fence, by peer id; peers of none are left out."""
        groups: dict[str, list[str]] = {}
        for peer, fence in sorted(self._fence.items()):
            if fence != NO_FENCE:
                groups.setdefault(fence, []).append(peer)
        return tuple(tuple(group) for _, group in sorted(groups.items()))

    def link(self, src: str, dst: str) -> LinkEstimate:
        """From `src` to `dst`."""
        a, b = public_key_of(src), public_key_of(dst)
        ours, theirs = self._figures.get((a, b)), self._figures.get((b, a))
        rates = [_rate(f) for f in (ours.up_kbps if ours else 0, theirs.down_kbps if theirs else 0) if f > 0]
        rtts = [f.rtt_us / 1e6 for f in (ours, theirs) if f is not None and f.rtt_us]
        relayed = any(f.relayed for f in (ours, theirs) if f is not None)
        rtt_s = max(rtts) if rtts else self._rtt_s(src, dst)
        if rates:
            source: Source = "measured" if len(rates) == 2 else "one end"
            return LinkEstimate(
                bytes_per_s=min(rates), rtt_s=rtt_s, uncertainty=UNCERTAINTY[source], source=source, relayed=relayed
            )
        rate, source, spread = self._filled(src, dst)
        return LinkEstimate(
            bytes_per_s=rate, rtt_s=rtt_s, uncertainty=max(UNCERTAINTY[source], spread), source=source, relayed=relayed
        )

    def _filled(self, src: str, dst: str) -> tuple[float, Source, float]:
        ends = [r for r in (self._up.get(src, 0.0), self._down.get(dst, 0.0)) if r > 0]
        summary = self._summary(src, dst)
        if summary is not None and summary.kbps > 0:
            return min([_rate(summary.kbps), *ends]), "fence", summary.spread
        if len(ends) == 2:
            return min(ends), "ends", 0.0
        known = [_rate(s.kbps) for s in self._summaries.values() if s.kbps > 0]
        rate = min([statistics.median(known) / 2 if known else 0.0, *ends])
        return rate, "none", 0.0

    def _summary(self, src: str, dst: str) -> LinkSummary | None:
        a, b = self._fence.get(src, NO_FENCE), self._fence.get(dst, NO_FENCE)
        if NO_FENCE in (a, b):
            return None
        return self._summaries.get((a, b)) or self._summaries.get((b, a))

    def _rtt_s(self, src: str, dst: str) -> float:
        a, b = self._coordinates.get(src), self._coordinates.get(dst)
        if a is not None and b is not None and max(a.error, b.error) < 0.9:
            return predict_rtt_s(a, b)
        summary = self._summary(src, dst)
        return summary.rtt_us / 1e6 if summary is not None and summary.rtt_us else _DEFAULT_RTT_S


def _rate(kbps: int) -> float:
    return kbps * 1e3 / 8

"""Word against word: a host says that another sent what it must not, and only these two know (DESIGN section 2).

Nobody can prove what went over a stream between two others. So one word costs the accused its stage and a rest, two
hosts' words its trust; and who accuses a second peer that nobody else accuses is taken for the cause, which clears
those that it accused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DOUBT_S = 600.0  # without a stage after one host's word; doubled each time that the same host says so again
MOST_DOUBLED = 10


@dataclass(frozen=True, slots=True)
class Judgement:
    """`out` is given no stage for `for_s` seconds (infinite: it is not trusted again); `cleared` may have one again."""

    out: str
    for_s: float
    cleared: tuple[str, ...] = ()

    @property
    def for_good(self) -> bool:
        return math.isinf(self.for_s)


class Accusations:
    """Pure. One for a session, whatever the accusations are about."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, int]] = {}  # by whom -> of whom, how often

    def hear(self, by: str, of: str) -> Judgement:
        """`by` accuses `of`, once more or for the first time."""
        said = self._said.setdefault(by, {})
        said[of] = said.get(of, 0) + 1
        if self._accusers(of) > 1:
            return Judgement(of, math.inf)
        alone = tuple(peer for peer in said if self._accusers(peer) == 1)
        if len(alone) > 1:
            del self._said[by]
            return Judgement(by, math.inf, alone)
        return Judgement(of, DOUBT_S * 2 ** min(said[of] - 1, MOST_DOUBLED))

    def _accusers(self, peer: str) -> int:
        return sum(peer in said for said in self._said.values())

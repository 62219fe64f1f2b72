"""Who may hold a control stream at a volunteer: so few that no peer and no address range keeps others out. Pure.

Anybody can make up owners, runs and peer ids. So a stream holds a seat; when all are taken, a newcomer gets that of
whoever has nothing here: of the range and the peer with most seats, the one idle for longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_STREAMS = 64
MAX_PER_PEER = 4
MAX_PER_RANGE = MAX_STREAMS // 4  # a /24 of IPv4, a /48 of IPv6; this machine's own peers are one range too


@dataclass(eq=False, slots=True)
class Seat:
    """`run` is "" before the hello. `leave` ends the stream."""

    peer: str
    range: str
    since: float
    leave: Callable[[], None]
    run: str = ""


class Seats:
    """`holds`: whether anything of a run is here; such streams stay."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._taken: list[Seat] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, seat: Seat) -> str:
        """ "" if the seat is taken now, with another's stream ended for it where that was needed; else why not."""
        peers, ranges = Counter(s.peer for s in self._taken), Counter(s.range for s in self._taken if s.range)
        if peers[seat.peer] >= MAX_PER_PEER:
            return f"it has {MAX_PER_PEER} control streams"
        if seat.range and ranges[seat.range] >= MAX_PER_RANGE:
            return f"{seat.range} has {MAX_PER_RANGE} control streams"
        if len(self._taken) >= MAX_STREAMS:
            idle = [s for s in self._taken if not (s.run and self._holds(s.run))]
            if not idle:
                return f"{MAX_STREAMS} control streams are in use"
            out = min(idle, key=lambda s: (-ranges[s.range], -peers[s.peer], s.since))
            self._taken.remove(out)
            out.leave()
        self._taken.append(seat)
        return ""

    def give_up(self, seat: Seat) -> None:
        if seat in self._taken:
            self._taken.remove(seat)

"""`fusion-peer join` whose fencing sees two sites: python -m tests.cluster.site_peer SITES HOME [ADDRESS ...]

SITES: a JSON file {peer: site}. All is real but the figures of pings and probes, and the rounds, which come sooner.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dht.fencing import Fencing
from dht.probe import Pong, Prober
from peer import cli_peer

MBIT = 1e6 / 8
PACE = 0.2
PATIENT = "--beat-s", "2", "--dead-s", "30"  # a busy machine is no death


class Emulated:
    """The real prober, its figures replaced by those of two sites 400 ms and 2 Mbps apart: so far that no speed
    which a busy machine lends to a device makes up for it."""

    def __init__(self, prober: Prober, site: dict[str, int], me: str) -> None:
        self._prober, self._site, self._me = prober, site, me

    def _near(self, peer: str) -> bool:
        return self._site.get(peer) == self._site[self._me]

    async def ping(self, peer: str) -> Pong:
        pong = await self._prober.ping(peer)
        return Pong(1e-3 if self._near(peer) else 0.4, pong.beat)

    async def rates(self, peer: str) -> tuple[float, float]:
        rate = (1000 if self._near(peer) else 2) * MBIT
        return rate, rate


def main(sites: Path, home: str, *addresses: str) -> int:
    site = json.loads(sites.read_text())
    start = Fencing.start

    async def with_sites(board: Any, **how: Any) -> Fencing:
        me = board.transport.peer_id
        return await start(board, emulate=lambda prober: Emulated(prober, site, me), pace=PACE, **how)

    Fencing.start = with_sites  # type: ignore[method-assign, assignment]
    return cli_peer.main(
        ["join", *addresses, "--loopback", "--home", home, "--threads", "1", "--memory", "1GiB", *PATIENT]
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

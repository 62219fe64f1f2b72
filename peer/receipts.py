"""A volunteer's receipts: what its stages have accepted from their neighbours, signed and published for all to count.

Only a receiver's word on others is worth anything, so nothing here speaks of this peer's own work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dht.receipts import MAX_CREDITS, Credit, Receipt
from peer.volunteer import HostedStage

_MOST_FRAMES = 1 << 53


def receipts(me: str, stages: Mapping[tuple[str, int], HostedStage]) -> Iterable[Receipt]:
    """One for each run of which a stage here has accepted anything from a stage elsewhere."""
    by_run: dict[str, dict[int, Credit]] = {}
    for (run, _), held in sorted(stages.items()):
        took = held.status.accepted if held.status is not None else {}
        for stage, counts in sorted(took.items()):
            peer = held.hosts.get(stage, me)
            if peer == me or stage < 0:
                continue
            known = by_run.setdefault(run, {}).get(stage, Credit(peer, stage, 0, 0))
            by_run[run][stage] = Credit(
                peer,
                stage,
                min(_MOST_FRAMES, known.frames + counts.frames),
                known.bytes_accepted + counts.bytes,
                max(known.flops, float(f"{counts.flops:.6g}")),
            )
    for run, credits in by_run.items():
        yield Receipt(peer=me, run=run, credits=tuple(credits.values())[:MAX_CREDITS])

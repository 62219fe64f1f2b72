"""What one peer gives to others so that they find its swarm."""

from __future__ import annotations

import os
from collections.abc import Sequence

MOST_ADDRESSES = 4


def invite_line(addresses: Sequence[str]) -> str:
    """What others paste: every address that is not this host's own loopback, or that one if there is no other; the
    swarm's name, and the key of a private one, as `join` leaves them in its environment."""
    outside = [a for a in addresses if "/127." not in a and "/::1/" not in a and "/quic" not in a]
    words = ["fusion-peer join", *(outside[:MOST_ADDRESSES] or addresses[:1])]
    if name := os.environ.get("FUSION_SWARM_NAME", ""):
        words.append(f"--swarm-name {name}")
    if key := os.environ.get("FUSION_SWARM_KEY", ""):
        words.append(f"--swarm-key {key}")
    return " ".join(words)

"""How much of a device the frames of one channel may take: one rule, by which executors live and plans count. Bytes."""

from __future__ import annotations

UNDER_WAY_MOST_BYTES = 256 << 20
SPILL_SHARE = 0.25  # of --disk, or of what is free: for outboxes that memory cannot hold


def under_way_bytes(memory_bytes: int) -> int:
    """Most that a sender holds unacknowledged, and a receiver untaken, of an executor capped at `memory_bytes`."""
    return max(16 << 20, min(UNDER_WAY_MOST_BYTES, memory_bytes // 32))


def log_bytes(memory_bytes: int) -> int:
    """Most that a logged outbox keeps in memory for a replay. Plans count by the memory on offer."""
    return max(64 << 20, memory_bytes // 16)


def disk_shares(disk_bytes: float) -> tuple[float, float]:
    """(for sets, a device's own and those of others; for outboxes) of a disk, or of what --disk gives of it."""
    return (1.0 - SPILL_SHARE) * disk_bytes, SPILL_SHARE * disk_bytes

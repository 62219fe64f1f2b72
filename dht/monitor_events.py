"""What changed between two pictures, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dht.monitor import short_peer
from dht.monitor_views import EventInfo, FenceInfo, PeerInfo, Picture, RunInfo

MANY = 8  # arrivals or departures at once beyond these are told in one line


def changes(before: Picture, after: Picture) -> list[EventInfo]:
    """Events the observer saw itself, in no particular order of importance."""
    now = after.time
    out = _peer_changes({p.peer: p for p in before.peers}, {p.peer: p for p in after.peers}, now)
    old_runs = {r.run: r for r in before.runs}
    for run in after.runs:
        out += _run_changes(old_runs.get(run.run), run, now)
    out += _fence_changes({f.fence: f for f in before.fences}, {f.fence: f for f in after.fences}, now)
    if after.refused > before.refused:
        text = f"{after.refused - before.refused} records refused: forged, expired, malformed or of another version"
        out.append(EventInfo(time=now, kind="note", text=text))
    return out


def _peer_changes(old: dict[str, PeerInfo], new: dict[str, PeerInfo], now: float) -> list[EventInfo]:
    joined = [p for p in new.values() if p.peer not in old or (_gone(old[p.peer]) and not _gone(p))]
    silent = [p for p in new.values() if p.state == "silent" and p.peer in old and not _gone(old[p.peer])]
    left = [p for p in new.values() if p.state == "left" and p.peer in old and not _gone(old[p.peer])]
    out = _told([p for p in joined if not _gone(p)], "joined", "peer", now)
    out += _told(left, "left", "peer", now)
    for p in silent[:MANY] if len(silent) <= MANY else []:
        work = ", ".join(f"stage {h.stage} of {h.name or h.run[:8]}" for h in p.hosts if h.stage >= 0)
        text = f"{short_peer(p.peer)} is silent: not heard of for {now - p.published:.0f} s"
        out.append(EventInfo(time=now, kind="fault", peer=p.peer, text=text + (f" (hosts {work})" if work else "")))
    if len(silent) > MANY:
        out.append(EventInfo(time=now, kind="fault", text=f"{len(silent)} peers are silent"))
    for p in new.values():
        was = old.get(p.peer)
        if was and was.fence != p.fence and not _gone(p):
            text = f"{short_peer(p.peer)} moved to fence {p.fence or 'none'}"
            out.append(EventInfo(time=now, kind="fence", peer=p.peer, fence=p.fence or "", text=text))
    return out


def _gone(p: PeerInfo) -> bool:
    return p.state in ("silent", "left")


def _told(peers: list[PeerInfo], did: str, kind: str, now: float) -> list[EventInfo]:
    if len(peers) > MANY:
        return [EventInfo(time=now, kind=kind, text=f"{len(peers)} peers {did}")]
    return [EventInfo(time=now, kind=kind, peer=p.peer, text=f"{short_peer(p.peer)} {did}") for p in peers]


def _run_changes(old: RunInfo | None, new: RunInfo, now: float) -> list[EventInfo]:
    def event(kind: str, text: str) -> EventInfo:
        return EventInfo(time=now, kind=kind, run=new.run, text=text)

    if old is None:
        return [event("run", f"run {new.name} appeared: {new.state}")]
    out = []
    if old.state != new.state:
        reason = f": {new.reason}" if new.reason else ""
        kind = "fault" if new.state in ("failed", "silent") else "run"
        out.append(event(kind, f"run {new.name}: {old.state}, now {new.state}{reason}"))
    # A run's head and the record of its hosts are stored apart: the new plan's number may be read before its hosts.
    told = ([f"plan {old.plan} to {new.plan}"] if old.plan != new.plan else []) + list(_moves(old, new))
    if told:
        out.append(event("plan", f"run {new.name}: {', '.join(told)}"))
    if new.step < old.step and new.plan == old.plan:
        out.append(event("fault", f"run {new.name} went back from step {old.step} to {new.step}"))
    return out


def _moves(old: RunInfo, new: RunInfo) -> Iterable[str]:
    before = {(s.stage, s.replica): s.peer for s in old.stages}
    for s in new.stages:
        was = before.get((s.stage, s.replica))
        if was is not None and was != s.peer:
            yield f"stage {s.stage} moved from {short_peer(was)} to {short_peer(s.peer)}"
    if len(old.stages) != len(new.stages) and old.stages and new.stages:
        yield f"{len(old.stages)} stages became {len(new.stages)}"


def _fence_changes(old: dict[str, FenceInfo], new: dict[str, FenceInfo], now: float) -> list[EventInfo]:
    out = []
    for fence, info in new.items():
        was = old.get(fence)
        if was is None:
            text = f"fence {fence[:8]} formed under {short_peer(info.leader)}"
        elif was.leader != info.leader:
            text = f"fence {fence[:8]}: {short_peer(info.leader)} leads in place of {short_peer(was.leader)}"
        else:
            continue
        out.append(EventInfo(time=now, kind="fence", fence=fence, text=text))
    out += [
        EventInfo(time=now, kind="fence", fence=fence, text=f"fence {fence[:8]} has no leader any more")
        for fence in old
        if fence not in new
    ]
    return out

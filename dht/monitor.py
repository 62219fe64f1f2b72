"""What `fusion-monitor status` shows: one look at the board, as text for people and as JSON for programs.

Everything read here was written by strangers. Text is shown with control and bidirectional characters replaced.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dht import p2p
from dht.clock import swarm_clock
from dht.errors import SwarmUnreachable
from dht.node import Board
from dht.records import Device, PeerRecord
from dht.runs import RunView

SCHEMA = 1
UNKNOWN = "?"
MAX_DETAILED = 64  # the newest runs are shown with their parts, a look-up each


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The board at swarm time `time`."""

    swarm: tuple[str, ...]
    time: float
    peers: tuple[PeerRecord, ...]
    runs: tuple[RunView, ...]


async def take_snapshot(swarm: tuple[str, ...], *, run: str | None = None, timeout_s: float = 20.0) -> Snapshot:
    """Joins as a reader under a throw-away identity, reads, leaves. SwarmUnreachable, InputError, TransportError."""
    try:
        async with asyncio.timeout(timeout_s):
            with tempfile.TemporaryDirectory(prefix="fusion-monitor-") as folder:
                return await _look(swarm, run, Path(folder))
    except TimeoutError as error:
        raise SwarmUnreachable(f"the swarm at {', '.join(swarm)} has not answered in {timeout_s:g} s") from error


async def _look(swarm: tuple[str, ...], run: str | None, folder: Path) -> Snapshot:
    transport = await p2p.start(folder / "identity", host_addresses=(), bootstrap=swarm, client_only=True)
    try:
        board = await Board.start(transport, client_only=True)
        try:
            if run is not None:
                peers, found = await asyncio.gather(board.peers(), board.run(run))
                views: tuple[RunView, ...] = () if found is None else (found,)
            else:
                peers, heads = await asyncio.gather(board.peers(), board.runs())
                detailed = await asyncio.gather(*map(board.view, heads[:MAX_DETAILED]))
                views = (*detailed, *(RunView(run=head) for head in heads[MAX_DETAILED:]))
            return Snapshot(swarm=swarm, time=swarm_clock.now(), peers=peers, runs=views)
        finally:
            await board.close()
    finally:
        await transport.close()


# --- JSON


def as_json(snapshot: Snapshot) -> str:
    """The documented schema (dht/README.md); unknown values are null; pure ASCII."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "swarm": list(snapshot.swarm),
            "time": round(snapshot.time, 2),
            "peers": [_peer_json(peer, snapshot.time) for peer in snapshot.peers],
            "runs": [_run_json(view, snapshot.time) for view in snapshot.runs],
        },
        indent=2,
    )


def _peer_json(peer: PeerRecord, now: float) -> dict[str, Any]:
    return {
        "peer": peer.peer,
        "version": peer.version,
        "state": peer.state,
        "fence": peer.fence,
        "hours": peer.hours or None,
        "place": peer.place or None,
        "age_s": _age(peer.published, now),
        "devices": [{name: getattr(d, name) for name in Device.__struct_fields__} for d in peer.devices],
        "work": [{"run": w.run, "stage": w.stage} for w in peer.work],
    }


def _run_json(view: RunView, now: float) -> dict[str, Any]:
    run = view.run
    plain = ("run", "name", "trainer", "state", "epoch", "plan", "step", "total", "loss", "step_time_s", "tokens_per_s")
    return {
        **{name: getattr(run, name) for name in plain},
        "owner": run.owner.hex(),
        "reason": run.reason or None,
        "since": run.since or None,
        "wanted_peers": run.wanted_peers,
        "wanted_bytes": run.wanted_bytes or None,
        "created": run.created,
        "age_s": _age(run.published, now),
        "stages": [{"stage": s.stage, "replica": s.replica, "peer": s.peer, "device": s.device} for s in view.stages],
        "links": [
            {
                "src": link.src,
                "dst": link.dst,
                "bytes_sent": link.bytes_sent,
                "codec": link.codec or None,
                "why": link.why or None,
            }
            for link in view.links
        ],
        "events": [{"time": e.time, "text": e.text} for e in view.events],
    }


def _age(published: float, now: float) -> float:
    return round(max(0.0, now - published), 1)


# --- text


def as_text(snapshot: Snapshot) -> str:
    """Tables in plain lines; the same in a terminal and in a file."""
    lines = [f"{count_text(len(snapshot.peers), 'peer')}, {count_text(len(snapshot.runs), 'run')}"]
    if snapshot.peers:
        lines += ["", *_table(_PEER_HEAD, [_peer_row(peer, snapshot.time) for peer in snapshot.peers])]
    for view in snapshot.runs:
        lines += ["", *_run_lines(view, snapshot.time)]
    return "\n".join(lines)


_PEER_HEAD = ("PEER", "STATE", "DEVICE", "SPEED", "FREE", "WORK", "VERSION", "SEEN")


def _peer_row(peer: PeerRecord, now: float) -> tuple[str, ...]:
    first = peer.devices[0] if peer.devices else None
    more = f" +{len(peer.devices) - 1}" if len(peer.devices) > 1 else ""
    work = ", ".join(("trainer" if w.stage < 0 else f"stage {w.stage}") + f" of {w.run[:8]}" for w in peer.work[:3])
    return (
        short_peer(peer.peer),
        peer.state,
        UNKNOWN if first is None else f"{clean(first.kind)} {clean(first.name)[:24]}{more}",
        UNKNOWN if first is None else f"{first.flops_per_s / 1e9:.3g} GFLOP/s",
        UNKNOWN if first is None else size_text(first.free_bytes),
        work or "-",
        clean(peer.version),
        f"{_age(peer.published, now):.0f} s ago",
    )


def _run_lines(view: RunView, now: float) -> list[str]:
    run = view.run
    figures = [
        f"step {run.step}" + (f" of {run.total}" if run.total else ""),
        f"loss {UNKNOWN if run.loss is None else format(run.loss, '.4f')}",
        f"{UNKNOWN if run.step_time_s is None else format(run.step_time_s, '.3g')} s a step",
        f"{UNKNOWN if run.tokens_per_s is None else format(run.tokens_per_s, '.3g')} tokens/s",
    ]
    state = run.state + (f" for {_duration(now - run.since)}" if run.since else "")
    lines = [
        f"RUN {clean(run.name)} ({run.run[:12]}): {state}" + (f": {clean(run.reason)}" if run.reason else ""),
        f"  {', '.join(figures)}; trainer {short_peer(run.trainer)}, plan {run.plan}, "
        f"seen {_age(run.published, now):.0f} s ago",
    ]
    rows = [(str(s.stage), short_peer(s.peer), clean(s.device)) for s in view.stages]
    lines += [f"  {line}" for line in _table(("STAGE", "PEER", "DEVICE"), rows)] if rows else []
    sent = [f"{_end(k.src)}->{_end(k.dst)} {size_text(k.bytes_sent)}" for k in view.links]
    lines += [f"  sent: {', '.join(sent)}"] if sent else []
    return lines + [f"  {_duration(now - e.time)} ago: {clean(e.text)}" for e in view.events[-5:]]


def _end(stage: int) -> str:
    return "trainer" if stage < 0 else str(stage)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def clean(text: str) -> str:
    """`text` with characters that steer a terminal or turn the writing direction replaced."""
    return "".join("\ufffd" if unicodedata.category(c)[0] in "CZ" and c != " " else c for c in text)


def short_peer(peer_id: str) -> str:
    """The end of a peer id, which tells peers apart; all begin alike."""
    return f"..{peer_id[-8:]}"


def size_text(count: int) -> str:
    """Bytes with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for limit, unit in ((120, 1), (7200, 60), (172800, 3600)):
        if seconds < limit:
            return f"{seconds / unit:.0f} {'s' if unit == 1 else 'min' if unit == 60 else 'h'}"
    return f"{seconds / 86400:.0f} days"


def count_text(number: int, noun: str) -> str:
    """As in 1 peer, 2 peers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""What an observer has seen, in SQLite, bounded by age and size. Where it did not look there is a gap.

Peers, fences and slow facts of runs are kept as versions, each true from `first` to `last`; figures that change with
every step as samples. Threads: one call at a time.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec

from dht.errors import InputError
from dht.monitor_observer import Sight
from dht.monitor_views import EventInfo, FenceInfo, PeerInfo, Picture, RunInfo

SCHEMA = 1
GAP_S = 30.0  # the observer looks every few seconds; two looks further apart have a gap between them
_PRUNE_EVERY = 60
_KINDS: dict[str, Any] = {"peer": PeerInfo, "fence": FenceInfo, "run": RunInfo}
_TABLES = """
CREATE TABLE IF NOT EXISTS watch (first REAL, last REAL);
CREATE TABLE IF NOT EXISTS version (
    id INTEGER PRIMARY KEY, kind TEXT, subject TEXT, first REAL, last REAL, body BLOB);
CREATE INDEX IF NOT EXISTS version_last ON version (last);
CREATE TABLE IF NOT EXISTS sample (
    run TEXT, time REAL, step INTEGER, loss REAL, step_s REAL, tokens_s REAL, PRIMARY KEY (run, time)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS event (
    time REAL, kind TEXT, source TEXT, peer TEXT, run TEXT, fence TEXT, text TEXT, UNIQUE (time, run, text));
CREATE TABLE IF NOT EXISTS credit (
    run TEXT, issuer TEXT, peer TEXT, stage INTEGER, frames INTEGER, bytes INTEGER, flops REAL,
    seen_frames INTEGER, seen_bytes INTEGER, seen_flops REAL, updated REAL,
    PRIMARY KEY (run, issuer, peer, stage)) WITHOUT ROWID;
"""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of equal length; a row of nulls is a gap. `marks`: faults and plan changes."""

    time: list[float]
    step: list[int | None]
    loss: list[float | None]
    step_time_s: list[float | None]
    tokens_per_s: list[float | None]
    marks: list[EventInfo]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """When the observer looked, and what happened then."""

    first: float | None
    last: float | None
    watched: list[tuple[float, float]]
    marks: list[EventInfo]


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """Counted by neighbours' receipts. `flops`: the lowest that any of them says of each stage; null unknown."""

    peer: str
    frames: int
    bytes_accepted: int
    flops: float | None
    runs: int
    issuers: int


class History:
    """`path` None: in memory. `max_bytes` bounds the file."""

    def __init__(self, path: Path | None, *, max_age_s: float = 7 * 86400.0, max_bytes: int = 256 << 20) -> None:
        self._max_age_s, self._max_bytes = max_age_s, max_bytes
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], tuple[int, bytes]] = {}  # subject -> (version, its body)
        self._watch: tuple[int, float] | None = None
        self._published: dict[str, float] = {}
        self._kept = 0
        try:
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._db.executescript(
                "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;"
            )
            known = self._db.execute("PRAGMA user_version").fetchone()[0]
            if known not in (0, SCHEMA):
                raise InputError(
                    f"the history {path} has schema {known}, this is {SCHEMA}; move it away or name another"
                )
            self._db.executescript(_TABLES + f"PRAGMA user_version = {SCHEMA};")
        except sqlite3.Error as error:
            raise InputError(f"the history {path} cannot be used ({error}); name another with --history") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- writing

    def keep(self, sight: Sight) -> None:
        """Add one look of the observer."""
        picture = sight.picture
        if picture.error is not None:
            return
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._keep_watch(picture.time)
                self._keep_versions(picture)
                for run in picture.runs:
                    self._keep_run(run, picture.time)
                self._db.executemany(
                    "INSERT OR IGNORE INTO event VALUES (?,?,?,?,?,?,?)", [_event_row(e) for e in sight.events]
                )
                self._keep_credits(sight)
            finally:
                self._db.execute("COMMIT")
            self._kept += 1
            if self._kept % _PRUNE_EVERY == 1:
                self._prune(picture.time)

    def _keep_watch(self, now: float) -> None:
        if self._watch is not None and now - self._watch[1] < GAP_S:
            self._db.execute("UPDATE watch SET last = ? WHERE rowid = ?", (now, self._watch[0]))
            self._watch = (self._watch[0], now)
        else:
            row = self._db.execute("INSERT INTO watch VALUES (?,?)", (now, now)).lastrowid
            self._watch = (row or 0, now)
            self._open.clear()

    def _keep_versions(self, picture: Picture) -> None:
        still: list[tuple[float, int]] = []
        slow = [("peer", p.peer, _slow_peer(p)) for p in picture.peers]
        slow += [("fence", f.fence, msgspec.structs.replace(f, published=0.0)) for f in picture.fences]  # type: ignore[misc]
        slow += [("run", r.run, _slow_run(r)) for r in picture.runs]  # type: ignore[misc]
        for kind, subject, info in slow:
            body = msgspec.json.encode(info)
            known = self._open.get((kind, subject))
            if known is not None and known[1] == body:
                still.append((picture.time, known[0]))
                continue
            row = self._db.execute(
                "INSERT INTO version (kind, subject, first, last, body) VALUES (?,?,?,?,?)",
                (kind, subject, picture.time, picture.time, body),
            ).lastrowid
            self._open[kind, subject] = (row or 0, body)
        self._db.executemany("UPDATE version SET last = ? WHERE id = ?", still)
        present = {(kind, subject) for kind, subject, _ in slow}
        self._open = {k: v for k, v in self._open.items() if k in present}
        self._published = {run: at for run, at in self._published.items() if ("run", run) in present}

    def _keep_run(self, run: RunInfo, now: float) -> None:
        if self._published.get(run.run) != run.published:
            self._published[run.run] = run.published
            row = (run.run, min(run.published, now), run.step, run.loss, run.step_time_s, run.tokens_per_s)
            self._db.execute("INSERT OR REPLACE INTO sample VALUES (?,?,?,?,?,?)", row)
        self._db.executemany("INSERT OR IGNORE INTO event VALUES (?,?,?,?,?,?,?)", [_event_row(e) for e in run.events])

    def _keep_credits(self, sight: Sight) -> None:
        """Counters only grow; one that is lower than before was started anew."""
        for c in sight.credits:
            key = (c.run, c.issuer, c.peer, c.stage)
            self._db.execute("INSERT OR IGNORE INTO credit VALUES (?,?,?,?,0,0,0,0,0,0,0)", key)
            self._db.execute(
                "UPDATE credit SET frames = frames + ?1 - iif(?1 >= seen_frames, seen_frames, 0), seen_frames = ?1,"
                " bytes = bytes + ?2 - iif(?2 >= seen_bytes, seen_bytes, 0), seen_bytes = ?2,"
                " flops = flops + ?3 - iif(?3 >= seen_flops, seen_flops, 0), seen_flops = ?3, updated = ?4"
                " WHERE run = ?5 AND issuer = ?6 AND peer = ?7 AND stage = ?8",
                (c.frames, c.bytes_accepted, c.flops, sight.picture.time, *key),
            )

    def _prune(self, now: float) -> None:
        oldest = now - self._max_age_s
        self._forget(oldest)
        while self.bytes_used() > self._max_bytes:
            first = self._db.execute("SELECT min(first) FROM watch").fetchone()[0]
            if first is None or now - max(first, oldest) < 60.0:
                break
            oldest = max(first, oldest) + (now - max(first, oldest)) / 4
            self._forget(oldest)

    def _forget(self, oldest: float) -> None:
        self._db.execute("DELETE FROM version WHERE last < ?", (oldest,))
        self._db.execute("DELETE FROM sample WHERE time < ?", (oldest,))
        self._db.execute("DELETE FROM event WHERE time < ?", (oldest,))
        self._db.execute("DELETE FROM credit WHERE updated < ?", (oldest,))
        self._db.execute("DELETE FROM watch WHERE last < ?", (oldest,))
        self._db.execute("UPDATE watch SET first = ? WHERE first < ?", (oldest, oldest))
        self._db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

    def bytes_used(self) -> int:
        pages, size = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        free = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return int((pages - free) * size)

    # --- reading

    def at(self, time: float) -> Picture | None:
        """The picture at `time`; None where nobody looked."""
        with self._lock:
            row = self._db.execute("SELECT 1 FROM watch WHERE first <= ?1 AND last >= ?1 - 1", (time,)).fetchone()
            if row is None:
                return None
            # The look at or before `time`: a version that ended before it is not part of it.
            found = self._db.execute(
                "SELECT kind, body, last FROM version WHERE first <= ?1 AND last >= ?1 - ?2 ORDER BY id",
                (time, GAP_S),
            ).fetchall()
            newest = max((last for _, _, last in found if last <= time), default=time)
            parts: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
            for kind, body, last in found:
                if last >= min(newest, time):
                    parts[kind].append(msgspec.json.decode(body, type=_KINDS[kind]))
            runs = tuple(self._with_sample(r, time) for r in parts["run"])
        return Picture(time=time, peers=tuple(parts["peer"]), fences=tuple(parts["fence"]), runs=runs)

    def _with_sample(self, run: RunInfo, time: float) -> RunInfo:
        row = self._db.execute(
            "SELECT time, step, loss, step_s, tokens_s FROM sample WHERE run = ? AND time <= ?"
            " ORDER BY time DESC LIMIT 1",
            (run.run, time + 1),
        ).fetchone()
        if row is None:
            return run
        names = ("published", "step", "loss", "step_time_s", "tokens_per_s")
        return msgspec.structs.replace(run, **dict(zip(names, row, strict=True)))

    def curve(self, run: str, first: float, last: float, points: int = 800) -> Curve:
        """Means over at most `points` spans of equal length."""
        width = max((last - first) / points, 1e-3)
        with self._lock:
            rows = self._db.execute(
                "SELECT avg(time), max(step), avg(loss), avg(step_s), avg(tokens_s) FROM sample"
                " WHERE run = ? AND time BETWEEN ? AND ? GROUP BY CAST((time - ?) / ? AS INTEGER) ORDER BY 1",
                (run, first, last, first, width),
            ).fetchall()
            marks = self._events(
                "run = ? AND kind IN ('fault', 'plan') AND time BETWEEN ? AND ?", (run, first, last), 200
            )
        out: list[tuple[Any, ...]] = []
        for row in rows:
            if out and row[0] - out[-1][0] > GAP_S + 2 * width:
                out.append(((row[0] + out[-1][0]) / 2, None, None, None, None))
            out.append(row)
        columns = [list(c) for c in zip(*out, strict=True)] or [[], [], [], [], []]
        return Curve(
            time=columns[0],
            step=columns[1],
            loss=columns[2],
            step_time_s=columns[3],
            tokens_per_s=columns[4],
            marks=marks,
        )

    def span(self) -> Span:
        with self._lock:
            watched = self._db.execute("SELECT first, last FROM watch ORDER BY first").fetchall()[-500:]
            marks = self._events("kind IN ('fault', 'plan', 'run')", (), 300)
        first, last = (watched[0][0], watched[-1][1]) if watched else (None, None)
        return Span(first=first, last=last, watched=watched, marks=marks)

    def events(self, *, run: str = "", peer: str = "", before: float = 1e12, limit: int = 200) -> list[EventInfo]:
        """The latest, newest first; of one run or peer if named."""
        where, values = "time <= ?", [before]
        for name, value in (("run", run), ("peer", peer)):
            if value:
                where += f" AND {name} = ?"
                values.append(value)  # type: ignore[arg-type]
        with self._lock:
            return self._events(where, tuple(values), limit)

    def _events(self, where: str, values: tuple[object, ...], limit: int) -> list[EventInfo]:
        rows = self._db.execute(
            f"SELECT time, kind, source, peer, run, fence, text FROM event WHERE {where} ORDER BY time DESC LIMIT ?",
            (*values, limit),
        )
        return [
            EventInfo(time=t, kind=k, source=s, peer=p, run=r, fence=f, text=text) for t, k, s, p, r, f, text in rows
        ]

    def leaderboard(self, limit: int = 100) -> list[Contribution]:
        """Who did most, by what strangers vouch for."""
        with self._lock:
            rows = self._db.execute(
                "SELECT peer, sum(frames), sum(bytes), sum(flops), count(DISTINCT run), sum(issuers) FROM"
                " (SELECT peer, run, stage, sum(frames) frames, sum(bytes) bytes,"
                "  min(CASE WHEN flops > 0 THEN flops END) flops, count(*) issuers FROM credit"
                "  GROUP BY peer, run, stage)"
                " GROUP BY peer ORDER BY 4 DESC, 2 DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [
            Contribution(peer=p, frames=n, bytes_accepted=b, flops=f or None, runs=r, issuers=i)
            for p, n, b, f, r, i in rows
        ]


def _event_row(e: EventInfo) -> tuple[object, ...]:
    return (round(e.time, 1), e.kind, e.source, e.peer, e.run, e.fence, e.text)


def _slow_peer(p: PeerInfo) -> PeerInfo:
    return msgspec.structs.replace(
        p, published=0.0, up_bytes_per_s=_two(p.up_bytes_per_s), down_bytes_per_s=_two(p.down_bytes_per_s)
    )


def _slow_run(r: RunInfo) -> RunInfo:
    """Without what changes at every step; figures of stages and links with two digits."""
    stages = tuple(
        msgspec.structs.replace(
            s, compute_s=_two(s.compute_s), send_s=_two(s.send_s), wait_s=_two(s.wait_s), waiting_for=None
        )
        for s in r.stages
    )
    links = tuple(msgspec.structs.replace(k, bytes_sent=None, bytes_per_s=_two(k.bytes_per_s)) for k in r.links)
    return msgspec.structs.replace(
        r, published=0.0, step=0, loss=None, step_time_s=None, tokens_per_s=None, events=(), why=None, stages=stages,
        links=links, since=None if r.state == "silent" else r.since,
    )  # fmt: skip


def _two(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")

"""History: what it keeps, gaps, bounds; the leaderboard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from dht.errors import InputError
from dht.monitor_observer import Observer, Sight
from dht.monitor_views import PeerInfo, Picture
from dht.receipts import Counted
from dht.web.history import GAP_S, History
from tests.dht_samples import NOW
from tests.monitor_samples import PEERS, board, sights


def kept(history: History, found: list[Sight]) -> None:
    for sight in found:
        history.keep(sight)


def at_time(sight: Sight, time: float, **run: object) -> Sight:
    runs = tuple(msgspec.structs.replace(r, published=time, **run) for r in sight.picture.runs)
    return Sight(msgspec.structs.replace(sight.picture, time=time, runs=runs), sight.events, sight.credits)


def first_sight() -> Sight:
    return asyncio.run(Observer(board()).look())


def test_the_past_is_as_it_was_seen() -> None:
    history = History(None)
    first = first_sight()
    kept(history, [at_time(first, NOW + 5.0 * k, step=10 + k, loss=3.0 - k) for k in range(3)])
    without = msgspec.structs.replace(first.picture, peers=first.picture.peers[1:], time=NOW + 15)
    history.keep(Sight(without, [], []))
    seen = history.at(NOW + 7)
    assert seen is not None
    assert [p.peer for p in seen.peers] == [p.peer for p in first.picture.peers]
    assert (seen.runs[0].step, seen.runs[0].loss) == (11, 2.0)
    assert [s.peer for s in seen.runs[0].stages] == [p.peer_id for p in PEERS[1:4]]
    later = history.at(NOW + 15.5)
    assert later is not None and len(later.peers) == len(first.picture.peers) - 1
    assert history.at(NOW - 60) is None and history.at(NOW + 3600) is None


def test_what_does_not_change_takes_no_room() -> None:
    history = History(None)
    made = board()
    kept(history, asyncio.run(sights(made, 4)))
    size = history.bytes_used()
    kept(history, asyncio.run(sights(made, 100)))
    assert history.bytes_used() < size + 64_000


def test_gaps_are_gaps(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    first = first_sight()
    history = History(path)
    kept(history, [at_time(first, NOW + 5.0 * k, step=k, loss=2.0) for k in range(4)])
    history.close()
    history = History(path)  # the monitor was off for a while
    after = NOW + 15 + 10 * GAP_S
    kept(history, [at_time(first, after + 5.0 * k, step=100 + k, loss=1.0) for k in range(4)])
    span = history.span()
    assert span.watched == [(NOW, NOW + 15), (after, after + 15)]
    assert history.at(NOW + 15 + 5 * GAP_S) is None
    curve = history.curve(first.picture.runs[0].run, NOW - 1, after + 20, 1000)
    assert curve.loss == [2.0] * 4 + [None] + [1.0] * 4
    history.close()


def test_age_and_size_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    history = History(path, max_age_s=600.0, max_bytes=400_000)
    first = first_sight()
    peers = first.picture.peers
    for k in range(400):  # every peer's version changes at every look: 6 versions each
        changed = tuple(msgspec.structs.replace(p, version=f"{k}" * 50) for p in peers)
        history.keep(Sight(msgspec.structs.replace(first.picture, time=NOW + 5.0 * k, peers=changed), [], []))
    assert history.bytes_used() < 1_000_000
    span = history.span()
    assert span.first is not None and span.first >= NOW + 5.0 * 399 - 600 - 60 * 5
    history.close()
    with pytest.raises(InputError, match="cannot be used"):
        History(tmp_path)
    (tmp_path / "text").write_text("not a database, but long enough to be taken for a damaged one" * 100)
    with pytest.raises(InputError, match="--history"):
        History(tmp_path / "text")


def test_curves_are_thinned() -> None:
    history = History(None)
    first = first_sight()
    kept(history, [at_time(first, NOW + 1.0 * k, step=k, loss=float(k)) for k in range(500)])
    curve = history.curve(first.picture.runs[0].run, NOW, NOW + 500, 50)
    assert len(curve.time) in (50, 51) and curve.loss == sorted(curve.loss, key=lambda v: v or 0.0)


def test_owners_events_are_kept_once() -> None:
    from dht.monitor_views import EventInfo

    history = History(None)
    first = first_sight()
    event = EventInfo(time=NOW, kind="fault", text="stage 1 was lost", source="owner", run=first.picture.runs[0].run)
    kept(history, [at_time(first, NOW + 5.0 * k, events=(event,)) for k in range(3)])
    assert [e.text for e in history.events()] == ["stage 1 was lost"]
    assert history.events(peer=PEERS[0].peer_id) == []


def test_counters_add_up_over_restarts_and_the_lowest_word_on_flops_holds() -> None:
    history = History(None)
    picture: Picture = first_sight().picture
    run, subject = picture.runs[0].run, PEERS[2].peer_id

    def count(issuer: int, frames: int, flops: float) -> Counted:
        return Counted(run, PEERS[issuer].peer_id, subject, 1, frames, frames * 100, flops)

    for credits in (
        [count(1, 10, 1e12), count(3, 10, 9e15)],
        [count(1, 30, 3e12), count(3, 30, 9e16)],
        [count(1, 5, 5e11), count(3, 40, 9e17)],  # the first issuer was started anew
    ):
        history.keep(Sight(picture, [], credits))
    (board_row,) = history.leaderboard()
    assert (board_row.peer, board_row.frames, board_row.issuers) == (subject, 35 + 40, 2)
    assert board_row.flops == pytest.approx(3.5e12)


def test_a_failed_look_is_not_kept() -> None:
    history = History(None)
    sight = first_sight()
    history.keep(Sight(msgspec.structs.replace(sight.picture, error="no answer"), [], []))
    assert history.span().watched == []


def test_views_survive_json() -> None:
    peer = first_sight().picture.peers[0]
    assert msgspec.json.decode(msgspec.json.encode(peer), type=PeerInfo) == peer

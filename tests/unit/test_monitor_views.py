"""What the monitor makes of records: views, warnings, events, bottlenecks, receipts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dht.monitor_observer import Observer, Sight
from dht.monitor_views import LATE_S, SILENT_S, PeerInfo, RunInfo, peer_info, run_hosts, run_info
from dht.monitor_why import bottleneck
from dht.receipts import Credit, Receipt, counted
from dht.records import TTL_S, Device, StageFigures
from dht.runs import RunView
from dht.top import plain_lines
from tests.dht_samples import NOW, peer_record
from tests.monitor_samples import OWNER, PEERS, MemoryBoard, board, run_view, sights


def run_of(view: RunView, now: float = NOW) -> RunInfo:
    return run_info(view, now, {})


def peer_of(picture_peers: tuple[PeerInfo, ...], number: int) -> PeerInfo:
    return next(p for p in picture_peers if p.peer == PEERS[number].peer_id)


def looks(*steps: object) -> list[Sight]:
    """A look, then for each step: do it, look again. Steps take the board."""
    made = board()

    async def main() -> list[Sight]:
        observer = Observer(made)
        out = [await observer.look()]
        for step in steps:
            step(made)  # type: ignore[operator]
            out.append(await observer.look())
        return out

    return asyncio.run(main())


def texts(sight: Sight) -> str:
    return "\n".join(e.text for e in sight.events)


# --- views


def test_figures_beyond_reason_and_foreign_text_become_unknown_and_a_warning() -> None:
    device = Device(
        kind="cpu",
        name="a\u202eb<i>",
        flops_per_s=1e21,
        memory_bytes_per_s=1.0,
        memory_bytes=1 << 60,
        free_bytes=1 << 59,
    )
    info = peer_info(peer_record(PEERS[0], devices=(device,), published=NOW, version="1\x1b[2J"), NOW, {}, False)
    assert info.devices[0].flops_per_s is None and info.devices[0].memory_bytes is None
    assert "\u202e" not in info.devices[0].name and "\x1b" not in info.version
    assert any("beyond reason" in w for w in info.warnings) and any("direction" in w for w in info.warnings)
    loud = run_view(reason="\u2066x")
    head = msgspec.structs.replace(loud.run, loss=1e30, step=1 << 53, tokens_per_s=1e21, wanted_peers=1 << 50)
    run = run_of(RunView(run=head))
    assert (run.loss, run.step, run.tokens_per_s, run.wanted_peers) == (None, 0, None, 9999)
    assert len(run.warnings) >= 4


def test_a_clean_record_has_no_warning() -> None:
    made = board()
    picture = asyncio.run(Observer(made).look()).picture
    assert not any(p.warnings for p in picture.peers) and not any(r.warnings for r in picture.runs)


def test_no_view_holds_an_address() -> None:
    picture = asyncio.run(Observer(board()).look()).picture
    assert b"93.184" not in msgspec.json.encode(picture) and b"/ip4" not in msgspec.json.encode(picture)


@pytest.mark.parametrize(
    ("age_s", "state"), [(0.0, "free"), (LATE_S + 0.1, "late"), (SILENT_S + 0.1, "silent"), (TTL_S, "silent")]
)
def test_staleness_is_visible(age_s: float, state: str) -> None:
    assert SILENT_S < TTL_S
    assert peer_info(peer_record(PEERS[0], published=NOW - age_s), NOW, {}, False).state == state


def test_work_that_the_owner_does_not_confirm_is_marked() -> None:
    view = run_view()
    from dht.records import Work

    liar = peer_record(PEERS[6], work=(Work(view.run.run, 1), Work(view.run.run, -1)))
    info = peer_info(liar, NOW, {view.run.run: view}, False)
    assert [h.confirmed for h in info.hosts] == [False, False]
    honest = peer_record(PEERS[2], work=(Work(view.run.run, 1),))
    assert peer_info(honest, NOW, {view.run.run: view}, False).hosts[0].confirmed


def test_traffic_and_compression_come_from_the_runs_links() -> None:
    picture = asyncio.run(Observer(board()).look()).picture
    first, second = peer_of(picture.peers, 1), peer_of(picture.peers, 2)  # hosts of stages 0 and 1
    assert (first.up_bytes_per_s, first.compression_out) == (500.0, 4.0)
    assert second.down_bytes_per_s == 500.0
    assert peer_of(picture.peers, 4).up_bytes_per_s is None
    silent = next(k for k in picture.runs[0].links if (k.src, k.dst) == (1, 2))
    assert silent.bytes_per_s is None and silent.compression is None  # unknown stays unknown


# --- events


def test_a_peer_that_falls_silent_shows_within_one_ttl() -> None:
    def dies(made: MemoryBoard) -> None:
        victim = made.records[PEERS[2].peer_id]
        made.clock.at += SILENT_S + 1
        made.refresh()
        made.records[PEERS[2].peer_id] = victim

    before, after = looks(dies)
    assert peer_of(after.picture.peers, 2).state == "silent"
    assert "is silent: not heard of for 39 s (hosts stage 1 of demo)" in texts(after)
    assert [e.kind for e in after.events] == ["fault"]
    assert before.events == []


def test_a_peer_whose_record_expired_stays_silent_and_one_that_withdrew_has_left() -> None:
    def later(made: MemoryBoard) -> None:
        made.clock.at += 5
        made.refresh()

    def gone(made: MemoryBoard) -> None:
        later(made)
        made.records.pop(PEERS[4].peer_id, None)

    *_, once, twice = looks(gone, gone)
    assert peer_of(once.picture.peers, 4).state == "free"  # one reading may have missed it
    assert peer_of(twice.picture.peers, 4).state == "left"
    assert f"..{PEERS[4].peer_id[-8:]} left" in texts(twice)


def test_a_stage_that_moves_is_told() -> None:
    def moves(made: MemoryBoard) -> None:
        (key, view), *_ = made.found_runs.items()
        hosts = (view.stages[0], msgspec.structs.replace(view.stages[1], peer=PEERS[5].peer_id), view.stages[2])
        head = msgspec.structs.replace(view.run, plan=2, state="paused", reason="two peers left")
        made.found_runs[key] = RunView(run=head, stages=hosts, links=view.links, figures=view.figures)

    _, after = looks(moves)
    assert f"plan 1 to 2, stage 1 moved from ..{PEERS[2].peer_id[-8:]} to ..{PEERS[5].peer_id[-8:]}" in texts(after)
    assert "training, now paused: two peers left" in texts(after)


def test_many_arrivals_are_one_line() -> None:
    def crowd(made: MemoryBoard) -> None:
        from dht.identity import Identity

        for n in range(100, 120):
            me = Identity.from_seed(bytes([n, 1] * 16))
            made.records[me.peer_id] = peer_record(me, published=NOW)

    _, after = looks(crowd)
    assert [e.text for e in after.events] == ["20 peers joined"]


def test_a_stopped_run_says_since_when() -> None:
    def stops(made: MemoryBoard) -> None:
        views = dict(made.found_runs)
        made.clock.at += SILENT_S + 1
        made.refresh()
        made.found_runs = views

    _, after = looks(stops)
    run = after.picture.runs[0]
    assert (run.state, run.since) == ("silent", NOW)
    assert run.why is None


def test_refused_records_are_a_note_and_nothing_else() -> None:
    def forged(made: MemoryBoard) -> None:
        made.refused = 3

    before, after = looks(forged)
    assert [e.text.split(":")[0] for e in after.events] == ["3 records refused"]
    assert (after.picture.peers, after.picture.runs) == (before.picture.peers, before.picture.runs)


def test_two_owners_runs_of_one_name_are_marked() -> None:
    made = board()
    other = run_view(owner=PEERS[6])
    made.found_runs[other.run.run] = other
    picture = asyncio.run(Observer(made).look()).picture
    assert len(picture.runs) == 2 and all("another owner" in r.warnings[-1] for r in picture.runs)


def test_a_board_that_does_not_answer_leaves_the_last_picture_marked() -> None:
    from dht.errors import TransportError

    made = board()

    async def main() -> tuple[Sight, Sight]:
        observer = Observer(made)
        good = await observer.look()

        async def silent(*, timeout_s: float) -> tuple[()]:
            raise TransportError("the board has not answered")

        made.runs = silent  # type: ignore[method-assign]
        return good, await observer.look()

    good, bad = asyncio.run(main())
    assert bad.picture.peers == good.picture.peers and bad.picture.error == "the board has not answered"
    assert bad.events == []


def test_plain_lines_are_plain() -> None:
    made = board(reason="\x1b[31mred")
    lines = plain_lines(asyncio.run(Observer(made).look()))
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert "peers=6 busy=4 free=2 fences=1 runs=1" in lines[0] and "step=10/100 loss=2.5000" in lines[1]


# --- why is it slow?


def test_the_slowest_stage_is_named_with_what_would_help() -> None:
    run = run_of(run_view())
    assert run.why is not None and (run.why.kind, run.why.stage) == ("stage", 1)
    helped = bottleneck(run.stages, run.links, 2.0, {PEERS[2].peer_id: 1e9, PEERS[5].peer_id: 4e9})
    assert "4.0 times as fast" in helped.advice


def test_a_link_that_holds_its_sender_up_is_named() -> None:
    view = run_view()
    figures = tuple(StageFigures(s, 0, 0.4, 1.5 if s == 0 else 0.0, 0.1) for s in range(3))
    run = run_of(RunView(run=view.run, stages=view.stages, links=view.links, figures=figures))
    assert run.why is not None
    assert (run.why.kind, run.why.src, run.why.dst) == ("link", 0, 1)
    assert "int8" in run.why.advice


def test_even_stages_and_no_figures_are_said_to_be_that() -> None:
    view = run_view()
    even = tuple(StageFigures(s, 0, 1.5, 0.0, 0.5) for s in range(3))
    run = run_of(RunView(run=view.run, stages=view.stages, links=view.links, figures=even))
    assert run.why is not None and run.why.kind == "balanced"
    none = run_of(RunView(run=view.run, stages=view.stages))
    assert none.why is not None and none.why.kind == "unknown"


# --- receipts


def receipt(issuer: int, subject: int, stage: int, run: str, **fields: object) -> Receipt:
    credit = Credit(PEERS[subject].peer_id, stage, 10, 1000, 5e12)
    return Receipt(**{"peer": PEERS[issuer].peer_id, "run": run, "credits": (credit,), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("issuer", "subject", "stage", "why"),
    [
        (1, 2, 1, ""),
        (3, 2, 1, ""),
        (2, 2, 1, "itself"),
        (0, 2, 1, "trainer"),
        (1, 5, 1, "does not host"),
        (1, 2, 2, "does not host"),
        (1, 3, 2, "no neighbour"),
        (6, 2, 1, "no neighbour"),
    ],
)
def test_only_a_neighbours_receipt_counts(issuer: int, subject: int, stage: int, why: str) -> None:
    made = board()
    run = run_of(run_view())
    good, refused = counted([receipt(issuer, subject, stage, run.run)], run_hosts(run, made.records))
    assert len(good) == (0 if why else 1)
    assert not why or why in refused[0]


def test_receipts_from_the_same_address_count_for_nothing() -> None:
    made = board()
    run = run_of(run_view())
    for same in (2, 0):  # as its subject, as the trainer
        records = dict(made.records)
        records[PEERS[1].peer_id] = msgspec.structs.replace(
            records[PEERS[1].peer_id], addresses=records[PEERS[same].peer_id].addresses
        )
        good, refused = counted([receipt(1, 2, 1, run.run)], run_hosts(run, records))
        assert not good and "share an address" in refused[0]


def test_the_observer_reads_receipts_now_and_then() -> None:
    made = board()
    made.found_receipts = [receipt(1, 2, 1, run_view().run.run)]
    found = asyncio.run(sights(made, 6))
    assert [len(s.credits) for s in found] == [0, 1, 0, 0, 0, 1]
    assert found[1].credits[0].peer == PEERS[2].peer_id
    assert OWNER.peer_id  # the owner's key is no peer's

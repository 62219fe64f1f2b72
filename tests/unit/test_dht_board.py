"""The board's parts without sockets: guards on hivemind's storage, the clock, run views, the monitor's text."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dht import _guards, cli_monitor, monitor, records
from dht._guards import MAX_DICTIONARY_BYTES, node_id_of
from dht._hivemind import node_parts
from dht.clock import SwarmClock, swarm_clock
from dht.identity import Identity, peer_id_bytes
from dht.records import Event, LinkBytes, RunLinks, RunStages, Signer, StageHost, Work
from dht.runs import RunView, join_run, split_run
from tests.dht_samples import NOW, peer_record, run_record

ALICE, OWNER = Identity.generate(), Identity.generate()


# --- guards


def test_a_refused_older_store_does_not_shorten_a_newer_records_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOW]
    node_parts()
    monkeypatch.setattr(swarm_clock, "now", lambda: now[0])
    monkeypatch.setattr(sys.modules[node_parts().TimedStorage.__module__], "get_dht_time", lambda: now[0])
    storage = node_parts().TimedStorage()
    assert storage.store("key", b"new", NOW + 40)
    assert not storage.store("key", b"old", NOW + 10)
    now[0] = NOW + 20
    assert storage.get("key").value == b"new"
    now[0] = NOW + 41
    assert storage.get("key") is None


def test_replacing_a_record_for_ever_keeps_the_heap_small() -> None:
    storage = node_parts().TimedStorage()
    start = swarm_clock.now()
    for i in range(2000):
        assert storage.store("key", b"v", start + 10 + i * 0.01)
    assert len(storage.expiration_heap) < 200
    assert len(storage) == 1


def test_a_dictionary_is_bounded() -> None:
    parts = node_parts()
    storage = parts.DHTLocalStorage()
    key, value, until = parts.DHTID.generate("k"), bytes(2000), swarm_clock.now() + 40
    taken = sum(storage.store_subkey(key, i.to_bytes(38, "big"), value, until) for i in range(1500))
    assert taken * 2000 <= MAX_DICTIONARY_BYTES < (taken + 1) * 2060
    assert storage.store_subkey(key, (0).to_bytes(38, "big"), b"newer", until + 1)  # a refresh always fits


def protocol(peer: Identity) -> Any:
    """Our protocol class, not connected to anything."""
    parts = node_parts()
    node_module = sys.modules[parts.DHTNode.__module__]
    cls: Any = node_module.DHTProtocol
    made = cls(_initialized_with_create=True)
    made.record_validator = None
    return made


def test_a_dictionarys_expiration_is_that_of_its_entries() -> None:
    parts = node_parts()
    until = swarm_clock.now() + 40
    dictionary = parts.DictionaryDHTValue()
    dictionary.store(b"a", b"1", until)
    dictionary.latest_expiration_time = float("inf")
    rebuilt = protocol(ALICE)._rebuilt(parts.ValueWithExpiration(dictionary, float("inf")))
    assert rebuilt.expiration_time == until
    assert rebuilt.value.latest_expiration_time == until
    assert protocol(ALICE)._rebuilt(parts.ValueWithExpiration(b"plain", until)) is None


def test_one_bad_entry_does_not_hide_a_dictionary() -> None:
    parts = node_parts()
    board = protocol(ALICE)

    class Validator:
        def validate(self, record: Any) -> bool:
            return bool(record.value == b"good")

    board.record_validator = Validator()
    dictionary = parts.DictionaryDHTValue()
    until = swarm_clock.now() + 40
    for subkey, value in ((b"a", b"good"), (b"b", b"bad"), (b"c", b"good")):
        dictionary.store(subkey, value, until)
    assert board._validate_dictionary(b"key", dictionary)
    assert sorted(dictionary.data) == [b"a", b"c"]
    only_bad = parts.DictionaryDHTValue()
    only_bad.store(b"b", b"bad", until)
    assert not board._validate_dictionary(b"key", only_bad)


def test_the_node_id_is_the_hash_of_the_peer_id() -> None:
    assert node_id_of(peer_id_bytes(ALICE.peer_id)) != node_id_of(peer_id_bytes(OWNER.peer_id))
    assert 0 <= node_id_of(peer_id_bytes(ALICE.peer_id)) < 1 << 160


def test_swarm_time_is_hiveminds_time() -> None:
    node_parts()
    loaded = {n: m for n, m in sys.modules.items() if n.startswith("hivemind") and hasattr(m, "get_dht_time")}
    assert len(loaded) >= 4
    assert [n for n, module in loaded.items() if module.get_dht_time != swarm_clock.now] == []


@pytest.mark.parametrize("first", ["", "import torch"])
def test_torch_is_not_loaded_by_us_and_does_not_disturb(first: str) -> None:
    if first:
        pytest.importorskip("torch")
    program = f"{first}\nimport sys\nfrom dht._hivemind import node_parts\nnode_parts()\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert out.stdout.strip() == str(bool(first))


# --- clock


@pytest.mark.parametrize(
    ("samples", "offset"),
    [((), 0.0), ((0.4, -0.3), 0.0), ((60.0, 61.0, 1e9), 61.0), ((-80.0,), -80.0), ((500.0, 400.0), 0.0)],
)
def test_the_offset_is_the_median_within_bounds(samples: tuple[float, ...], offset: float) -> None:
    clock = SwarmClock()
    clock.correct(samples)
    assert clock.offset_s == offset


def test_a_wrong_clock_is_named(caplog: pytest.LogCaptureFixture) -> None:
    SwarmClock().correct([60.0])
    SwarmClock().correct([-600.0])
    assert "60.0 s behind the swarm's" in caplog.text
    assert "too much to correct" in caplog.text


# --- records and runs


def test_records_stay_small() -> None:
    addresses = tuple(f"/ip4/203.0.113.{i}/tcp/31330" for i in range(4))
    peer = peer_record(ALICE, addresses=addresses, work=(Work("ab" * 16, 3),), state="busy")
    assert len(records.seal(peer, Signer(ALICE), expiration=NOW)) < 500
    run = run_record(OWNER, ALICE.peer_id, loss=1.5, step_time_s=0.5, tokens_per_s=1e4, reason="r" * 240)
    assert len(records.seal(run, Signer(OWNER), expiration=NOW)) < 800


@pytest.mark.parametrize("stages", [0, 1, 16, 17, 48])
def test_a_run_is_split_and_joined(stages: int) -> None:
    head = run_record(OWNER, ALICE.peer_id, plan=4)
    view = RunView(
        run=head,
        stages=tuple(StageHost(i, 0, ALICE.peer_id, "cuda:0") for i in range(stages)),
        links=tuple(LinkBytes(i, i + 1, 1 << 50, "topk-masked:0.01") for i in range(-1, 2 * stages)),
        events=tuple(Event(float(i), "stage moved " + "x" * 200) for i in range(30)),
    )
    parts = split_run(view)
    assert len({records.place(part) for part in parts}) == len(parts)
    for part in parts:
        assert len(records.seal(part, Signer(OWNER), expiration=NOW)) <= records.MAX_RECORD_BYTES
    joined = join_run(head, list(reversed(parts[1:])))  # type: ignore[arg-type]
    assert (joined.stages, joined.links) == (view.stages, view.links)
    assert joined.events == view.events[-len(joined.events) :]
    assert len(joined.events) >= 5


def test_parts_of_an_older_plan_are_left_out() -> None:
    head = run_record(OWNER, ALICE.peer_id, plan=2)

    def part(plan: int, number: int, first: int) -> RunStages:
        hosts = (StageHost(first, 0, ALICE.peer_id, "cpu"),)
        return RunStages(run=head.run, owner=head.owner, part=number, plan=plan, stages=hosts)

    old_links = RunLinks(run=head.run, owner=head.owner, part=0, plan=1, links=(LinkBytes(0, 1, 5),))
    joined = join_run(head, [part(1, 1, 9), part(2, 0, 0), old_links])
    assert [s.stage for s in joined.stages] == [0]
    assert joined.links == ()


# --- monitor


def snapshot() -> monitor.Snapshot:
    head = run_record(
        OWNER, ALICE.peer_id, step=7, total=100, loss=None, reason="no \x1b[31mpeer\u202e", since=NOW - 300
    )
    view = RunView(
        run=head,
        stages=(StageHost(0, 0, ALICE.peer_id, "cpu"),),
        links=(LinkBytes(-1, 0, 3 << 20, ""),),
        events=(Event(NOW - 60, "a\nb"),),
    )
    peers = (peer_record(ALICE, published=NOW - 3), peer_record(OWNER, devices=(), work=(Work(head.run, -1),)))
    return monitor.Snapshot(swarm=("/x",), time=NOW, peers=peers, runs=(view,))


def test_text_names_everything_and_steers_no_terminal() -> None:
    text = monitor.as_text(snapshot())
    figures = ("50 GFLOP/s", "4 GiB", "training for 5 min", "loss ?", "step 7 of 100", "trainer->0 3 MiB")
    for expected in ("2 peers, 1 run", "3 s ago", "60 s ago: a", ALICE.peer_id[-8:], *figures):
        assert expected in text, expected
    assert not any(c in text for c in "\x1b\u202e")


def test_json_has_the_documented_fields() -> None:
    text = monitor.as_json(snapshot())
    assert text.isascii()
    found = json.loads(text)
    assert list(found) == ["schema", "swarm", "time", "peers", "runs"]
    assert found["schema"] == 1
    assert set(found["peers"][0]) == {"peer", "version", "state", "fence", "hours", "place", "age_s", "devices", "work"}
    assert found["peers"][0]["age_s"] == 3.0
    run = found["runs"][0]
    assert run["loss"] is None
    assert run["owner"] == OWNER.public_key.hex()
    assert run["links"] == [{"src": -1, "dst": 0, "bytes_sent": 3 << 20, "codec": None, "why": None}]
    assert "addresses" not in text


def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path))
    monkeypatch.delenv("FUSION_SWARM", raising=False)
    for arguments, expected in (
        (["status"], "no swarm is known"),
        (["status", "--swarm", "127.0.0.1:80"], "not a multiaddr"),
        (["status", "--swarm", "/ip4/127.0.0.1/tcp/80"], "names no peer"),
    ):
        assert cli_monitor.main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1
    for arguments in (["status", "--nonsense"], ["status", "--swarm", "/x", "--timeout", "-1"]):
        with pytest.raises(SystemExit) as caught:
            cli_monitor.main(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_made_up_subjects_stored_by_one_peer_leave_room_for_those_who_store_their_own() -> None:
    parts = node_parts()
    storage = parts.DHTLocalStorage()
    key, value, until = parts.DHTID.generate("k"), bytes(1000), swarm_clock.now() + 40
    flood = _guards._storer.set(peer_id_bytes(ALICE.peer_id))
    try:
        taken = sum(storage.store_subkey(key, i.to_bytes(38, "big"), value, until) for i in range(3000))
        assert taken * 1000 <= _guards.MAX_FOR_OTHERS_BYTES
        assert storage.store_subkey(key, peer_id_bytes(ALICE.peer_id), value, until)
    finally:
        _guards._storer.reset(flood)
    for i in range(300):
        honest = peer_id_bytes(Identity.from_seed(i.to_bytes(32, "big")).peer_id)
        own = _guards._storer.set(honest)
        try:
            assert storage.store_subkey(key, honest, value, until)
        finally:
            _guards._storer.reset(own)

"""A volunteer's settings file, caps and findings, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dht.identity import Identity
from dht.probe import Reach
from dht.records import PeerRecord
from fusion_p2p.errors import InputError
from fusion_p2p.settings import OptimizerSpec
from peer import caps, cli_peer, preflight
from peer.cli_peer_options import join_options, parser
from peer.errors import RefusedError
from peer.peer_settings import apply_settings
from peer.policy import Policy, check_run
from peer.protocol import RunSpec

SPEC = RunSpec(
    run="r", name="cats", owner=b"", opdag_hash="", seed=0, optimizer=OptimizerSpec(kind="sgd", lr=1.0), created=0.0
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path))
    return tmp_path


def joined(*argv: str) -> object:
    top = parser()
    return apply_settings(top, top.parse_args(["join", *argv]), ["join", *argv])


def test_the_file_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    text = (
        'memory = "2GiB"\nupload-mbps = 20\nhours = "22:00-07:00"\nruns = ["aabbccdd"]\nloopback = true\nthreads = 3\n'
    )
    (tmp_path / "peer.toml").write_text(text)
    options = join_options(joined("--threads", "1"))  # type: ignore[arg-type]
    assert (options.memory_bytes, options.threads) == (2 << 30, 1)
    assert options.upload_bytes_per_s == 20e6 / 8
    assert (options.policy.hours, options.policy.owners) == ("22:00-07:00", ("aabbccdd",))
    assert "127.0.0.1" in options.listen[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memry = '2GiB'", "memry is no setting"),
        ("memory = 'much'", "memory: 'much' is no size"),
        ("threads = [1, 2]", "takes one value"),
        ("loopback = 1", "true or false"),
        ("memory = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=expected) as caught:
        joined("--config", str(file))
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_months_traffic_is_capped_over_restarts(tmp_path: Path) -> None:
    own = os.getpid()
    month = caps.MonthlyCap(tmp_path, 1 << 40)
    month.look(own, "2026-01")
    first = month.traffic.total_bytes
    assert first > 0
    with open("/dev/zero", "rb") as file:
        file.read(1 << 20)
    month.look(own, "2026-01")
    assert month.traffic.total_bytes >= first + (1 << 20)
    again = caps.MonthlyCap(tmp_path, 1)
    assert again.traffic.total_bytes == month.traffic.total_bytes
    assert "--monthly-gb" in again.over()
    again.look(own, "2026-02")  # a new month, and a process not seen before: what it read counts
    assert again.traffic.month == "2026-02"
    assert caps.MonthlyCap(tmp_path, None).over() == ""


def test_disk_is_capped(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(1000))
    assert caps.over_disk(folder, 1000) == ""
    assert caps.over_disk(folder, None) == ""
    assert "--disk" in caps.over_disk(folder, 999)
    with pytest.raises(RefusedError, match="takes nothing now: full"):
        check_run(Policy(over_cap="full"), SPEC, 0)


def test_purge_keeps_the_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_bytes(bytes(3 << 20))
    (tmp_path / "identity").write_bytes(b"key")
    assert cli_peer.main(["purge"]) == 0
    assert "3.0 MiB" in capsys.readouterr().out
    assert not (tmp_path / "blobs").exists()
    assert (tmp_path / "identity").exists()


def test_a_later_twin_is_named_with_its_file_and_nobody_else_is(tmp_path: Path) -> None:
    me, now = Identity.from_seed(bytes(32)).peer_id, 1000.0

    def said(published: float, *where: str, peer: str = me) -> str:
        record = PeerRecord(peer=peer, version="1", devices=(), addresses=where, published=published)
        return preflight.twin([record], me, {"/ip4/192.0.2.1/tcp/1"}, now, tmp_path / "identity")

    text = said(now + 60, "/ip4/198.51.100.9/tcp/2")
    assert str(tmp_path / "identity") in text and "198.51.100.9" in text and "one key, one host" in text
    assert said(now + 1, "/ip4/198.51.100.9/tcp/2") == ""  # of this host's own last life
    assert said(now + 60, "/ip4/198.51.100.9/tcp/2", "/ip4/192.0.2.1/tcp/1") == ""  # its own
    assert said(now + 60) == ""
    assert said(now + 60, "/ip4/198.51.100.9/tcp/2", peer=Identity.from_seed(bytes(31) + b"1").peer_id) == ""


def test_each_failure_names_its_fix(tmp_path: Path) -> None:
    (version := tmp_path / "version").write_text("Linux version 5.15.0-microsoft-standard-WSL2")
    wsl = preflight.wsl2_finding(version)
    assert wsl is not None
    assert "networkingMode=mirrored" in wsl.fix
    hidden = preflight.reach_findings([Reach("203.0.113.7", "silent")], 31330, relays=[])
    assert hidden[1].ok is False
    assert "31330" in hidden[1].fix
    assert preflight.reach_word(hidden) == "none"
    relayed = preflight.reach_findings([Reach("203.0.113.7", "refused")], 31330, relays=["/x/p2p-circuit"])
    assert preflight.reach_word(relayed) == "relay"
    direct = preflight.reach_findings([Reach("203.0.113.7", "open"), Reach("203.0.113.7", "silent")], 1, relays=[])
    assert preflight.reach_word(direct) == "direct"
    assert preflight.reach_word(preflight.reach_findings([], 1, relays=[])) == ""
    text = "\n".join(preflight.lines([*hidden, *preflight.host_findings(tmp_path, memory_bytes=1 << 62)]))
    assert "NO  reachable" in text
    assert "NO  memory" in text
    assert "-> --memory" in text

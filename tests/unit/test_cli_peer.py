"""`fusion-peer`: bad input is one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from dht.errors import RecordError
from fusion_p2p.errors import InputError
from peer import cli_peer
from peer.cli_peer_options import check_framework, join_options, parser
from peer.daemon import Daemon

BAD = [
    (["join", "--memory", "lots"], "fusion-peer join: argument --memory: 'lots' is no size; write 6GiB or 500MB"),
    (["join", "--memroy", "1GiB"], "fusion-peer: unrecognized arguments: --memroy"),
    (
        ["join", "--place", "48.1, 11.5"],
        "fusion-peer join: argument --place: '48.1, 11.5': a place is at most 32 letters",
    ),
    (
        ["join", "--monthly-gb", "0"],
        "fusion-peer join: argument --monthly-gb: 0 must lie between 0.01 and 1000000 GB",
    ),
    (
        ["join", "--threads", "99999999999"],
        "fusion-peer join: argument --threads: 99999999999 must lie between 1 and 1024",
    ),
    (["join", "--relay-mbps", "0"], "fusion-peer join: argument --relay-mbps: 0 must lie between 0.01 and 1000000"),
    (["jion"], "fusion-peer: argument COMMAND: invalid choice: 'jion'"),
    ([], "fusion-peer: the following arguments are required: COMMAND"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_what_cannot_be_parsed_is_one_line(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli_peer.main(line)
    assert ended.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(said)


def test_a_place_is_words_and_nothing_that_could_be_found_on_a_map() -> None:
    options = parser().parse_args(["join", "--place", "northern Spain"])
    assert join_options(options).place == "northern Spain"
    assert join_options(parser().parse_args(["join"])).place == ""


def test_jax_where_it_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_framework("torch", ("cuda:0",)) == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--framework jax needs a package: pip install 'fusion-p2p\[jax\]'"):
        check_framework("jax", ("cpu",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert check_framework("jax", ("cpu",)) == "jax"
    with pytest.raises(InputError, match="computes on the CPU, not on cuda:0; add --device cpu"):
        check_framework("jax", ("cuda:0",))


def test_memory_in_which_no_executor_lives_is_refused() -> None:
    options = parser().parse_args(["join", "--memory", "5MiB", "--device", "cpu"])
    with pytest.raises(InputError, match=r"--memory 5 MiB .* is too little: .*; give --memory 1GiB or more"):
        join_options(options)


def test_a_refused_record_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path))
    options = parser().parse_args(["join", "--memory", "1GiB", "--device", "cpu"])
    monkeypatch.setattr("peer.devices.host_memory_bytes", lambda: 1 << 40)
    daemon = Daemon(join_options(options), lambda ready: None, lambda findings: None)

    class Record:
        devices = ()

    class Board:
        def publish(self, record: object) -> None:
            raise RecordError("too long")

    monkeypatch.setattr(daemon, "_record", Record)
    monkeypatch.setattr(daemon, "_say_ready", lambda event: None)
    daemon._publish(Board())  # type: ignore[arg-type]
    assert "does not take this peer's record: too long" in caplog.text

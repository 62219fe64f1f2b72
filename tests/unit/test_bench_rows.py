"""Every benchmark has the same command line, and says what it found in one way."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench.rows import at_least, at_most, report

THERE = [t for t in bench.TOPICS if (Path(bench.__file__).parent / f"{t}.py").exists()]


@pytest.mark.parametrize("topic", ["__main__", *THERE])
def test_help_is_help_and_an_unknown_option_is_bad_input(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"tests.bench.{topic}").main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--json" in printed and "--quick" in printed and "Exit code 0" in printed
    with pytest.raises(SystemExit) as ended:
        main(["--quik"])
    assert ended.value.code == 2


def test_a_missed_bound_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    held, missed = at_least("rate", 1.7, 1.6, "x"), at_most("time", 3, 2, " s")
    assert (report([held]), report([held, missed])) == (0, 1)
    table = capsys.readouterr().out.splitlines()
    assert table[-1].split() == ["time", "3", "s", "<=", "2", "s", "NO"]
    assert report(iter([missed]), True) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [{"case": "time", "figure": "3 s", "bound": "<= 2 s", "holds": False}]
    assert "time: 3 s (<= 2 s)" in captured.err

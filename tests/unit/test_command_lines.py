"""The three command lines: every option says its default, the documents' lines can be typed as they stand, and what
cannot be parsed is one line with exit code 2."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dht import cli_monitor
from peer import cli_peer, cli_peer_options, cli_run

ROOT = Path(__file__).parents[2]
ROOMS = ("dht", "examples", "fusion_p2p", "peer", "tests")
PAGES = [ROOT / "README.md", *sorted(page for room in ROOMS for page in (ROOT / room).rglob("*.md"))]
PARSERS = {"fusion-peer": cli_peer_options.parser, "fusion-monitor": cli_monitor.parser}


def subcommands(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def described() -> Iterator[tuple[str, str, bool]]:
    """Every option of every command: its name, its help as printed, whether it takes a value."""
    for program, make in PARSERS.items():
        for name, command in subcommands(make()).items():
            for action in command._actions:
                if action.option_strings and action.dest != "help":
                    yield f"{program} {name} {action.option_strings[0]}", action.help or "", action.metavar is not None
    group: Any = typer.main.get_command(cli_run.app)
    for name, command in group.commands.items():
        for option in command.params:
            if option.param_type_name == "option" and option.name != "help":
                shown = option.show_default is not False and not (
                    option.default is None or option.default is False or option.default == ""
                )
                text = f"{option.help} [default: {option.default}]" if shown else option.help
                yield f"fusion-run {name} {option.opts[0]}", text, not option.is_flag


@pytest.mark.parametrize(("option", "text"), [(o, t) for o, t, _ in described()], ids=lambda v: str(v)[:60])
def test_every_option_says_what_it_does_and_its_default(option: str, text: str) -> None:
    said, _, default = re.sub(r"[([]default", "Default", text).partition("Default:")
    assert said.strip() and default.strip(), f"{option}: {text!r}"


def typed(line: str) -> list[str]:
    """A document's line as one would type it: without comment and redirection, with figures for the placeholders."""
    line = re.sub(r"\s+#.*| > .*| …$", "", line).replace("[--json]", "--json").replace("SEED[:FAULTS]", "7:3")
    return [{"N": "3", "SEED": "7", "MBPS": "1"}.get(word, word) for word in shlex.split(line)]


def lines_of_documents() -> list[str]:
    found = set()
    for page in PAGES:
        text = page.read_text("utf-8")
        found |= set(re.findall(r"(?m)^    (?:sudo )?(fusion-(?:peer|run|monitor) .*)$", text))
        found |= set(re.findall(r"`(?:sudo )?(fusion-(?:peer|run|monitor) [^`,]+)`", text))
    assert len(found) > 25
    return sorted(found)


@pytest.mark.parametrize("line", lines_of_documents())
def test_the_lines_of_the_documents_can_be_typed(line: str) -> None:
    program, *words = typed(line)
    if "--help" in words:
        words.remove("--help")
        words = words or ["status"]
    if program in PARSERS:
        PARSERS[program]().parse_args(words)
        return
    group: Any = typer.main.get_command(cli_run.app)
    with group.make_context(program, words) as context:
        name, command, rest = group.resolve_command(context, words)
        if rest or not any(p.required for p in command.params):  # a command named alone, in a sentence
            command.make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_document_names_no_option_that_is_not_there(page: Path) -> None:
    """Options that stand for themselves in a text, `--local 4`, are ours; other programs' stand behind their names."""
    known = {o.split()[-1] for o, _, _ in described()} | {"--help"}
    alone = re.findall(r"`(--[a-z][^`]*)`", page.read_text("utf-8"))
    assert {word for text in alone for word in re.findall(r"--[a-z][\w-]*", text)} <= known


MAIN: dict[str, Callable[[list[str]], int]] = {
    "fusion-peer": cli_peer.main,
    "fusion-monitor": cli_monitor.main,
    "fusion-run": cli_run.execute,
}
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
BAD = [
    ("fusion-peer", "required: COMMAND"),
    ("fusion-peer join --threads many", "'many' is not a whole number from 1 to 1024"),
    ("fusion-peer join --upload-mbps nan", "nan must lie between 0.01 and 1000000 Mbps"),
    ("fusion-peer join --beat-s soon", "'soon' is not a number from 0.05 to 3600 s"),
    ("fusion-peer join --ready-fd -1", "-1 must lie between 0"),
    ("fusion-peer join --framework numpy", "choose from 'torch', 'jax'"),
    ("fusion-peer join --config nowhere.toml", "nowhere.toml cannot be read: No such file or directory; --config"),
    ("fusion-peer join --swarm-key short", "64 hex digits"),
    ("fusion-peer join --swarm-name Lab", "'Lab' is no name of a swarm: 1 to 32 of a-z, 0-9 and hyphens"),
    ("fusion-peer join --runs me", "as `fusion-run show` prints them"),
    ("fusion-peer join --device tpu", "use auto, cpu, cuda:0"),
    ("fusion-peer join --hours noon", "22:00-07:00"),
    ("fusion-peer join elsewhere", "one looks like /ip4/"),
    ("fusion-peer join --dead-s 1 --beat-s 1", "--dead-s 1 must be at least twice --beat-s 1"),
    ("fusion-peer join --upload-mbps 5 --relay-mbps 5", "must be less than --upload-mbps 5"),
    ("fusion-peer status", "start one with: fusion-peer join"),
    ("fusion-peer leave now", "unrecognized arguments: now"),
    ("fusion-peer bench --device tpu", "use auto, cpu, cuda:0"),
    ("fusion-monitor", "required: COMMAND"),
    ("fusion-monitor watch", "choose from 'status', 'top', 'web'"),
    ("fusion-monitor status --timeout never", "'never' is not a number from 0.1 to 3600 s"),
    ("fusion-monitor status --swarm elsewhere", "one looks like /ip4/"),
    ("fusion-monitor status", "pass --swarm"),
    ("fusion-monitor top --every nan", "nan must lie between 1 and 3600 s"),
    ("fusion-monitor web --port http", "'http' is not a whole number from 0 to 65535"),
    (f"fusion-monitor web --swarm {NOBODY} --port 0 --host 203.0.113.1", "--host"),
    (f"fusion-monitor web --swarm {NOBODY} --port 0 --history /proc/nowhere/x", "--history"),
    ("fusion-run", "Missing command; see fusion-run --help"),
    ("fusion-run trian", "No such command 'trian'"),
    ("fusion-run train", "fusion-run train: Missing argument 'CONFIG'; see"),
    ("fusion-run train x --stepz 2", "No such option: --stepz"),
    ("fusion-run train x --local 0", "--local 0: Invalid value"),
    ("fusion-run train x --local many", "--local many: Invalid value"),
    ("fusion-run train x --minutes nan", "--minutes nan: Invalid value"),
    ("fusion-run train nowhere.toml", "cannot read the configuration nowhere.toml: No such file or directory; fusion-"),
    ("fusion-run train .", "cannot read the configuration .: Is a directory; fusion-run init gpt2 > gpt2.toml"),
    ("fusion-run resume nowhere", "neither a run folder nor one under runs/"),
    ("fusion-run list nowhere", "nowhere is no folder; give"),
    ("fusion-run stop nowhere", "neither a run folder nor one under runs/"),
    ("fusion-run init bert", "choose one of: gpt2, resnet"),
    ("fusion-run plan --tau 2", "--tau 2: Invalid value"),
    ("fusion-run codecs nowhere.toml", "cannot read the configuration nowhere.toml"),
    ("fusion-run lab nowhere.json nowhere.toml", "cannot read the configuration nowhere.toml"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_with_the_fix_and_exit_code_2(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    for name in ("FUSION_SWARM", "FUSION_SWARM_KEY", "FUSION_SWARM_NAME"):
        monkeypatch.delenv(name, raising=False)
    program, *words = line.split()
    try:
        code: object = MAIN[program](words)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    (told,) = printed.err.splitlines()
    assert told.startswith(program) and said in told

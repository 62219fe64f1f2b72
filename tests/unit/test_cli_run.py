"""`fusion-run`: bad input gets one line with the fix and exit code 2, and nothing is lost."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fusion_p2p.optim import AdamW
from fusion_p2p.plan import Numerics
from peer import checkpoint, cli_plan, cli_run, config
from peer.data_open import open_data
from peer.models import build_model
from peer.protocol import RunSpec, Signed
from peer.trainer_state import Manifest, RunFolder

CONFIG = """
[run]
name = "cats"
steps = 2
[model]
family = "gpt2"
[model.gpt2]
layers = 1
width = 16
heads = 2
context = 16
[data]
path = "book.txt"
vocab = 280
"""
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
MODELS = """
import torch

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def forward(self, input_ids, labels):
        loss = (input_ids * self.weight).float().mean()
        return {"loss": loss if loss > 3 else -loss}

def data():
    return [{"input_ids": torch.arange(8).reshape(4, 2), "labels": torch.arange(8).reshape(4, 2)}] * 4, None
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a configuration and a book in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FUSION_SWARM", raising=False)
    Path("run.toml").write_text(CONFIG)
    Path("book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 60)
    return tmp_path


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli_run.execute(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def make_run(folder: Path) -> Path:
    """A run folder as a finished run leaves it; the folder of its checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.replace("book.txt", str(Path("book.txt").resolve())))
    settings = config.load(folder / "config.toml")
    model = build_model(settings, open_data(settings, folder, 16))
    weights = model.state_dict()
    return checkpoint.save(folder / "checkpoints", weights, run="r", name="cats", step=2, loss=5.0, keep=2)


def make_set(folder: Path, step: int) -> Path:
    """A complete set, as a trainer keeps it."""
    spec = RunSpec(run="r", name="cats", owner=b"", opdag_hash="", seed=0, optimizer=AdamW(1e-3), created=0.0)
    signed = Signed(body=msgspec.msgpack.encode(spec), key=b"", signature=b"")
    run = RunFolder(folder)
    run.create(signed, b"")
    numerics = Numerics(cuts=(), micro_batches=1, micro_batch_size=1)
    run.save_set(Manifest(run="r", opdag_hash="", tick=step, step=step, epoch=1, numerics=numerics, stages=()))
    return folder


def write(text: str, name: str = "bad.toml") -> str:
    Path(name).write_text(text)
    return name


BAD = {
    "unknown key": (lambda: ["train", write(CONFIG + "[bacth]\n")], "bad.toml: unknown key bacth; did you mean batch?"),
    "no such file": (lambda: ["train", "none.toml"], "fusion-run init gpt2 > none.toml"),
    "no preset": (lambda: ["init", "bert"], "choose one of: gpt2, resnet"),
    "no numeric log": (
        lambda: ["train", "run.toml", "--local", "2", "--numeric-log", "none.jsonl"],
        "none.jsonl cannot be read",
    ),
    "a mode that is none": (
        lambda: ["train", write(CONFIG + '[numerics]\nmode = "free"\n')],
        "numerics.mode = 'free'",
    ),
    "two swarms": (lambda: ["train", "run.toml", "--swarm", NOBODY, "--local", "2"], "exclude each other"),
    "no swarm": (lambda: ["train", "run.toml"], "give --swarm ADDR or --local N"),
    "malformed address": (lambda: ["train", "run.toml", "--swarm", "1.2.3.4:80"], "1.2.3.4:80"),
    "address without peer": (lambda: ["train", "run.toml", "--swarm", "/ip4/1.2.3.4/tcp/80"], "/p2p/"),
    "run folder where none can be": (
        lambda: ["train", "run.toml", "--local", "1", "--run-dir", "/proc/x"],
        "run folder '/proc/x' cannot be used: No such file or directory",
    ),
    "run folder of too long a name": (
        lambda: ["train", "run.toml", "--local", "1", "--run-dir", "x" * 300],
        "cannot be used: File name too long",
    ),
    "report nowhere": (
        lambda: ["train", "run.toml", "--local", "1", "--report", "/nonexistent/x.json"],
        "--report /nonexistent/x.json: no file can be written there",
    ),
    "no data": (
        lambda: ["train", write(CONFIG.replace("book.txt", "none.txt")), "--swarm", NOBODY],
        "data.path: none.txt does not exist",
    ),
    "no package": (
        lambda: ["train", write(CONFIG + 'kind = "package"\n'), "--swarm", NOBODY],
        "data.path: no installed package 'book'; pip install book",
    ),
    "uncapturable model": (
        lambda: [
            "train",
            write('[model]\nfunction = "odd_models:Branches"\n[data]\nkind = "function"\npath = "odd_models:data"\n'),
            "--swarm",
            NOBODY,
        ],
        "odd_models.py:10",
    ),
    "not a run folder": (
        lambda: ["train", "run.toml", "--local", "2", "--run-dir", "."],
        ". exists and is no run folder; give a new one",
    ),
    "no such run": (lambda: ["show", "dogs"], "no run 'dogs'"),
    "nobody trains": (lambda: [make_run(Path("runs/cats")) and "stop", "cats"], "fusion-run resume runs/cats"),
    "nothing left to do": (
        lambda: [make_set(make_run(Path("runs/cats")).parents[1], step=2) and "resume", "cats", "--local", "2"],
        "all 2 steps are done; go on with more: fusion-run resume runs/cats --steps 4",
    ),
    "no checkpoint": (lambda: ["eval", "cats", "--checkpoint", "x"], "no run 'cats'"),
    "nothing to resume": (
        lambda: [make_run(Path("runs/cats")) and "resume", "cats", "--swarm", NOBODY],
        "holds no run",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_line_with_the_fix(case: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("odd_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(".")
    arguments, said = BAD[case]
    code, out, err = call(*arguments())
    assert code == 2
    assert all("capturing the model" in line for line in out.splitlines())  # a phase, where it came so far
    assert err.startswith("fusion-run: ") and err.count("\n") == 1
    assert said in err
    assert case in ("nobody trains", "nothing to resume", "nothing left to do") or not Path("runs/cats").exists()


def test_a_wrong_option_is_code_2(call: Call) -> None:
    for arguments in (["train"], ["train", "run.toml", "--local", "0"], ["train", "run.toml", "--steps", "x"], ["fly"]):
        assert call(*arguments)[0] == 2


def test_train_onto_a_run_says_how_to_resume_and_touches_nothing(call: Call) -> None:
    make_run(Path("runs/cats"))
    make_set(Path("runs/cats"), step=2)
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    code, _, err = call("train", "run.toml", "--local", "2")
    assert code == 2
    assert err == "fusion-run: runs/cats holds a run already; continue it with: fusion-run resume runs/cats\n"
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_init_prints_what_train_reads(call: Call) -> None:
    code, out, _ = call("init", "gpt2")
    assert code == 0
    assert config.parse(out).model.family == "gpt2"


def test_runs_are_listed_and_shown(call: Call) -> None:
    assert call("list")[0] == 0
    make_run(Path("runs/cats"))
    code, out, _ = call("list", "--json")
    [entry] = json.loads(out)
    assert code == 0
    assert (entry["name"], entry["phase"], entry["running"], entry["steps"]) == ("cats", "new", False, 2)
    assert "runs/cats" in call("list")[1]
    shown = json.loads(call("show", "cats", "--json")[1])
    assert shown["checkpoints"][0]["step"] == 2 and shown["config"]["model"]["gpt2"]["width"] == 16
    assert "model.gpt2" in call("show", "cats")[1]


def test_a_checkpoint_is_evaluated_sampled_and_exported(call: Call) -> None:
    make_run(Path("runs/cats"))
    code, out, _ = call("eval", "cats", "--json")
    result = json.loads(out)
    assert code == 0 and result["step"] == 2
    assert abs(result["loss"] - torch.tensor(280.0).log()) < 0.3
    assert 0 < result["nats_per_byte"] < result["loss"]
    first, again = (call("sample", "cats", "--tokens", "9", "--prompt", "the cat", "--seed", "3") for _ in range(2))
    assert first == again and first[1].startswith("the cat") and first[0] == 0
    code, out, _ = call("export", "cats", "out")
    assert code == 0 and "model.safetensors" in out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in Path("out").iterdir()}
    code, _, err = call("export", "cats", "out")
    assert code == 2 and "exists already" in err


def test_a_damaged_or_foreign_checkpoint_is_refused(call: Call) -> None:
    path = make_run(Path("runs/cats"))
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-10])
    code, _, err = call("sample", "cats")
    assert code == 2 and "is truncated" in err and err.count("\n") == 1
    (path / "model.safetensors").write_bytes(whole)
    spec = RunSpec(run="q", name="cats", owner=b"", opdag_hash="", seed=0, optimizer=AdamW(1e-3), created=0.0)
    signed = Signed(body=msgspec.msgpack.encode(spec), key=b"", signature=b"")
    Path("runs/cats/spec.json").write_bytes(msgspec.json.encode(signed))
    code, _, err = call("export", "cats", "out")
    assert code == 2 and "belongs to run cats (r), not q; fusion-run fork" in err and err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(("command", "option"), [("train", "--no-compute"), ("plan", "--testbed")])
def test_help_loads_nothing_heavy(command: str, option: str) -> None:
    code = (
        "import sys\n"
        "from peer import cli_run\n"
        f"assert cli_run.execute(['{command}', '--help']) == 0\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


def test_an_unknown_compression_is_refused_and_leaves_nothing(call: Call) -> None:
    Path("run.toml").write_text(CONFIG + '[numerics]\ncompression = "zip"\n')
    code, _, err = call("train", "run.toml", "--swarm", NOBODY)
    assert code == 2 and err.count("\n") == 1
    assert (
        "compression 'zip' is unknown" in err
        and "use adatopk, adatopk:PERCENT, adatopk-paper, topk:RATIO, none or a codec" in err
    )
    assert not Path("runs/cats").exists()


BEDS = Path(__file__).parents[2] / "examples" / "testbeds" / "testbeds.json"


def test_plan_of_a_testbed(call: Call, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    code, out, err = call(
        "plan", "--testbed", f"{BEDS}:T2", "--model", "resnet101-cifar", "--json", "--picture", str(picture)
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert 0 < found["lower_bound_s"] <= found["step_s"]
    assert len(found["plan"]["placement"]) == len(found["stage_s"])
    assert picture.read_text().startswith("<svg")


def test_plan_of_a_configuration_on_a_testbed(call: Call) -> None:
    code, out, _ = call("plan", "run.toml", "--testbed", f"{BEDS}:T2", "--codecs", "dense")
    assert code == 0
    assert "stage  0" in out and "what any plan could do" in out


def test_a_plan_compresses_as_its_configuration_says(call: Call) -> None:
    assert cli_plan.ladder_of_run(cli_plan.PlanOptions(config=Path("run.toml"))).rungs[-1].codec == "transform:1/1"
    Path("run.toml").write_text(CONFIG + '[numerics]\ncompression = "adatopk:0.5"\n')
    (*_, last) = cli_plan.ladder_of_run(cli_plan.PlanOptions(config=Path("run.toml"), tau=0.5)).rungs
    assert last.codec == "transform:3/2" and last.loss_cost <= 0.005
    assert cli_plan.ladder_of_run(cli_plan.PlanOptions(model="gpt2")).rungs[-1].codec == "topk:0.01"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --testbed FILE"),
        (("--testbed", str(BEDS), "--model", "gpt2-xl"), "has several testbeds; name one"),
        (("--testbed", f"{BEDS}:T2"), "no model to plan"),
        (("--testbed", "nowhere.json", "--model", "gpt2-xl"), "nowhere.json"),
        (("--testbed", f"{BEDS}:T2", "--model", "gpt2-xl", "--codecs", "zip"), "codecs 'zip' is none of"),
        (("--testbed", f"{BEDS}:T2", "--model", "gpt2-xl", "--codecs", "adatopk:x"), "or adatopk:8 to allow 8%"),
    ],
)
def test_plan_says_what_is_wrong(call: Call, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = call("plan", *arguments)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["testbeds"]["T1"]["inter"].pop("A-B"), "no link between sites A and B"),
        (lambda d: d["testbeds"]["T1"]["inter"].update({"A-B": [-100, 10]}), "it must be positive"),
        (lambda d: d["gpus"]["RTX4090"].__setitem__(2, 0), "memory_bytes is 0"),
        (lambda d: [gpu.__setitem__(2, 0.01) for gpu in d["gpus"].values()], "the model needs"),
        (lambda d: [gpu.__setitem__(0, 0) for gpu in d["gpus"].values()], "flops_per_s is 0"),
    ],
)
def test_a_faulty_testbed_is_one_line(call: Call, tmp_path: Path, edit: Callable[[Any], Any], words: str) -> None:
    data = json.loads(BEDS.read_text())
    edit(data)
    (tmp_path / "beds.json").write_text(json.dumps(data))
    summary = str(BEDS.with_name("opdags.json"))
    code, out, err = call(
        "plan", "--testbed", f"{tmp_path / 'beds.json'}:T1", "--model", "gpt2-xl", "--summary", summary
    )
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_full_disk_is_one_line_and_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peer import run_training

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/disk/x")

    monkeypatch.setattr(run_training._Session, "_train", full)
    make_set(tmp_path / "cats", 1)
    session = run_training._Session(config.load(Path("run.toml")), tmp_path / "cats", (), None)
    assert session.run(None, resuming=True) == 4
    said = f"no space left on the disk of /disk/x; make room, then continue with: fusion-run resume {tmp_path / 'cats'}"
    assert capsys.readouterr().err.strip() == f"fusion-run: {said}"


def test_an_early_interrupt_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "load", interrupted)
    assert call("train", "run.toml") == (130, "", "fusion-run: ended by Ctrl-C\n")


@pytest.mark.timeout(400)
def test_codecs_prints_the_ladder_of_the_model_at_hand(call: Call) -> None:
    Path("run.toml").write_text(CONFIG.replace("layers = 1", "layers = 3"))
    code, out, err = call("codecs", "run.toml", "--steps", "1")
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["codec", "true", "bytes", "ratio", "enc+dec", "error", "loss", "pays", "below"]
    foot = [line for line in lines if line.startswith(("true bytes:", "*: ", "+: "))]
    assert "*: adatopk chooses from these" in "\n".join(foot)
    lines = lines[: -len(foot)]
    rows = {line[2:].split()[0]: line for line in lines}
    assert set(rows) >= {"int8", "transform:2/1", "topk-masked:0.01"}
    assert all(line.rstrip().endswith("Mbps") and "%" in line and "ns" in line for line in lines)
    assert any(line.startswith("*") for line in lines)
    ratio = {name: float(line.split()[line.split().index("ns") - 2].rstrip("x")) for name, line in rows.items()}
    assert ratio["int8"] > 3.5 and ratio["dense:bf16"] > 1.9


def test_codecs_for_scripts(call: Call) -> None:
    Path("run.toml").write_text(CONFIG.replace("layers = 1", "layers = 3"))
    code, out, _ = call("codecs", "run.toml", "--steps", "1", "--json")
    found = {row["codec"]: row for row in json.loads(out)}
    assert code == 0 and found["int8"]["ratio"] > 3.5
    assert any(row["on_ladder"] for row in found.values())
    assert all(row["pays_below_bytes_per_s"] is None or row["pays_below_bytes_per_s"] > 0 for row in found.values())


def test_codecs_of_a_configuration_that_is_not_there_is_one_line(call: Call) -> None:
    code, _, err = call("codecs", "absent.toml")
    assert code == 2 and err.count("\n") == 1 and "absent.toml" in err

"""Checkpoints are whole or refused; exports load in transformers; the run folder answers for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fusion_p2p.errors import InputError
from peer import checkpoint, config
from peer.data_open import open_data
from peer.events import EvalResult, LinkBytes, RunEvent, StepResult
from peer.export import export, load_weights, sample_text
from peer.models import build_model, context_of
from peer.plot import curve, spark
from peer.run_control import ControlServer, TrainerLock, ask, is_running
from peer.run_index import details, find_run, summary
from peer.runlog import open_logs, read_losses
from peer.view import View

TINY = '[model]\nfamily = "gpt2"\n[model.gpt2]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n'


def text_config(tmp_path: Path, extra: str = "") -> config.Config:
    (tmp_path / "book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 60)
    return config.parse(f'{TINY}[data]\npath = "{tmp_path / "book.txt"}"\nvocab = 280\n{extra}')


def saved(folder: Path, step: int, run: str = "r1", keep: int = 2) -> Path:
    tied = torch.arange(6.0).reshape(2, 3) + step
    weights = {
        "head.weight": tied,
        "embed.weight": tied,
        "n": torch.tensor(step),
        "h": torch.ones(2, dtype=torch.bfloat16),
    }
    return checkpoint.save(folder, weights, run=run, name="cats", step=step, loss=1.5, keep=keep)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path, 3)
    info, weights = checkpoint.load(path, run="r1")
    assert (info.step, info.loss, info.name, info.aliases) == (3, 1.5, "cats", {"head.weight": "embed.weight"})
    assert torch.equal(weights["head.weight"], torch.arange(6.0).reshape(2, 3) + 3)
    assert weights["h"].dtype == torch.bfloat16 and weights["n"].item() == 3
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint.json", "model.safetensors"]


def test_the_newest_are_kept_and_found(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        saved(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / ".step-00000020.part").mkdir()  # as a power cut leaves it
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-00000010", "step-00000015"]
    assert checkpoint.find(tmp_path).name == "step-00000015"
    with pytest.raises(InputError, match="holds no checkpoint"):
        checkpoint.find(tmp_path / "nowhere")


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 3)
    with pytest.raises(InputError, match=r"belongs to run cats \(r1\), not r2; fusion-run fork"):
        checkpoint.load(path, run="r2")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for data, said in (
        (whole[:-1], "is truncated"),
        (b"", "is truncated"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "was altered"),
    ):
        file.write_bytes(data)
        with pytest.raises(InputError, match=said):
            checkpoint.load(path)
    file.unlink()
    with pytest.raises(InputError, match="cannot read"):
        checkpoint.load(path)
    (path / "checkpoint.json").write_bytes(b'{"run": 3}')
    with pytest.raises(InputError, match=r"checkpoint\.json is damaged"):
        checkpoint.load(path)


def test_the_model_is_a_function_of_the_seed_and_loads_strictly(tmp_path: Path) -> None:
    settings = text_config(tmp_path)
    data = open_data(settings, tmp_path, context_of(settings))
    state = torch.random.get_rng_state()
    one, two = build_model(settings, data), build_model(settings, data)
    other = build_model(config.replace(settings, "run", seed=1), data)
    assert torch.equal(state, torch.random.get_rng_state())
    name = "transformer.wte.weight"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    load_weights(other, one.state_dict(), "x")
    assert torch.equal(other.state_dict()[name], one.state_dict()[name])
    wrong = {k: v for k, v in one.state_dict().items() if k != name}
    with pytest.raises(InputError, match=f"x does not fit the configured model: .*{name}"):
        load_weights(other, wrong, "x")


def test_an_export_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    settings = text_config(tmp_path)
    data = open_data(settings, tmp_path, 16)
    model = build_model(settings, data).eval()
    out = tmp_path / "out"
    assert export(model, out, tmp_path)[:2] == ["config.json", "generation_config.json"]
    theirs = GPT2LMHeadModel.from_pretrained(out).eval()
    batch = next(data.held_out.once(2))
    assert torch.equal(theirs(**batch).logits, model(**batch).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert data.tokenizer is not None
    assert tokenizer("the dog sat")["input_ids"] == data.tokenizer.encode("the dog sat").tolist()
    with pytest.raises(InputError, match="exists already"):
        export(model, out)
    read_back = config.parse(f'[model]\nhf = "{out}"\n[data]\npath = "{tmp_path / "book.txt"}"\n')
    assert context_of(read_back) == 16
    assert torch.equal(build_model(read_back, data).eval()(**batch).logits, theirs(**batch).logits)


def test_sampling_is_seeded_and_goes_past_the_context(tmp_path: Path) -> None:
    settings = text_config(tmp_path)
    data = open_data(settings, tmp_path, 16)
    model = build_model(settings, data)
    assert data.tokenizer is not None
    texts = [sample_text(model, data.tokenizer, context=16, prompt="the cat", tokens=40, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the cat")
    escape = sample_text(model, data.tokenizer, context=16, prompt="a\x1b[2Jb\n\tc", tokens=1)
    assert escape.startswith("a\ufffd[2Jb\n\tc")
    assert model.training
    likeliest = [sample_text(model, data.tokenizer, context=16, tokens=5, temperature=0, seed=s) for s in (1, 2)]
    assert likeliest[0] == likeliest[1]


def test_models_that_cannot_be_had_are_one_line(tmp_path: Path) -> None:
    settings = text_config(tmp_path)
    data = open_data(settings, tmp_path, 16)
    for model, said in (
        (f'hf = "{tmp_path}"', "config.json does not exist"),
        ('function = "json:nothing"', "has no attribute 'nothing'"),
        ('function = "time:time"', "returned float"),
    ):
        bad = config.parse(f'[model]\n{model}\n[data]\npath = "{tmp_path / "book.txt"}"\n')
        with pytest.raises(InputError, match=said):
            context_of(bad)
            build_model(bad, data)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"model\.hf"):
        context_of(config.parse(f'[model]\nhf = "{tmp_path}"\n[data]\npath = "x"\n'))


def test_logs_carry_steps_and_evaluations(tmp_path: Path) -> None:
    settings = config.LogSection()
    for first in (0, 2):  # the second session repeats step 2
        logs = open_logs(settings, tmp_path, "cats", 2.0)
        for step in range(first, first + 3):
            for log in logs:
                log(StepResult(step=step, loss=4.0 - step + first, step_time_s=0.5, samples=8, tokens=128))
        for log in logs:
            log(EvalResult(step=3, loss=3.0, samples=9))
            log(LinkBytes({"-1-0": 5}, {0: "frame"}))
            log.close()
    assert read_losses(tmp_path / "log.jsonl") == [(0, 4.0), (1, 3.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert rows[0] == "step,loss,step_time_s,tokens_per_s,samples_per_s,held_out_loss,nats_per_byte"
    assert rows[1] == "0,4.0,0.5,256.0,16.0,,"
    assert rows[4] == "3,,,,,3.0,1.5"
    assert len(rows) == 9
    with (tmp_path / "log.jsonl").open("ab") as f:
        f.write(b'{"type":"st')
    assert len(read_losses(tmp_path / "log.jsonl")) == 5
    last = msgspec.json.decode((tmp_path / "log.jsonl").read_bytes().splitlines()[-2])
    assert last["type"] == "links" and last["sent"] == {"-1-0": 5}


@pytest.mark.parametrize(("key", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_log_whose_package_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    wanted = config.LogSection(tensorboard=True) if key == "tensorboard" else config.LogSection(wandb="project")
    with pytest.raises(InputError, match=rf"log\.{key} needs a package: pip install 'fusion-p2p\[{key}\]'"):
        open_logs(wanted, tmp_path, "cats", 0.0)
    assert not list(tmp_path.iterdir())


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for log in open_logs(config.LogSection(tensorboard=True), tmp_path, "cats", 2.0):
        log(StepResult(step=3, loss=4.0, step_time_s=0.5, samples=8))
        log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    assert [(e.step, e.value) for e in written.Scalars("loss")] == [(3, 4.0)]


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with View("cats", 100, bytes_per_token=2.0, clock=lambda: 50.0) as view:
        view(RunEvent(kind="phase", text="gathering volunteers [bold]", time_s=0.0))
        for step in range(3):
            view(StepResult(step=step, loss=2.0, step_time_s=0.5, samples=8, tokens=128))
            view(LinkBytes({"-1-0": 1000 * (step + 1), "0-1": 0}, {1: "activation"}))
        view(EvalResult(step=3, loss=3.0, samples=9))
        panel = view._draw()  # what a terminal would get
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("gathering volunteers [bold]")
    assert lines[1] == "step 1/100  loss 2.0000  256 tokens/s"
    assert lines[2] == "after step 3: held-out loss 3.0000 (1.500 nats per byte)"
    assert len(lines) == 3
    view.console.print(panel)
    drawn = capsys.readouterr().out
    assert "trainer→0 3.0 kB" in drawn and "48 s to go" in drawn and "step 3/100" in drawn


def test_curves() -> None:
    text = curve([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0], width=10, height=4, label="loss")
    lines = text.splitlines()
    assert lines[0].strip() == "loss" and lines[1].startswith("   4.000 │⠉⠢") and lines[4].startswith("   1.000 │")
    assert lines[-1].split() == ["0", "3"]
    assert curve([0], [1.0]) == "" and curve([0, 1], [1.0, float("nan")]) == ""
    assert spark([1.0, 2.0, 3.0]) == "▁▄█" and spark([]) == ""


def test_a_trainer_is_spoken_to_through_its_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)  # longer than a unix address may be
    deep.mkdir()
    heard: list[str] = []
    with pytest.raises(InputError, match="no trainer works on"):
        ask(deep, "status")
    with TrainerLock(deep):
        with pytest.raises(InputError, match="does not answer"):
            ask(deep, "stop")
        with pytest.raises(InputError, match="in use by another trainer"), TrainerLock(deep):
            pass
        with ControlServer(deep, lambda: "step 3", heard.append):
            assert is_running(deep)
            assert ask(deep, "status").text == "step 3"
            assert ask(deep, "pause").pid == os.getpid()
            assert (deep / "control.sock").stat().st_mode & 0o777 == 0o600
    assert heard == ["pause"]
    assert not (deep / "control.sock").exists() and not is_running(deep)


def test_a_killed_trainer_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib, peer.run_control as r\n"
        "lock = r.TrainerLock(pathlib.Path(sys.argv[1])); lock.__enter__()\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"held\n"
        assert is_running(tmp_path)
        trainer.kill()
    assert not is_running(tmp_path)


def test_a_run_folder_tells_about_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "cats"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(TINY + '[data]\npath = "b"\n[run]\nname = "cats"\nsteps = 9')
    assert find_run("cats") == find_run(str(folder)).relative_to(tmp_path)
    with pytest.raises(InputError, match=r"no run 'dogs': .*there: cats"):
        find_run("dogs")
    assert (summary(folder).phase, summary(folder).steps) == ("new", 9)
    saved(folder / "checkpoints", 4)
    progress = {"name": "cats", "run": "r1", "phase": "training", "epoch": 1, "tick": 4, "step": 4, "loss": 2.5}
    (folder / "progress.json").write_bytes(msgspec.json.encode(progress))
    shown = summary(folder)
    assert (shown.phase, shown.step, shown.loss) == ("interrupted", 4, 2.5)
    assert details(folder)["checkpoints"][0]["step"] == 4
    (folder / "config.toml").write_text("[x]")
    assert summary(folder).phase == "damaged" and "unknown key x" in summary(folder).reason


def test_weights_and_biases_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        """As the package's own, which tells so where nobody has logged in."""

    def init(**_: object) -> None:
        raise Error("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error))
    with pytest.raises(InputError, match=r"log.wandb = 'cats': No API key configured. Use .*; run `wandb login`, or"):
        open_logs(config.LogSection(wandb="cats"), tmp_path, "cats", 2.0)


def test_scalars_reach_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'fusion-p2p[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logs = open_logs(config.LogSection(wandb="project"), tmp_path, "cats", 2.0)
    for log in logs:
        log(StepResult(step=3, loss=4.0, step_time_s=0.5, samples=8))
        log(EvalResult(step=4, loss=3.0, samples=9))
        log.close()
    [written] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert all(name in written.read_bytes() for name in (b"held_out_loss", b"nats_per_byte", b"samples_per_s"))

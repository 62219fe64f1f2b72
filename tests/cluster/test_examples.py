"""Every example runs, for two steps, as a user would start it; and every command of `fusion-run` on a real run."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GPT2LMHeadModel

from fusion_p2p.plan import LinkCodec, NumericLogEntry, Numerics
from peer.config import parse
from peer.data_open import open_data
from peer.data_stream import as_source
from peer.lab.undisturbed import undisturbed_weights
from peer.models import build_model, context_of
from peer.numeric_log import read
from peer.signing import new_session_key, sign
from tests.cluster.trainer_process import SMALL, fusion_run, refused, rest_of, script, small_run, start, wait_for_line
from tests.cluster.volunteer_process import Peer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(1800)


def test_gpt2_toml(place: Path) -> None:
    out = fusion_run(place, "train", EXAMPLES / "gpt2.toml", "--local", "2", "--steps", "2", "--report", "r.json")
    report = json.loads((place / "r.json").read_text())
    losses = [s["loss"] for s in report["steps"]]
    assert len(losses) == 2 and all(abs(loss - math.log(1024)) < 0.5 for loss in losses)
    assert report["tokens_per_s"] > 0 and len(report["weights_blake2b"]) == 64
    assert len({p["peer"] for p in report["plan"]["placement"]}) == 2
    assert report["bytes_sent"]["0-1"] > 0 < report["bytes_sent"]["1-0"]
    assert "loss over steps" in out and "nats per byte" in out and "sample:" in out
    run = place / "runs" / "gpt2-demo"
    assert f"checkpoint: {run.relative_to(place)}/checkpoints/step-00000002" in out


def test_resnet_mnist_toml(place: Path) -> None:
    fusion_run(place, "train", EXAMPLES / "resnet_mnist.toml", "--local", "2", "--steps", "2", "--report", "r.json")
    losses = [s["loss"] for s in json.loads((place / "r.json").read_text())["steps"]]
    assert len(losses) == 2 and all(0 < loss < 4 for loss in losses)


def test_train_gpt2_py(place: Path) -> None:
    assert "step 1: loss 5." in script(place, EXAMPLES / "train_gpt2.py", "--steps", "2", "--peers", "2")
    assert (place / "gpt2-woodchuck" / "config.json").exists()


def test_finetune_lora_py(place: Path) -> None:
    assert "step 1: loss 5." in script(place, EXAMPLES / "finetune_lora.py", "--steps", "2")
    written = {p.name for p in (place / "lora-shells").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written and "model.safetensors" not in written


def test_a_paused_run_goes_on_as_if_nothing_had_been(place: Path) -> None:
    small_run(place)
    trainer = start(place, "train", "run.toml", "--local", "2", "--steps", "100000")
    with trainer:
        wait_for_line(trainer, "^step ")
        assert "noted by the trainer" in fusion_run(place, "pause", "cats")
        rest = rest_of(trainer)
    assert trainer.returncode == 0 and "fusion-run resume runs/cats" in rest
    [listed] = json.loads(fusion_run(place, "list", "--json"))
    assert (listed["phase"], listed["running"]) == ("paused", False)
    done = listed["step"]
    end = str(done + 3)
    fusion_run(place, "resume", "cats", "--local", "2", "--steps", end, "--report", "resumed.json")
    resumed = json.loads((place / "resumed.json").read_text())["steps"]
    assert [s["step"] for s in resumed] == list(range(done, done + 3))
    # Where it cuts follows speeds that are measured anew: the whole run is given the other's cuts.
    options = ("--numeric-log", "runs/cats/numeric_log.jsonl", "--run-dir", "whole", "--report", "whole.json")
    fusion_run(place, "train", "run.toml", "--local", "2", "--steps", end, *options)
    whole = json.loads((place / "whole.json").read_text())["steps"]
    assert [s["loss"] for s in resumed] == [s["loss"] for s in whole[done:]]


def logged(folder: Path, report: dict[str, Any]) -> None:
    """TensorBoard's event file, the CSV and the JSON lines all hold the run's losses."""
    losses = [s["loss"] for s in report["steps"]]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(len(losses)))
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses, rel=1e-6)  # it stores float32
    assert [e.value for e in events.Scalars("held_out_loss")] == pytest.approx([report["evals"][0]["loss"]], rel=1e-6)
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows if row["loss"]] == losses
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["type"] == "step"] == losses


def test_the_life_of_a_run(place: Path) -> None:
    """train, train again, list, show, eval, sample, export, fork and stop, on one real run."""
    small_run(place)
    with (place / "run.toml").open("a") as config:
        config.write("[log]\ntensorboard = true\n")
    out = fusion_run(place, "train", "run.toml", "--local", "2", "--report", "r.json")
    assert out.count("volunteers can see or reconstruct this run's data") == 1
    report = json.loads((place / "r.json").read_text())
    [held_out] = report["evals"]
    logged(place / "runs" / "cats", report)
    again = refused(place, "train", "run.toml", "--local", "2")
    assert again == "fusion-run: runs/cats holds a run already; continue it with: fusion-run resume runs/cats"
    evaluated = json.loads(fusion_run(place, "eval", "cats", "--json"))
    assert evaluated["step"] == held_out["step"] == 6
    assert held_out["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)
    shown = json.loads(fusion_run(place, "show", "cats", "--json"))
    assert (shown["phase"], shown["step"], shown["checkpoints"][-1]["step"]) == ("done", 6, 6)
    assert shown["numeric_log"][0]["first_step"] == 0
    texts = [fusion_run(place, "sample", "cats", "--prompt", "the cat", "--tokens", "20") for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("the cat")
    assert "config.json" in fusion_run(place, "export", "cats", "out")
    exported(place / "out", place / "runs" / "cats" / "checkpoints" / "step-00000006")

    (place / "fork.toml").write_text(SMALL.replace('"cats"', '"kittens"').replace("steps = 6", "steps = 100000"))
    trainer = start(place, "fork", "cats", "fork.toml", "--local", "2")
    with trainer:
        assert float(wait_for_line(trainer, "^step ").split()[3]) < report["steps"][0]["loss"] - 0.02
        wait_for_line(trainer, r"^step .* to go, .* to send")
        assert "noted by the trainer" in fusion_run(place, "stop", "kittens")
        rest = rest_of(trainer)
    assert trainer.returncode == 0 and "loss over steps" in rest and "sample:" in rest
    phases = {r["name"]: r["phase"] for r in json.loads(fusion_run(place, "list", "--json"))}
    assert phases == {"cats": "done", "kittens": "done"}


def exported(out: Path, checkpoint: Path) -> None:
    """transformers loads the folder, and what it loads are the checkpoint's weights."""
    model = GPT2LMHeadModel.from_pretrained(out)
    saved = {k: v for path in checkpoint.glob("*.safetensors") for k, v in safetensors.torch.load_file(path).items()}
    state = model.state_dict()
    assert saved and all(torch.equal(state[name], t) for name, t in saved.items())


def test_a_numeric_log_is_repeated(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cuts and codecs hold at its steps, and the weights are those of one process that does the same."""
    small_run(place)
    base = Numerics(cuts=(2,), micro_batches=2, micro_batch_size=2)
    later = msgspec.structs.replace(base, cuts=(4,), codecs=(LinkCodec(0, 1, "int8"),))
    given, key = [NumericLogEntry(0, base, "the first"), NumericLogEntry(3, later, "another cut")], new_session_key()
    (place / "given.jsonl").write_bytes(b"".join(msgspec.json.encode(sign(e, key)) + b"\n" for e in given))
    options = ("--local", "2", "--numeric-log", "given.jsonl", "--report", "r.json")
    fusion_run(place, "train", "run.toml", *options)
    report, folder = json.loads((place / "r.json").read_text()), place / "runs" / "cats"
    done = read(folder / "numeric_log.jsonl")
    assert [(e.first_step, e.numerics) for e in done] == [(e.first_step, e.numerics) for e in given]
    assert report["plan"]["numerics"]["codecs"][0]["codec"] == "int8"
    monkeypatch.chdir(place)
    config = parse((place / "run.toml").read_text())
    data = open_data(config, folder, context_of(config))
    model, source = build_model(config, data), as_source(data.train, place / "again")
    optimizer, steps = config.optimizer_spec(), config.run.steps
    expected = undisturbed_weights(model, source, numerics=base, optimizer=optimizer, steps=steps, log=given)
    assert report["weights_blake2b"] == expected


def test_recomputing_activations_changes_no_bit(place: Path) -> None:
    small_run(place)
    hashes = set()
    for recompute in ("false", "true"):
        (place / "run.toml").write_text(f"{SMALL}[numerics]\nrecompute = {recompute}\n")
        options = ("--local", "2", "--steps", "3", "--run-dir", recompute, "--report", "r.json")
        fusion_run(place, "train", "run.toml", *options)
        report = json.loads((place / "r.json").read_text())
        assert report["plan"]["numerics"]["recompute"] is (recompute == "true")
        hashes.add(report["weights_blake2b"])
    assert len(hashes) == 1


def test_an_address_that_nobody_answers_is_bad_input(place: Path) -> None:
    small_run(place)
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    assert "127.0.0.1" in refused(place, "train", "run.toml", "--swarm", nobody)


def test_too_little_memory_in_the_swarm_is_bad_input_with_figures(place: Path) -> None:
    """The model wants more than the only volunteer has; nothing is begun, so that the same line works once there is
    more."""
    small_run(place)
    wide = SMALL.replace("layers = 2", "layers = 3").replace("width = 16", "width = 768")
    (place / "wide.toml").write_text(wide)
    peer = Peer(place / "peer", memory="512MiB")
    try:
        [address, *_] = peer.event("joined")["addresses"]
        peer.event("devices")
        last = refused(place, "train", "wide.toml", "--no-compute", "--swarm", address)
        assert "memory" in last
        assert re.search(r"\d+(\.\d+)? [MG]iB.*\d+(\.\d+)? [MG]iB", last), last
        assert not (place / "runs" / "cats").exists()
        assert peer.end() == 0
    finally:
        peer.close()

"""A swarm of real processes trains what a plain loop trains (issue "The main job", what it must show)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import fusion_p2p
from dht.home import home
from dht.identity import load as load_identity
from dht.identity import public_key_of
from fusion_p2p.capture import capture
from fusion_p2p.errors import InputError
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec, Plan
from peer.api import LocalSwarm, Run, RunPaused
from peer.cli_plan import PlanOptions
from peer.cli_plan import run as plan_command
from peer.events import RunEvent
from peer.signing import load_or_create_key, public_bytes
from peer.trainer_state import RunFolder
from tests.cluster import plain
from tests.cluster.eventually import until

ROOT = Path(__file__).parents[2]
STEPS = 20
ADAMW = fusion_p2p.AdamW(lr=3e-3, clip_norm=1.0)
MICRO_BATCHES, SIZE = 4, 2
PATIENT_S = 60.0  # nobody freezes here: so that nobody is given up who merely has no turn on a busy machine


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_HOME", str(tmp_path_factory.mktemp("home")))
        with LocalSwarm(peers=4, dead_s=PATIENT_S) as running:
            yield running


def train(
    swarm: LocalSwarm, model: torch.nn.Module, data: Any, *, steps: int = STEPS, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, state dict and hash after `steps` steps on the swarm."""
    options = {"optimizer": ADAMW, "micro_batches": MICRO_BATCHES, "micro_batch_size": SIZE, "save_every": 0} | options
    with Run(model, data=data, swarm=swarm, **options) as run:
        losses = [s.loss for s in run.steps(steps)]
        return losses, run.state_dict(), run.report()["weights_blake2b"]


def plain_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gpt2_equals_a_plain_loop(swarm: LocalSwarm, stages: int) -> None:
    batches = plain.token_batches(STEPS, MICRO_BATCHES * SIZE)
    losses, state, _ = train(swarm, plain.gpt2(), batches, stages=stages)
    reference = plain.gpt2()
    expected = plain.train(reference, batches, plain_adamw(reference), micro_batch_size=SIZE, clip_norm=1.0)
    assert losses == pytest.approx(expected, rel=1e-6)
    theirs = reference.state_dict()
    assert plain.difference(state, theirs) < 2e-6
    for name, t in theirs.items():
        ours, their = ({name: plain.without_keys(name, x)} for x in (state[name], t))
        assert plain.difference(ours, their) < 1e-5, name
    exact, params = plain.train_in_our_order(
        plain.gpt2(), batches, lambda ps: torch.optim.AdamW(ps, lr=3e-3), micro_batch_size=SIZE, clip_norm=1.0
    )
    assert losses == exact
    assert all(torch.equal(state[name], p) for name, p in params.items())
    plain.gpt2().load_state_dict(state, strict=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_resnet_equals_a_plain_loop(swarm: LocalSwarm, stages: int) -> None:
    batches = plain.image_batches(STEPS, MICRO_BATCHES * SIZE)
    sgd = fusion_p2p.SGD(lr=0.05, momentum=0.9)
    losses, state, _ = train(swarm, plain.resnet(), batches, stages=stages, optimizer=sgd)
    reference = plain.resnet()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    expected = plain.train(reference, batches, optimizer, micro_batch_size=SIZE)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert plain.difference(state, reference.state_dict()) < 1e-5
    for name, t in reference.state_dict().items():
        if t.is_floating_point():
            assert plain.difference({name: state[name]}, {name: t}) < 1e-5, name
    assert state["resnet.embedder.embedder.normalization.num_batches_tracked"] == STEPS * MICRO_BATCHES


@pytest.mark.timeout(1800)
def test_the_same_run_twice_gives_the_same_bits(swarm: LocalSwarm) -> None:
    batches = plain.token_batches(8, MICRO_BATCHES * SIZE)
    runs = [train(swarm, plain.gpt2(dropout=0.1), batches, steps=8, stages=2, seed=3) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert runs[0][2] == runs[1][2]
    other = train(swarm, plain.gpt2(dropout=0.1), batches, steps=8, stages=2, seed=4)
    assert other[2] != runs[0][2]  # another seed draws other masks


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("compression", "least"), [("rotated:4/2", 5.0)])
def test_a_codec_sends_less_and_the_same_bits_each_time(
    swarm: LocalSwarm, tmp_path: Path, compression: str, least: float
) -> None:
    """Each run equals the pipeline in one process with the same codec; `least`: dense bytes over its bytes.

    Where the cut lies follows measured times, and what a codec loses follows the cut: the second run is given the
    first one's numeric log.
    """
    batches = plain.token_batches(6, MICRO_BATCHES * SIZE)

    def run(compression: str, folder: str, **how: Any) -> tuple[list[float], dict[str, Any], Plan]:
        options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "micro_batch_size": SIZE, "save_every": 0, **how}
        with Run(
            plain.gpt2(),
            data=batches,
            swarm=swarm,
            optimizer=ADAMW,
            compression=compression,
            run_dir=tmp_path / folder,
            **options,
        ) as run:
            losses = [s.loss for s in run.steps(6)]
            return losses, run.report(), run.plan()

    losses, report, plan = run(compression, "first", stages=2)
    again = run(compression, "again", numeric_log=tmp_path / "first" / "numeric_log.jsonl")
    assert plan.numerics.codecs == (LinkCodec(0, 1, compression),)
    assert any(r.startswith(f"link 0-1: {compression}") for r in plan.reasons)
    assert again[0] == losses and again[1]["weights_blake2b"] == report["weights_blake2b"]
    model = plain.gpt2()
    captured = capture(model, {k: v[:SIZE] for k, v in batches[0].items()})
    local = LocalPipeline(
        captured,
        optimizer=ADAMW,
        micro_batches=MICRO_BATCHES,
        micro_batch_size=SIZE,
        cuts=plan.numerics.cuts,
        codecs=plan.numerics.codecs,
    )
    assert [local.train_step(b) for b in batches] == losses
    assert local.weights_blake2b() == report["weights_blake2b"]
    dense = run("adatopk", "dense", stages=2)
    assert dense[2].numerics.codecs == ()  # on loopback no link holds anything up
    assert dense[1]["weights_blake2b"] != report["weights_blake2b"]
    frames = 4 * batches[0]["input_ids"].numel() * 32 * 6  # float32 at width 32; tied weights and norms are sent too
    for link in ("0-1", "1-0"):
        saved = dense[1]["bytes_sent"][link] - report["bytes_sent"][link]
        assert saved > (1 - 1 / least) * frames, (link, saved / frames)


@pytest.mark.timeout(1800)
def test_evaluation_and_early_exit_change_nothing_else(swarm: LocalSwarm) -> None:
    batches = plain.token_batches(8, MICRO_BATCHES * SIZE)
    undisturbed = train(swarm, plain.gpt2(), batches, steps=6, stages=2)
    held_out = plain.token_batches(2, 21, seed=9)  # larger than a global batch: passes in parts
    with Run(
        plain.gpt2(), data=batches, swarm=swarm, stages=2, optimizer=ADAMW, micro_batches=4, micro_batch_size=2
    ) as run:
        before = run.evaluate(held_out)
        with torch.no_grad():
            untrained = plain.gpt2().eval()
            assert before == pytest.approx(sum(float(untrained(**b).loss) for b in held_out) / 2, rel=1e-6)
        for step in run.steps(100):
            if step.step == 3:
                break  # steps 4 and 5 were under way at most
        left = 6 - run.step
        run.train(left)
        assert run.evaluate(held_out) == run.evaluate(held_out) != before
        report = run.report()
    assert report["weights_blake2b"] == undisturbed[2]
    assert [s["step"] for s in report["steps"]] == list(range(6))
    assert all(s["step_time_s"] > 0 for s in report["steps"])
    assert report["bytes_sent"]["0-1"] > 0 and report["tokens_per_s"] > 0
    assert report["plan"]["numerics"]["micro_batches"] == 4


@pytest.mark.timeout(1800)
def test_a_paused_run_goes_on_with_other_volunteers(
    swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volunteer is killed; the run pauses with one line; resumed elsewhere it ends where an undisturbed one ends.

    It goes on from the newest set that was said to be complete (one that fails under way is made again later).
    """
    batches = plain.token_batches(12, MICRO_BATCHES * SIZE)
    undisturbed = train(swarm, plain.gpt2(), batches, steps=12, stages=2)
    options: dict[str, Any] = {"save_every": 4, "recover_s": 0.0}
    saved = ["complete set at step 0"]
    with (
        LocalSwarm(peers=2, dead_s=PATIENT_S) as doomed,
        pytest.raises(RunPaused) as paused,
        Run(
            plain.gpt2(),
            data=batches,
            swarm=doomed,
            optimizer=ADAMW,
            micro_batches=MICRO_BATCHES,
            micro_batch_size=SIZE,
            run_dir=tmp_path / "run",
            on=[lambda h: saved.append(h.text) if isinstance(h, RunEvent) and h.kind == "saved" else None],
            **options,
        ) as run,
    ):
        for step in run.steps(12):
            if step.step == 6:
                victim = run.plan().host(1).peer
                doomed.find(victim).kill()
    line = str(paused.value)
    assert victim[-8:] in line and "stage 1" in line and "fusion-run resume" in line and "\n" not in line
    with Run.resume(tmp_path / "run", data=batches, swarm=swarm, **options) as again:
        first = again.step
        assert int(saved[-1].split()[-1]) <= first < 12  # one that was just written may not have been told any more
        assert first % 4 == 0
        again.train(12 - first)
        assert again.report()["weights_blake2b"] == undisturbed[2]


@pytest.mark.timeout(1800)
def test_a_lost_stage_is_rebuilt_and_nobody_notices(swarm: LocalSwarm, tmp_path: Path) -> None:
    batches = plain.token_batches(12, MICRO_BATCHES * SIZE)
    undisturbed = train(swarm, plain.gpt2(), batches, steps=12, stages=2)
    with (
        LocalSwarm(peers=3, dead_s=PATIENT_S) as doomed,
        Run(
            plain.gpt2(),
            data=batches,
            swarm=doomed,
            optimizer=ADAMW,
            stages=2,
            micro_batches=MICRO_BATCHES,
            micro_batch_size=SIZE,
            save_every=4,
            recover_s=300.0,  # on a busy machine
        ) as run,
    ):
        for step in run.steps(12):
            if step.step == 6:
                doomed.find(run.plan().host(1).peer).kill()
        report = run.report()
    assert report["weights_blake2b"] == undisturbed[2]
    assert {"lost", "recovered"} <= {e["kind"] for e in report["events"]}


@pytest.mark.timeout(1800)
def test_who_may_see_a_run_and_whose_it_is(swarm: LocalSwarm, tmp_path: Path) -> None:
    """Only the named peers get a stage; the run is its owner's, whose key is not the trainer peer's."""
    named = [v.ready.peer for v in swarm.volunteers[1:3]]
    told: list[str] = []
    with Run(
        plain.gpt2(layers=2),
        data=plain.token_batches(2, 4),
        swarm=swarm,
        micro_batches=2,
        micro_batch_size=2,
        allow_peers=named,
        run_dir=tmp_path / "run",
        on=[lambda happening: told.append(getattr(happening, "text", ""))],
    ) as run:
        run.train(2)
        assert sorted(p.peer for p in run.plan().placement) == sorted(named)
    assert sum("volunteers can see or reconstruct" in text and "allow_peers" in text for text in told) == 1
    owner = public_bytes(load_or_create_key(home() / "owner.key"))
    assert RunFolder(tmp_path / "run").spec()[1].owner == owner
    assert public_key_of(load_identity(tmp_path / "run" / "trainer.key").peer_id) != owner


@pytest.mark.timeout(1800)
def test_a_run_folder_is_not_started_over(swarm: LocalSwarm, tmp_path: Path) -> None:
    batches = plain.token_batches(2, 4)
    options: dict[str, Any] = {"data": batches, "swarm": swarm, "micro_batches": 2, "micro_batch_size": 2}
    with Run(plain.gpt2(layers=1), run_dir=tmp_path / "run", **options) as run:
        run.train(1)
    with pytest.raises(InputError, match="fusion-run resume"):
        Run(plain.gpt2(layers=1), run_dir=tmp_path / "run", **options).__enter__()


CONFIG = """
[model]
family = "gpt2"
[model.gpt2]
layers = 2
width = 32
context = 16
[data]
path = "book.txt"
tokenizer = "bytes"
"""
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


@pytest.mark.timeout(1800)
def test_a_plan_for_the_live_swarm_trains_nothing(
    swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    Path("book.txt").write_text("the cat sat on the mat and the dog sat on the log.\n" * 60)
    options = PlanOptions(config=Path("run.toml"), swarm=swarm.addresses[0], every_device=True, json=True)

    def found_all() -> dict[str, Any] | None:
        """A plan is made with whom the board shows at that moment; a call that timed out hides some."""
        found: dict[str, Any] = json.loads(plan_command(options))
        hosts = {p["peer"] for p in found["plan"]["placement"]}
        assert hosts <= {v.ready.peer for v in swarm.volunteers}
        return found if len(hosts) == len(swarm.volunteers) else None

    found = until(found_all, "a plan with every volunteer")
    assert found is not None
    assert found["lower_bound_s"] > 0 and found["plan"]["numerics"]["codecs"] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["book.txt", "run.toml"]
    with pytest.raises(InputError, match="no address of the swarm answers"):
        plan_command(replace(options, swarm=NOBODY))


SCRIPT = """
import asyncio, torch
import fusion_p2p
from tests.cluster import plain
torch.set_num_threads(1)
async def cell():
    with fusion_p2p.Run(plain.gpt2(layers=1), data=plain.token_batches(4, 4), micro_batches=2, micro_batch_size=2,
                        swarm=fusion_p2p.LocalSwarm(peers=2)) as run:
        print(*(v.pid for v in run._swarm.volunteers), flush=True)
        for step in run.steps(10**6):
            if step.step == 1:
                print("training", flush=True)
asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_script_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """A script without a __main__ guard, where an event loop runs already, as in a notebook; interrupted or killed, its
    volunteers end with it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    places = {"FUSION_HOME": str(tmp_path / "home"), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    script = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True, env=os.environ | places
    )
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert script.stdout.readline() == "training\n"
    family = [p for pid in pids for p in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]]
    family += psutil.Process(script.pid).children(recursive=True)
    assert len(family) > len(pids)
    script.send_signal(number)
    assert script.wait(timeout=240) != 0
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not alive
    if number == signal.SIGINT:  # an interrupted run keeps its folder and nothing else
        left = [p.name for p in temporary.iterdir() if not p.name.startswith("torch")]  # torch's own cache
        assert [name[:11] for name in left] == ["fusion-run-"]

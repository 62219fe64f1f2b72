"""The shipped testbeds: planned step times, files refused, the command, planning at scale without a wall clock."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.planner import DENSE, Ladder, load_testbed, load_workload, plan, synthetic, top_k_ladder
from peer.cli_plan import PlanOptions, run

FOLDER = Path(__file__).parents[2] / "examples" / "testbeds"
BEDS, MODELS = FOLDER / "testbeds.json", FOLDER / "opdags.json"


@pytest.mark.parametrize(
    ("bed", "dense_s", "compressed_s"),
    [("T1", 2.70, 2.65), ("T2", 2.00, 1.28), ("T3", 1.65, 1.50), ("T4m", 2.25, 1.76)],
)
def test_gpt2_xl_step_times(bed: str, dense_s: float, compressed_s: float) -> None:
    w, m = load_workload(MODELS, "gpt2-xl")
    net = load_testbed(BEDS, bed)
    for ladder, bound in ((Ladder((DENSE,)), dense_s), (top_k_ladder(), compressed_s)):
        p = plan(w, net, micro_batches=m, ladder=ladder)
        assert p.lower_bound_s <= p.step_s <= bound
        assert p.score.step_s == pytest.approx(p.step_s, rel=0.1)
        assert p.score.fits


def test_resnet_and_every_device() -> None:
    w, m = load_workload(MODELS, "resnet101-cifar")
    assert plan(w, load_testbed(BEDS, "T2"), micro_batches=m, ladder=top_k_ladder()).step_s <= 0.19
    xl, m = load_workload(MODELS, "gpt2-xl")
    p = plan(xl, load_testbed(BEDS, "T1"), micro_batches=m, ladder=top_k_ladder(), allow_skip=False, local_search=False)
    assert sorted(p.chain.hosts) == list(range(24))


def test_a_thousand_peers() -> None:
    w, m = load_workload(MODELS, "gpt2-xl")
    net = synthetic.network(1000, 1)
    p = plan(w, net, micro_batches=m, ladder=top_k_ladder(), local_search=False)
    assert p.score.fits
    assert p.step_s < 1.0  # 1.04 s when only single linkage chose the devices
    assert len(p.spares) == 1000 - len(p.chain.hosts)


def changed(tmp_path: Path, edit: Any) -> Path:
    data = json.loads(BEDS.read_text())
    edit(data["testbeds"]["T1"])
    path = tmp_path / "beds.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["inter"].pop("A-B"), "no link between sites A and B"),
        (lambda t: t["inter"].update({"A-B": [-100, 10]}), "bandwidth is -12500000.0"),
        (lambda t: t["inter"].update({"A-B": [100]}), "testbed 'T1'"),
        (lambda t: t["sites"][0].update({"gpu": "abacus"}), "unknown gpu 'abacus'"),
        (lambda t: t["sites"][0].pop("count"), "count"),
        (lambda t: t.update({"sites": []}), "no devices"),
        (lambda t: t.update({"regions": "moon"}), "unknown regions 'moon'"),
        (lambda t: t.update({"inter": []}), "misstates AttributeError"),
        (lambda t: t["sites"][0].update({"count": math.inf}), "has count inf"),
        (lambda t: t["sites"][0].update({"count": -3}), "has count -3"),
        (lambda t: t["sites"][0].update({"count": 10**9}), "there are 1 to 4096 devices"),
        (lambda t: t["sites"][0].update({"per_node": math.inf}), "misstates OverflowError"),
        (lambda t: t["sites"][0].update({"name": "A\nB"}), "a site's name"),
    ],
)
def test_faulty_testbeds_are_refused(tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_testbed(changed(tmp_path, edit), "T1")
    assert "\n" not in str(error.value)


def test_files_that_are_no_testbeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="/dev/zero is no testbed"):
        load_testbed("/dev/zero", "T1")
    path = tmp_path / "beds.json"
    for text in ("[" * 100_000, '{"testbeds": 3}', "{}", "", "7"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"beds\.json"):
            load_testbed(path, "T1")


@pytest.mark.parametrize(
    "edit", [lambda d: d.update(_meta=[]), lambda d: d["gpt2-xl"].update(samples=0), lambda d: d.update({"gpt2-xl": 7})]
)
def test_faulty_summaries_are_refused(tmp_path: Path, edit: Any) -> None:
    data = json.loads(MODELS.read_text())
    edit(data)
    path = tmp_path / "opdags.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="model 'gpt2-xl'"):
        load_workload(path, "gpt2-xl")


def test_a_peer_without_memory_is_refused(tmp_path: Path) -> None:
    data = json.loads(BEDS.read_text())
    data["gpus"]["RTX4090"][2] = 0
    path = tmp_path / "beds.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="memory_bytes is 0"):
        load_testbed(path, "T1")
    tiny = copy.deepcopy(data)
    for gpu in tiny["gpus"].values():
        gpu[2] = 0.01
    path.write_text(json.dumps(tiny))
    w, m = load_workload(MODELS, "gpt2-xl")
    with pytest.raises(InputError, match="the model needs"):
        plan(w, load_testbed(path, "T1"), micro_batches=m)


def test_the_command_prints_draws_and_refuses(tmp_path: Path) -> None:
    bed = f"{BEDS}:T1"
    picture = tmp_path / "plan.svg"
    text = run(PlanOptions(model="gpt2", testbed=bed, picture=picture, baselines=True))
    assert "published OP-Fence" in text and "sets the pace" in text
    assert picture.read_text().startswith("<svg")
    made = json.loads(run(PlanOptions(model="gpt2", testbed=bed, json=True, codecs="dense")))
    assert made["plan"]["numerics"]["cuts"]
    assert len(made["grid"]) == len(made["plan"]["placement"])
    assert "replicas" in made and len(made["replicas"]["pipelines"]) >= 1
    for options, message in (
        (PlanOptions(model="gpt2", testbed=str(BEDS)), "several testbeds"),
        (PlanOptions(model="gpt9", testbed=bed), "no model 'gpt9'"),
        (PlanOptions(testbed=bed), "no model to plan"),
        (PlanOptions(), "nothing to plan on"),
        (PlanOptions(model="gpt2", testbed=bed, codecs="zip"), "none of"),
        (PlanOptions(model="gpt2", testbed="nowhere.json:T1"), "No such file"),
        (PlanOptions(model="gpt2", testbed=bed, picture=tmp_path / "no" / "where.svg"), "cannot write"),
    ):
        with pytest.raises(InputError, match=message):
            run(options)


def test_the_command_says_whether_several_pipelines_would_be_better(tmp_path: Path) -> None:
    """Two sites behind a line too slow for a dense pipeline: each had better train by itself and average."""
    data = json.loads(BEDS.read_text())
    bed = copy.deepcopy(data["testbeds"]["T1"])
    for site in bed["sites"]:
        site["up"] = site["down"] = 5
    bed["inter"] = {}
    path = tmp_path / "apart.json"
    path.write_text(json.dumps(data | {"testbeds": {"apart": bed}}))
    options = PlanOptions(model="gpt2", testbed=str(path), summary=MODELS, codecs="dense", average_every=10_000)
    text, made = run(options), json.loads(run(replace(options, json=True)))["replicas"]
    assert made["pay"] and len(made["pipelines"]) > 1 and made["average_every_steps"] == 10_000
    assert sum(p["micro_batches"] for p in made["pipelines"]) == 64
    assert f"{len(made['pipelines'])} pipelines that average every 10000 steps" in text
    assert "the run uses one until replicas land" in text and "pipeline 1:" in text
    often = json.loads(run(replace(options, json=True, average_every=1)))["replicas"]
    assert not often["pay"] and len(often["pipelines"]) == 1
    assert "one long pipeline is best" in run(replace(options, average_every=1))

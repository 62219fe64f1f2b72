"""`fusion-run lab TESTBED CONFIG`: the testbed built here with network namespaces, a run on it, what it measured."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_p2p.adatopk import ladder_of
from fusion_p2p.errors import InputError
from peer.api import Run
from peer.config import Config, load
from peer.data_open import open_data
from peer.events import RunEvent, StepResult
from peer.lab.bed import Bed, load_bed
from peer.lab.lab_swarm import LabSwarm
from peer.lab.measure import Delivered, measure, table
from peer.lab.measured_run import Measured, measured_run
from peer.lab.netns import Lab
from peer.models import build_model, context_of
from peer.plan_hosts import check_planner
from peer.trainer_state import write_atomic

TOLD = ("phase", "refused", "lost", "moving", "stopped")


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """What the command line says; `testbed`: FILE, or FILE:NAME of one of several."""

    testbed: str
    config: Path
    rate_scale: float = 1.0
    steps: int = 5
    compression: str = ""  # "": the configuration's
    planner: str = "opfence"
    report: Path | None = None
    probe_only: bool = False


def run(options: LabOptions, say: Callable[[str], None] = print) -> int:
    """The exit code: 0, or 1 if a link did not deliver its rate. InputError for bad input, LabUnsupported where this
    machine or user cannot build it."""
    check_planner(options.planner)
    config = load(options.config)
    ladder_of(options.compression or config.numerics.compression)
    if options.report is not None and (options.report.is_dir() or not options.report.parent.is_dir()):
        raise InputError(f"--report {options.report}: no file can be written there; give one in a folder that exists")
    bed = load_bed(*_split_name(options.testbed), rate_scale=options.rate_scale)
    say(f"testbed {bed.name}: {len(bed.peers)} peers in {len(bed.sites)} sites, rates x {options.rate_scale:g}")
    with Lab(bed) as lab:
        say(f"each peer has a network namespace; {lab.quotas.how}: {shares(bed)}")
        links = measure(lab)
        for line in table(links):
            say(f"  {line}")
        report: dict[str, Any] = {
            "testbed": bed.name,
            "rate_scale": options.rate_scale,
            "cpu": lab.quotas.how,
            "links": [_as_dict(bed, d) for d in links],
        }
        if not options.probe_only:
            found = _train(config, options, lab, say)
            report["run"] = found.as_dict()
            for line in found.lines():
                say(line)
    if options.report is not None:
        write_atomic(options.report, json.dumps(report, indent=1).encode("utf-8"))
    return 0 if all(d.holds for d in links) else 1


def shares(bed: Bed) -> str:
    return ", ".join(f"{p.name} {p.cores:.3g}" for p in bed.peers) + " of a core"


def _as_dict(bed: Bed, d: Delivered) -> dict[str, Any]:
    link = asdict(d.link) | {"src": bed.sites[d.link.src], "dst": bed.sites[d.link.dst]}
    return link | {"delivered_bits_per_s": d.bits_per_s}


def _split_name(text: str) -> tuple[Path, str | None]:
    if Path(text).exists() or ":" not in text:
        return Path(text), None
    file, _, name = text.rpartition(":")
    return Path(file), name


def _train(config: Config, options: LabOptions, lab: Lab, say: Callable[[str], None]) -> Measured:
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(config.numerics.threads)

    def hear(event: object) -> None:
        if isinstance(event, RunEvent) and event.kind in TOLD:
            say(f"  {event.text}")

    def tell(step: StepResult) -> None:
        say(f"step {step.step + 1}: loss {step.loss:.4f}, {step.step_time_s:.3g} s")

    with tempfile.TemporaryDirectory(prefix="fusion-lab-") as folder, lab.inside(), LabSwarm(lab) as swarm:
        say(f"{swarm.peers} volunteers joined")
        data = open_data(config, Path(folder), context_of(config))
        with Run(
            build_model(config, data),
            data=data.train,
            name=config.run.name,
            optimizer=config.optimizer_spec(),
            micro_batches=config.batch.micro_batches,
            micro_batch_size=config.batch.micro_batch_size,
            stages=config.numerics.stages or None,
            seed=config.run.seed,
            run_dir=Path(folder) / "run",
            compression=options.compression or config.numerics.compression,
            planner=options.planner,
            dtype=config.numerics.dtype,
            recompute=config.numerics.recompute,
            threads=config.numerics.threads,
            swarm=swarm,
            save_every=0,
            on=(hear,),
        ) as opened:
            text = opened.plan().explain()
            for peer, name in swarm.names.items():
                text = text.replace(peer[-8:], f"{name}")
            say(text)
            return measured_run(opened, swarm, options.steps, tell=tell)

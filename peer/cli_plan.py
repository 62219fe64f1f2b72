"""`fusion-run plan`: who would host what and why, for a testbed file or a live swarm, without training anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.planner import (
    DENSE,
    Ladder,
    Network,
    Proposal,
    Workload,
    default_ladder,
    explain,
    load_testbed,
    load_workload,
    plan,
    top_k_ladder,
    uniform_top_k,
)
from fusion_p2p.planner.gantt import svg
from fusion_p2p.planner.replicas import ReplicaPlan, best_replicas, pays
from fusion_p2p.planner.testbed import testbed_names

GATHER_S = 60.0  # for volunteers to be seen and to have measured their devices
LADDERS = ("default", "adatopk:PERCENT", "dense", "topk", "topk:RATIO")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line says. `testbed`: FILE, or FILE:NAME of one of several. `summary`: OP-DAG summary file."""

    config: Path | None = None
    model: str | None = None
    testbed: str | None = None
    summary: Path | None = None
    swarm: str | None = None
    micro_batches: int | None = None
    codecs: str | None = None
    tau: float = 0.25
    every_device: bool = False
    baselines: bool = False
    average_every: int = 100
    json: bool = False
    picture: Path | None = None


def run(options: PlanOptions) -> str:
    """What the command prints. InputError, one line, for anything that cannot be planned."""
    if options.testbed is None and options.swarm is None and options.config is None:
        raise InputError("nothing to plan on; give --testbed FILE, or --swarm ADDR with a CONFIG")
    network = _network(options)
    workload, micro_batches = _workload(options)
    micro_batches = options.micro_batches or micro_batches
    ladder = _ladder(options.codecs, options.tau, workload) if options.codecs else ladder_of_run(options)
    proposal = plan(workload, network, micro_batches=micro_batches, ladder=ladder, allow_skip=not options.every_device)
    against = _baselines(proposal) if options.baselines else {}
    several = best_replicas(
        workload, network, micro_batches=micro_batches, steps_between=options.average_every, ladder=ladder
    )
    if options.picture is not None:
        _write(options.picture, svg(proposal))
    if options.json:
        made = _as_json(proposal, against) | {"replicas": _replicas_json(proposal, several, options.average_every)}
        return json.dumps(made, indent=1)
    lines = [explain(proposal), *(f"  {line}" for line in _replica_lines(proposal, several, options.average_every))]
    lines += [f"  {name}: {s:.3f} s a step, {s / proposal.step_s:.2f} times ours" for name, s in against.items()]
    return "\n".join(lines)


def _replica_lines(p: Proposal, several: ReplicaPlan, every: int) -> list[str]:
    """Whether the peers would be better used as several pipelines, and as which."""
    if not pays(p, several):
        return ["one long pipeline is best: several that average now and then would be no faster"]
    lines = [
        f"{several.replicas} pipelines that average every {every} steps would take {several.step_s:.3f} s a step, "
        f"{p.step_s / several.step_s:.2f} times faster ({several.averaging_s:.1f} s an averaging); the run uses one "
        "until replicas land:"
    ]
    for k, one in enumerate(several.pipelines):
        hosts = " -> ".join(one.network.devices[h].name for h in one.chain.hosts)
        lines.append(f"  pipeline {k}: {one.costs.m} of the micro-batches, {one.step_s:.3f} s, {hosts}")
    return lines


def _replicas_json(p: Proposal, several: ReplicaPlan, every: int) -> dict[str, Any]:
    """The best use as several pipelines; one of them where that is the best."""
    return {
        "pay": pays(p, several),
        "average_every_steps": every,
        "step_s": several.step_s if pays(p, several) else p.step_s,
        "averaging_s": several.averaging_s if pays(p, several) else 0.0,
        "pipelines": [
            {
                "micro_batches": one.costs.m,
                "step_s": one.step_s,
                "cuts": list(one.chain.cuts),
                "hosts": [one.network.devices[h].name for h in one.chain.hosts],
            }
            for one in (several.pipelines if pays(p, several) else (p,))
        ],
    }


def _network(options: PlanOptions) -> Network:
    if options.testbed is not None:
        file, name = _split_name(options.testbed)
        names = testbed_names(file)
        if name is None and len(names) != 1:
            raise InputError(
                f"{file} has several testbeds; name one: --testbed {file}:{names[0]} (of {', '.join(names)})"
            )
        return load_testbed(file, name or names[0])
    return asyncio.run(_swarm_network(options.swarm))


def _split_name(text: str) -> tuple[Path, str | None]:
    if Path(text).exists() or ":" not in text:
        return Path(text), None
    file, _, name = text.rpartition(":")
    return Path(file), name


async def _swarm_network(swarm: str | None) -> Network:
    """Join as a reader under a throw-away identity, read peers and links as a trainer would, leave."""
    from dht import p2p
    from dht.errors import SwarmUnreachable
    from dht.home import resolve_swarm
    from dht.node import Board
    from peer.offers import network_of
    from peer.trainer_swarm import Swarm

    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusion-plan-")))
        try:
            transport = await p2p.start(
                folder / "identity", host_addresses=(), bootstrap=resolve_swarm(swarm), client_only=True
            )
        except SwarmUnreachable as error:  # an address that does not answer is the user's to mend
            raise InputError(str(error)) from error
        stack.push_async_callback(transport.close)
        board = await Board.start(transport, client_only=True)
        stack.push_async_callback(board.close)
        reader = Swarm(board)
        offers = await reader.wait_for(1, GATHER_S, lambda _: None)
        return network_of(offers, await reader.links())


def _workload(options: PlanOptions) -> tuple[Workload, int]:
    if options.config is not None:
        return _captured(options.config)
    if options.model is None:
        raise InputError("no model to plan; give a CONFIG, or --model NAME of an OP-DAG summary file")
    summary = options.summary
    if summary is None:
        if options.testbed is None:
            raise InputError("--model needs --summary FILE, the OP-DAG summaries")
        summary = _split_name(options.testbed)[0].with_name("opdags.json")
    return load_workload(summary, options.model)


def _captured(path: Path) -> tuple[Workload, int]:
    """The model of a configuration, captured as a run would."""
    from peer.config import load

    config = load(path)
    from fusion_p2p.capture import capture
    from fusion_p2p.planner import from_atoms
    from fusion_p2p.workload import atoms
    from peer.data import slice_rows
    from peer.data_open import open_data
    from peer.models import build_model, context_of

    size = config.batch.micro_batch_size
    with tempfile.TemporaryDirectory(prefix="fusion-plan-") as folder:
        data = open_data(config, Path(folder), context_of(config))
        model = build_model(config, data)
        first = slice_rows(data.train.next_batch(size), 0, size)
        dag = capture(model, first, seed=config.run.seed).opdag
    return from_atoms(config.run.name, atoms(dag, size), samples=size), config.batch.micro_batches


def ladder_of_run(options: PlanOptions) -> Ladder:
    """What the configuration compresses with; the published rule for a model that is only a summary."""
    if options.config is None:
        return top_k_ladder(100.0, options.tau)
    from fusion_p2p.adatopk import ladder_of
    from peer.config import load

    return ladder_of(load(options.config).numerics.compression, tau=options.tau)


def _ladder(text: str, tau: float, workload: Workload) -> Ladder:
    if text == "default":
        return default_ladder(tau, workload.wire_bytes_per_element)
    if text.startswith("adatopk"):
        from fusion_p2p.adatopk import allowed_loss

        allowed = allowed_loss(text)
        if allowed is not None:
            return default_ladder(tau, workload.wire_bytes_per_element, allowed)
    if text == "dense":
        return Ladder((DENSE,), tau)
    if text == "topk":
        return top_k_ladder(100.0, tau)
    kind, _, ratio = text.partition(":")
    try:
        value = float(ratio)
    except ValueError:
        value = 0.0
    if kind != "topk" or not value >= 1:
        raise InputError(f"codecs {text!r} is none of {', '.join(LADDERS)}")
    return uniform_top_k(value)


def _baselines(p: Proposal, draws: int = 8) -> dict[str, float]:
    """Mean simulated seconds of the baselines with the same codecs."""
    from fusion_p2p.planner import baselines as b
    from fusion_p2p.planner.simulate import simulate

    made = {
        "random order, equal layers": b.random_equal_layers,
        "random order, equal compute": b.random_equal_compute,
        "published OP-Fence": b.published,
        "network only": b.network_only,
    }
    return {
        name: sum(simulate(p.costs, make(p.costs, seed)[0]).step_s for seed in range(draws)) / draws
        for name, make in made.items()
    }


def _as_json(p: Proposal, against: dict[str, float]) -> dict[str, Any]:
    """The plan as a run would adopt it, its schedule as a grid, and the bound."""
    return {
        "plan": msgspec.to_builtins(p.to_plan(number=1, epoch=1)),
        "step_s": p.step_s,
        "formula_s": p.score.step_s,
        "lower_bound_s": p.lower_bound_s,
        "stage_s": list(p.score.stage_s),
        "hop_s": list(p.score.hop_s),
        "fences": [[p.network.devices[d].name for d in f] for f in p.fences],
        "grid": p.schedule.grid(),
        "baselines_s": against,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write the picture to {path}: {error.strerror}") from error

"""What the commands of `fusion-run` have in common: their options, and the configuration as these change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from peer.config import Config
    from peer.lab.chaos import Fault

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or the name of one under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON. Default: lines.")]
SwarmOption = Annotated[
    str | None,
    typer.Option(metavar="ADDR", help="Address of a peer of the swarm. Default: swarm.address, $FUSION_SWARM, the last "
                 "swarm joined."),
]  # fmt: skip
LocalOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=64, help="Start N volunteer processes here. Default: swarm.local, else a swarm."
    ),
]
StepsOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps in all. Default: run.steps.")]
MinutesOption = Annotated[
    float | None,
    typer.Option(metavar="M", min=0, help="Stop training M minutes from now, 0: never. Default: run.minutes."),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write losses, times, plan, bytes, events, weights' hash as JSON. Default: nowhere."
    ),
]
NoCompute = Annotated[
    bool, typer.Option("--no-compute", help="This machine's own device hosts no stage. Default: swarm.compute.")
]
RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run folder. Default: run.dir, else runs/NAME under this folder.")
]
ChaosOption = Annotated[
    str | None,
    typer.Option(
        metavar="SEED[:FAULTS]",
        help="With --local: let FAULTS of the volunteers' processes be killed, frozen, cut off and so on while it "
        "trains, and say whether the weights are those of an undisturbed run. Default: no faults, 5 with a SEED alone.",
    ),
]
NumericLogOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="numeric_log.jsonl of another run of this configuration: its cuts and codecs, from the same steps on, so "
        "that the weights are the same. Default: its own.",
    ),
]
CheckpointOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A step-… folder. Default: the run's newest checkpoint.")
]
TestbedOption = Annotated[
    str | None,
    typer.Option(metavar="FILE[:NAME]", help="Devices and links of this testbed file. Default: the swarm's."),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="A model of the --summary file. Default: that of CONFIG.")
]
SummaryOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="OP-DAG summaries. Default: opdags.json beside the testbed.")
]
MicroBatchesOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Micro-batches a step. Default: as CONFIG or the summary says.")
]
LadderOption = Annotated[
    str | None,
    typer.Option(
        metavar="LADDER",
        help="default, adatopk:PERCENT, dense, topk or topk:RATIO, for the links to use. Default: CONFIG's "
        "numerics.compression; topk with --model.",
    ),
]
TauOption = Annotated[
    float,
    typer.Option(metavar="X", min=0.001, max=1, help="Share of the bottleneck that a link's transfer may take."),
]
EveryDevice = Annotated[
    bool, typer.Option("--every-device", help="Leave no device out. Default: those that only slow it down.")
]
Baselines = Annotated[bool, typer.Option("--baselines", help="Compare with simpler ways of planning. Default: no.")]
AverageEvery = Annotated[
    int,
    typer.Option(metavar="STEPS", min=1, help="Steps between averagings, where several pipelines are weighed."),
]
PictureOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a step as SVG. Default: none.")]
PromptOption = Annotated[
    str, typer.Option(metavar="TEXT", help="Text to go on from. Default: a new line.", show_default=False)
]
AdapterOption = Annotated[
    bool, typer.Option("--adapter", help="Only the adapter of a peft (LoRA) model. Default: all of it, merged.")
]
PlannerOption = Annotated[
    str,
    typer.Option("--plan", metavar="RULE", help="opfence, equal-layers:SEED, equal-compute:SEED or published:SEED."),
]
RateScale = Annotated[float, typer.Option(metavar="X", min=1e-6, help="All bandwidths times this factor.")]
LinksOnly = Annotated[
    bool, typer.Option("--links-only", help="Build it, measure its links, train nothing. Default: train too.")
]
RuleOption = Annotated[str, typer.Option(metavar="RULE", help="As numerics.compression. Default: CONFIG's.")]
TemperatureOption = Annotated[float, typer.Option(metavar="T", min=0, max=10, help="0: always the likeliest token.")]
TopKOption = Annotated[int, typer.Option(metavar="N", min=0, help="Draw among so many likeliest tokens; 0: all.")]


def adjusted(
    config: Config, swarm: str | None, local: int | None, steps: int | None, minutes: float | None, no_compute: bool
) -> Config:
    """The configuration with the command line's changes."""
    from fusion_p2p.errors import InputError
    from peer.config import replace

    if swarm is not None and local is not None:
        raise InputError("--swarm and --local exclude each other; give one of them")
    changes: dict[str, dict[str, Any]] = {"swarm": {}, "run": {}}
    if swarm is not None:
        changes["swarm"] |= {"address": swarm, "local": 0}
    if local is not None:
        changes["swarm"] |= {"local": local, "address": ""}
    if no_compute:
        changes["swarm"]["compute"] = False
    if steps is not None:
        changes["run"]["steps"] = steps
    if minutes is not None:
        changes["run"]["minutes"] = minutes
    for section, values in changes.items():
        if values:
            config = replace(config, section, **values)
    return config


def faults_of(config: Config, chaos: str | None) -> tuple[Fault, ...] | None:
    """The schedule of --chaos, None without it."""
    if chaos is None:
        return None
    from fusion_p2p.errors import InputError
    from peer.lab.chaos import LEAST_ALIVE, parse, schedule

    if config.swarm.local <= LEAST_ALIVE:
        raise InputError(f"--chaos needs volunteers of its own to kill: give --local {LEAST_ALIVE + 2} or more")
    return schedule(*parse(chaos), config.run.steps)

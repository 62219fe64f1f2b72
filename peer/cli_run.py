"""`fusion-run`: train on a swarm, and look after runs. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from peer.cli_run_options import (
    AdapterOption,
    AverageEvery,
    Baselines,
    ChaosOption,
    CheckpointOption,
    EveryDevice,
    Json,
    LadderOption,
    LinksOnly,
    LocalOption,
    MicroBatchesOption,
    MinutesOption,
    ModelOption,
    NoCompute,
    NumericLogOption,
    PictureOption,
    PlannerOption,
    PromptOption,
    RateScale,
    ReportOption,
    RuleOption,
    Run,
    RunDir,
    StepsOption,
    SummaryOption,
    SwarmOption,
    TauOption,
    TemperatureOption,
    TestbedOption,
    TopKOption,
    adjusted,
    faults_of,
)

EXIT_CODES = """Exit codes: 0 done, 1 a defect of this program or its host, 2 bad input (one line names the fix),
3 the swarm was lost on the way, 4 paused: a peer was lost and no other could take its stage (resume it),
130 ended by Ctrl-C."""

app = typer.Typer(
    help="Train a PyTorch model on a swarm of volunteers.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file; fusion-run init writes one.")],
    swarm: SwarmOption = None,
    local: LocalOption = None,
    steps: StepsOption = None,
    minutes: MinutesOption = None,
    report: ReportOption = None,
    no_compute: NoCompute = False,
    run_dir: RunDir = None,
    chaos: ChaosOption = None,
    numeric_log: NumericLogOption = None,
) -> None:
    """Start a run: share the model out, train it, save a checkpoint, show the curve and a sample."""
    from peer import config as configuration

    settings = adjusted(configuration.load(config), swarm, local, steps, minutes, no_compute)
    faults = faults_of(settings, chaos)
    from peer import run_training  # torch comes with it: a bad configuration is answered before

    _end(run_training.train(settings, run_dir=run_dir, report=report, faults=faults, numeric_log=numeric_log))


@app.command()
def resume(
    run: Run,
    swarm: SwarmOption = None,
    local: LocalOption = None,
    steps: StepsOption = None,
    minutes: MinutesOption = None,
    report: ReportOption = None,
    no_compute: NoCompute = False,
) -> None:
    """Continue a run that was paused, stopped, killed or cut off by a reboot, where it was saved last."""
    from peer import run_training
    from peer.run_index import find_run, load_config

    folder = find_run(run)
    settings = adjusted(load_config(folder), swarm, local, steps, minutes, no_compute)
    _end(run_training.resume(settings, folder, report=report))


@app.command()
def fork(
    run: Run,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the new run, with another run.name.")],
    checkpoint: CheckpointOption = None,
    swarm: SwarmOption = None,
    local: LocalOption = None,
    steps: StepsOption = None,
    minutes: MinutesOption = None,
    report: ReportOption = None,
    no_compute: NoCompute = False,
    run_dir: RunDir = None,
) -> None:
    """Start a new run from another one's checkpoint, with other hyperparameters (a run's own never change)."""
    from peer import checkpoint as checkpoints
    from peer import config as configuration
    from peer import run_training
    from peer.run_index import find_run

    origin = checkpoints.find(checkpoint or find_run(run))
    settings = adjusted(configuration.load(config), swarm, local, steps, minutes, no_compute)
    _end(run_training.train(settings, run_dir=run_dir, report=report, origin=origin))


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where run folders lie.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder: phase, step, loss."""
    import msgspec

    from peer.run_index import run_folders, summary

    found = [summary(path) for path in run_folders(folder)]
    if json:
        _print_json([msgspec.to_builtins(s) for s in found])
        return
    print(f"{'run':24} {'phase':12} {'step':>12} {'loss':>9}  folder")
    for s in found:
        loss = "" if s.loss is None else f"{s.loss:.4f}"
        print(f"{s.name:24} {s.phase:12} {f'{s.step}/{s.steps}':>12} {loss:>9}  {s.folder}  {s.reason}".rstrip())


@app.command()
def show(run: Run, json: Json = False) -> None:
    """Show one run: progress, checkpoints, numeric log, configuration."""
    from peer.run_index import details, find_run

    shown = details(find_run(run))
    if json:
        _print_json(shown)
        return
    for key, value in shown.items():
        if key == "config":
            for section, keys in value.items():
                for name, setting in keys.items():
                    print(f"{section + '.' + name:28} {setting}")
        elif key == "checkpoints":
            for c in value:
                print(f"{'checkpoint':28} {c['path']}  step {c['step']}  {c['bytes']:,} bytes")
        elif key == "numeric_log":
            for entry in value:
                print(f"{'numerics from step ' + str(entry['first_step']):28} {entry['numerics']}  {entry['reason']}")
        else:
            print(f"{key:28} {value}")


@app.command()
def stop(run: Run, json: Json = False) -> None:
    """End a run after the present step: checkpoint, curve and sample, as at its last step."""
    _request(run, "stop", json)


@app.command()
def pause(run: Run, json: Json = False) -> None:
    """Save a run after the present step and end its trainer; `fusion-run resume` continues it."""
    _request(run, "pause", json)


@app.command("eval")
def evaluate(run: Run, checkpoint: CheckpointOption = None, json: Json = False) -> None:
    """Evaluate a checkpoint on the held-out data, on this machine."""
    from peer.run_index import find_run
    from peer.run_inspect import evaluate as evaluate_run

    result = evaluate_run(find_run(run), checkpoint)
    if json:
        _print_json(result)
        return
    for key, value in result.items():
        print(f"{key:16} {value}")


@app.command()
def sample(
    run: Run,
    prompt: PromptOption = "\n",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Tokens to draw.")] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 40,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed draws the same text.")] = 0,
    checkpoint: CheckpointOption = None,
) -> None:
    """Print text drawn from a checkpoint."""
    from peer.run_index import find_run
    from peer.run_inspect import sample as sample_run

    print(
        sample_run(
            find_run(run), checkpoint, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    )


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for config.json, model.safetensors, …")],
    checkpoint: CheckpointOption = None,
    adapter: AdapterOption = False,
) -> None:
    """Write a checkpoint as a folder that transformers' from_pretrained loads (an adapter merged in)."""
    from peer.run_index import find_run
    from peer.run_inspect import export as export_run

    print(f"{out}: {', '.join(export_run(find_run(run), checkpoint, out, adapter=adapter))}")


@app.command()
def codecs(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file; fusion-run init writes one.")],
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Steps of the probe per codec.")] = 8,
    json: Json = False,
) -> None:
    """Print, for a model, what each codec sends, takes, loses, and below which link speed it pays."""
    from peer.cli_codecs import measure, rows, table
    from peer.config import load

    rule = load(config).numerics.compression
    measured = measure(config, steps)
    if json:
        _print_json(rows(measured, rule))
    else:
        print("\n".join(table(measured, rule)))


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="Plan this run's model; without it, --model NAME.")
    ] = None,
    testbed: TestbedOption = None,
    swarm: SwarmOption = None,
    model: ModelOption = None,
    summary: SummaryOption = None,
    micro_batches: MicroBatchesOption = None,
    codecs: LadderOption = None,
    tau: TauOption = 0.25,
    every_device: EveryDevice = False,
    baselines: Baselines = False,
    average_every: AverageEvery = 100,
    picture: PictureOption = None,
    json: Json = False,
) -> None:
    """Show who would host what, why, and how long a step would take; trains nothing."""
    from peer.cli_plan import PlanOptions, run

    options = PlanOptions(
        config=config,
        model=model,
        testbed=testbed,
        summary=summary,
        swarm=swarm,
        micro_batches=micro_batches,
        codecs=codecs,
        tau=tau,
        every_device=every_device,
        baselines=baselines,
        average_every=average_every,
        json=json,
        picture=picture,
    )
    print(run(options))


@app.command()
def lab(
    testbed: Annotated[
        str, typer.Argument(metavar="FILE[:NAME]", help="Testbed file, such as examples/testbeds/lab.json:N1.")
    ],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file; fusion-run init writes one.")],
    rate_scale: RateScale = 1.0,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps measured, after one that does not count.")] = 5,
    compression: RuleOption = "",
    planner: PlannerOption = "opfence",
    report: ReportOption = None,
    links_only: LinksOnly = False,
) -> None:
    """Build a testbed on this machine (network namespaces, shaped links, CPU shares; root) and train on it."""
    from peer.lab.cli_lab import LabOptions
    from peer.lab.cli_lab import run as run_lab

    options = LabOptions(
        testbed=testbed,
        config=config,
        rate_scale=rate_scale,
        steps=steps,
        compression=compression,
        planner=planner,
        report=report,
        probe_only=links_only,
    )
    _end(run_lab(options))


@app.command()
def init(preset: Annotated[str, typer.Argument(metavar="gpt2|resnet", help="Kind of model.")]) -> None:
    """Print a commented configuration: fusion-run init gpt2 > gpt2.toml"""
    from peer.config_text import render

    print(render(preset), end="")


def _request(run: str, command: Any, json: bool) -> None:
    from peer.run_control import ask
    from peer.run_index import find_run

    answer = ask(find_run(run), command)
    if json:
        _print_json({"command": command, "pid": answer.pid, "text": answer.text})
        return
    print(f"{command} noted by the trainer (process {answer.pid}): {answer.text}")


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))


def _end(code: int) -> NoReturn:
    raise typer.Exit(code)


def main() -> NoReturn:
    """The program: ends in time after Ctrl-C, and quickly otherwise."""
    from peer.interrupts import end_in_time, leave

    end_in_time("fusion-run")
    leave(execute(sys.argv[1:]))


# Of what typer is built on, whatever its version: an unknown option, a missing argument, a bad value.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def execute(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Errors that users can mend are one line on stderr, others are raised."""
    from dht.errors import DhtError
    from fusion_p2p.errors import FusionError

    command = typer.main.get_command(app)
    try:
        with command.make_context("fusion-run", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _UsageError as error:
        return _say_usage(error, arguments)
    except (FusionError, DhtError) as error:
        print(f"fusion-run: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fusion-run: ended by Ctrl-C", file=sys.stderr)
        return 130
    except SystemExit as end:  # SIGTERM
        return end.code if isinstance(end.code, int) else 1
    return 0


def _say_usage(error: Any, arguments: Sequence[str]) -> int:
    program = error.ctx.command_path if error.ctx else "fusion-run"
    option = next((o for o in getattr(getattr(error, "param", None), "opts", ()) if o in arguments[:-1]), None)
    value = f"{option} {arguments[arguments.index(option) + 1]}: " if option else ""
    message = " ".join(error.format_message().split()).rstrip(".")
    print(f"{program}: {value}{message}; see {program} --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

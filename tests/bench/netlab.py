"""The headline: real processes on a really shaped network, ours beside torch.distributed.pipelining over gloo.

Needs root (network namespaces). All rates are the testbeds' times 0.1, because a test peer computes hundreds of times
slower than a GPU. The full form takes about three hours on a quiet machine of 2 cores; --headline (`make headline`)
under 20 minutes: N3 and N1, few steps. Beds that are named with it have five device orders of the rival with equal
layers, in 15 to 25 minutes each:

    python -m tests.bench.netlab --headline --beds data-plane N3 N1 --save headline
    python -m tests.bench.netlab --headline --beds N2 --save headline-N2
    python -m tests.bench.netlab --headline --beds N4 --save headline-N4

Results go to tests/bench/results/ with --save; `python -m tests.bench.table` puts those named headline* in the README.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from peer.lab.bed import load_bed
from peer.lab.measure import TOLERANCE, Delivered, measure
from peer.lab.netns import Lab, LabUnsupported, unsupported
from tests.bench.rows import Row, arguments, at_least, at_most, progress, report
from tests.netlab import model as m
from tests.netlab import study as s
from tests.netlab.streams import StreamFailed, StreamRun, pairs, stream

RESULTS = Path(__file__).parent / "results"
OVER_RIVAL = {"N1": 9.4, "N2": 7.0, "N3": 1.3, "N4": 6.0}
ALONE, OVER_PUBLISHED, CEILING, PREDICTED = 2.0, 1.5, 0.75, 0.15
GOODPUT, LOOPBACK, CPU_CORES = 0.95, 0.2, 0.15
LOOPBACK_RUNS = 3  # raw TCP and ours in turn: on a shared machine either differs by half from minute to minute
PLANE = "data-plane"
RIVALS_S = 8 * 60.0  # of --headline, for N1 beside N3: an order takes two to four minutes a step
HEADLINE_S = 18.5 * 60.0  # after this nothing new begins


def judge(found: s.Found) -> Iterator[Row]:
    """Rows of one bed."""
    name, ours_s = found.bed, found.step_s(s.OURS)
    yield from delivered(name, found.links)
    count = len(found.rivals.get(s.EQUAL, []))
    what = f"{name}: ours over torch pipelining, equal layers, median of {count} device orders"
    yield ratio(what, found.rival_step_s(), ours_s, OVER_RIVAL[name])
    if found.rivals.get(s.BY_SPEED):
        value = found.rival_step_s(s.BY_SPEED) / ours_s
        yield Row(f"{name}: ours over torch pipelining, layers by speed", f"{value:.3g}x", "", None)
    if name in ("N1", "N2") and found.tried(s.PLAN_ALONE):
        yield ratio(f"{name}: our plan alone over the same", found.rival_step_s(), found.step_s(s.PLAN_ALONE), ALONE)
    if name in ("N1", "N2") and found.tried(s.PUBLISHED_UNIFORM):
        theirs_s = found.step_s(s.PUBLISHED_UNIFORM)
        draws = sum(c.startswith(s.PUBLISHED_UNIFORM) for c in found.runs)
        what = f"{name}: ours over {s.PUBLISHED_UNIFORM}, median of {draws} draws"
        yield ratio(what, theirs_s, ours_s, OVER_PUBLISHED)
        most = theirs_s / found.least_step_s()
        yield Row(f"{name}: the most that a plan which sends nothing would have over it", f"{most:.3g}x", "", None)
    for config, run in found.runs.items():
        if config == s.OURS and run.plan.prediction is not None:
            bound_s = run.plan.prediction.lower_bound_s
            yield ratio(f"{name}: ours over the ceiling of any plan", bound_s, ours_s, CEILING, unit="")
        off = run.step_s / run.predicted_s
        text = f"{run.step_s:.3g} s / {run.predicted_s:.3g} s = {off:.3f}"
        bound = f"within {PREDICTED:.0%}"
        yield Row(f"{name}: measured over predicted, {config}", text, bound, abs(off - 1) <= PREDICTED)
    for config, why in found.failed.items():
        yield Row(f"{name}: {config}", why[:120], "comes to an end", None if why == s.NO_TIME else False)


def ratio(case: str, theirs: float, ours: float, bound: float, unit: str = "x") -> Row:
    value = theirs / ours
    if math.isnan(value):
        return Row(case, "not measured", f">= {bound:g}{unit}", False)
    return at_least(case, value, bound, unit)


def delivered(name: str, links: list[Delivered]) -> Iterator[Row]:
    if links:
        worst = max(links, key=lambda d: abs(d.of_configured - 1))
        case = f"{name}: worst of {len(links)} links, {worst.src} to {worst.dst}"
        bound = f"within {TOLERANCE:.0%}"
        yield Row(case, f"{worst.of_configured:.3f} of configured", bound, all(d.holds for d in links))


def data_plane(rates: tuple[float, ...], seconds: float, *, together: bool, loopback: bool) -> Iterator[Row]:
    """Goodput of an edge stream over raw TCP, and its CPU at 100 Mbps. `together`: the rates at once, to save time."""
    with Lab(pairs(rates)) as lab, ThreadPoolExecutor(len(rates) if together else 1) as pool:
        found = pool.map(lambda k: both(lambda kind: stream(kind, seconds, lab, k)), range(len(rates)))
        for rate, (raw, ours) in zip(rates, found, strict=True):
            if isinstance(ours, str):
                yield Row(f"edge stream at {rate:g} Mbps", ours, f">= {GOODPUT}", False)
                continue
            yield at_least(
                f"goodput of an edge stream over raw TCP, {rate:g} Mbps", ours.bits_per_s / raw.bits_per_s, GOODPUT
            )
            if rate == 100:
                yield at_most("CPU of both ends and their p2pd at 100 Mbps", ours.cores, CPU_CORES, " cores")
                yield Row("the same of raw asyncio TCP", f"{raw.cores:.3g} cores", "", None)
    if loopback:
        runs = [both(lambda kind: stream(kind, seconds)) for _ in range(LOOPBACK_RUNS)]
        failed = [ours for _, ours in runs if isinstance(ours, str)]
        if failed:
            yield Row("edge stream on loopback", failed[0], f">= {LOOPBACK}", False)
        else:
            by_ratio = sorted(
                ((o.bits_per_s / r.bits_per_s, r, o) for r, o in runs if not isinstance(o, str)), key=lambda x: x[0]
            )
            value, raw, mid = by_ratio[len(by_ratio) // 2]
            figures = f"{mid.bits_per_s / 1e9:.2f} of {raw.bits_per_s / 1e9:.2f} Gbps"
            ns = mid.cores / mid.bits_per_s * 8e9
            case = f"goodput over raw TCP, unshaped loopback, median of {len(runs)}; CPU of both ends and their p2pd"
            yield Row(case, f"{value:.3g} ({figures}; {ns:.2g} ns a byte)", f">= {LOOPBACK}", value >= LOOPBACK)


def both(run: Callable[[str], StreamRun]) -> tuple[StreamRun, StreamRun | str]:
    try:
        return run("raw"), run("ours")
    except StreamFailed as error:
        return StreamRun(bits_per_s=1.0, cores=0.0), str(error)


def machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": next(
            (x.partition(":")[2].strip() for x in _cpuinfo() if x.startswith("model name")), platform.machine()
        ),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hivemind": version("hivemind"),
        "load_at_start": os.getloadavg()[0],
        "flops_per_cut_byte": m.FLOPS / m.CUT_BYTES,
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []


def save(name: str, about: dict[str, Any], rows: list[Row], found: list[s.Found]) -> None:
    RESULTS.mkdir(exist_ok=True)
    shown = [{"case": x.case, "figure": x.figure, "bound": x.bound, "holds": x.holds} for x in rows]
    whole = {"machine": about, "rows": shown, "beds": {f.bed: f.as_dict() for f in found}}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    progress(f"results: {path}")


def main(args: list[str]) -> int:
    parser = arguments(__doc__ or "", "links of N3, goodput at 8 and 100 Mbps")
    parser.add_argument("--headline", action="store_true", help="under 20 minutes: N1 and N3, few steps")
    parser.add_argument("--save", metavar="NAME", help="write tests/bench/results/NAME.json")
    parser.add_argument(
        "--beds", nargs="+", default=None, choices=(PLANE, *sorted(OVER_RIVAL)), help="(default: all of them)"
    )
    parser.add_argument("--steps", type=int, default=None, metavar="N", help="steps of ours that count (default: 8)")
    parser.add_argument("--orders", type=int, default=5, metavar="N", help="device orders of the rival (default: 5)")
    options = parser.parse_args(args)
    why = unsupported()
    if why:
        progress(why)
        return report([Row("netlab", f"skipped: {why}", "", None)], options.json)
    about, rows, found = machine(), list[Row](), list[s.Found]()
    progress(f"load {about['load_at_start']:.2f} of {about['cores']} cores before anything begins")
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as home:
        os.environ["FUSION_HOME"] = home
        torch.set_num_threads(1)
        if options.quick:
            rows = quick()
        else:
            experiments(options, rows, found, lambda: save(options.save, about, rows, found) if options.save else None)
    code = report(rows, options.json)
    if options.save:
        save(options.save, about, rows, found)
    return code


def quick() -> list[Row]:
    with Lab(load_bed(s.FILE, "N3", rate_scale=0.1)) as lab:
        rows = list(delivered("N3", measure(lab)))
    return [*rows, *data_plane((8.0, 100.0), 3.0, together=True, loopback=False)]


def experiments(options: Any, rows: list[Row], found: list[s.Found], checkpoint: Callable[[], None]) -> None:
    """The data plane, then bed after bed, that of the slowest rivals last; what is measured is saved as it comes."""
    beds = options.beds or (PLANE, *(("N3", "N1") if options.headline else OVER_RIVAL))
    short = options.headline and not options.beds
    until = time.monotonic() + HEADLINE_S if short else float("inf")
    if PLANE in beds:
        rows += data_plane((8.0, 100.0, 1000.0), 4.0, together=False, loopback=True)
        checkpoint()
    for name in (b for b in beds if b != PLANE):
        configs = tuple(s.CONFIGS)
        if options.headline:
            three = tuple(c for c in s.CONFIGS if c.startswith((s.OURS, s.PUBLISHED_UNIFORM)))
            configs = three if name in ("N1", "N2") else (s.OURS,)
        try:
            one = s.study(
                name,
                say=progress,
                configs=configs,
                orders=options.orders,
                by_speed=(1 if name == "N3" else 0) if options.headline else options.orders,
                steps=options.steps or (4 if options.headline else 8),
                until=until,
                rivals_s=RIVALS_S if short else float("inf"),
            )
        except LabUnsupported as error:
            rows.append(Row(name, str(error), "can be built", False))
            continue
        found.append(one)
        rows += judge(one)
        checkpoint()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

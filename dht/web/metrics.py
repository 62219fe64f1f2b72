"""The picture for Prometheus, in its text format. Peers are counted, not listed: labels stay few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dht.monitor_views import Picture

_HELP = {
    "fusion_peers": "Peers by state.",
    "fusion_peer_flops_per_second": "Measured speed of all peers that are there, summed.",
    "fusion_fences": "Fences with a leader.",
    "fusion_fence_members": "Members of a fence.",
    "fusion_records_refused_total": "Records refused since the monitor's start.",
    "fusion_board_up": "1 if the last look at the bulletin board succeeded.",
    "fusion_picture_age_seconds": "Seconds since the last picture.",
    "fusion_run_state": "1 for the state that a run is in.",
    "fusion_run_step": "Optimizer steps done.",
    "fusion_run_loss": "Loss of the last step.",
    "fusion_run_step_seconds": "Seconds of the last step.",
    "fusion_run_tokens_per_second": "Tokens a second.",
    "fusion_run_record_age_seconds": "Seconds since the run's record was written.",
    "fusion_run_wanted_peers": "Volunteers that the run waits for.",
    "fusion_stage_compute_seconds": "Seconds that a stage computed in the last step.",
    "fusion_stage_wait_seconds": "Seconds that a stage waited in the last step.",
    "fusion_link_bytes_per_second": "Mean rate of a run's link over the last step.",
}
_STATES = ("waiting", "training", "paused", "done", "failed", "silent")


def prometheus(picture: Picture, age_s: float) -> str:
    """The whole answer of /metrics."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in _figures(picture, age_s):
        inside = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
        by_name.setdefault(name, []).append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")
    out = []
    for name, lines in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        out += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} {kind}", *lines]
    return "\n".join(out) + "\n"


def _figures(picture: Picture, age_s: float) -> Iterable[tuple[str, dict[str, str], float]]:
    states = Counter(p.state for p in picture.peers)
    for state in ("free", "busy", "paused", "late", "silent", "left"):
        yield "fusion_peers", {"state": state}, states.get(state, 0)
    live = [p for p in picture.peers if p.state in ("free", "busy", "paused", "late")]
    yield "fusion_peer_flops_per_second", {}, sum(d.flops_per_s or 0.0 for p in live for d in p.devices)
    yield "fusion_fences", {}, len(picture.fences)
    for f in picture.fences:
        yield "fusion_fence_members", {"fence": f.fence}, f.members
    yield "fusion_records_refused_total", {}, picture.refused
    yield "fusion_board_up", {}, int(picture.error is None)
    yield "fusion_picture_age_seconds", {}, round(age_s, 3)
    for run in picture.runs:
        names = {"run": run.run, "name": run.name}
        for state in _STATES:
            yield "fusion_run_state", {**names, "state": state}, int(run.state == state)
        yield "fusion_run_step", names, run.step
        yield "fusion_run_record_age_seconds", names, round(max(0.0, picture.time - run.published), 1)
        yield "fusion_run_wanted_peers", names, run.wanted_peers
        for name, figure in (
            ("fusion_run_loss", run.loss),
            ("fusion_run_step_seconds", run.step_time_s),
            ("fusion_run_tokens_per_second", run.tokens_per_s),
        ):
            if figure is not None:
                yield name, names, figure
        for s in run.stages:
            at = {**names, "stage": str(s.stage), "replica": str(s.replica)}
            if s.compute_s is not None:
                yield "fusion_stage_compute_seconds", at, s.compute_s
            if s.wait_s is not None:
                yield "fusion_stage_wait_seconds", at, s.wait_s
        for k in run.links:
            if k.bytes_per_s is not None:
                at = {**names, "src": str(k.src), "dst": str(k.dst), "codec": k.codec or ""}
                yield "fusion_link_bytes_per_second", at, k.bytes_per_s


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""A plan in sentences: who hosts what and why, what holds it up, and what one more link or peer would bring."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fusion_p2p.planner.ladder import beyond

if TYPE_CHECKING:
    from fusion_p2p.planner.proposal import Proposal
    from fusion_p2p.planner.workload import MemoryParts


def reasons(p: Proposal) -> tuple[str, ...]:
    """The lines kept with an adopted plan."""
    return (_headline(p), *choices(p), *_marks(p))


def choices(p: Proposal) -> tuple[str, ...]:
    """What holds the plan up, where it crosses fences, what is compressed, where tied weights go, who is left out."""
    return (_bottleneck(p), *_crossings(p), *_codecs(p), *_tied(p), *_spares(p))


def explain(p: Proposal) -> str:
    """The whole explanation, for a terminal."""
    devices = p.network.devices
    bounds = p.chain.bounds(p.workload.atoms)
    lines = [
        f"{p.workload.name} on {p.network.name}: {len(p.chain.hosts)} stages on {len(set(p.chain.hosts))} of "
        f"{len(devices)} devices, {p.costs.m} micro-batches of {p.workload.samples}"
    ]
    heaviest = p.workload.stage_bytes(0, 0, 1)
    for k, h in enumerate(p.chain.hosts):
        d = devices[h]
        m = p.workload.stage_bytes(bounds[k], bounds[k + 1], p.windows[k])
        hop = ""
        if k < len(p.chain.cuts):
            hop = f"; to stage {k + 1}: {p.score.hop_s[k] * 1e3:.1f} ms, {p.chain.rungs[k].codec}"
        lines.append(
            f"  stage {k:2d}  {d.name:<14} {d.site:<8} atoms {bounds[k]}-{bounds[k + 1] - 1}, "
            f"{p.score.stage_s[k] * 1e3:.1f} ms, {m.total / 2**30:.2f} GiB, window {p.windows[k]}{hop}"
        )
        heaviest = max(heaviest, m, key=lambda m: m.total)
    return "\n".join([*lines, f"  {_memory(heaviest)}", *(f"  {r}" for r in p.reasons)])


def _memory(m: MemoryParts) -> str:
    gib = 2**30
    return (
        f"memory of the heaviest stage: weights, gradients and optimizer {m.state / gib:.2f} GiB, activations "
        f"{m.activations / gib:.2f}, workspace {m.workspace / gib:.2f}, frames {m.outbox / gib:.2f}, snapshot copy "
        f"{m.snapshot / gib:.2f}"
    )


def _headline(p: Proposal) -> str:
    s = p.score
    rest = (p.costs.m - 1) * s.bottleneck_s
    tied = f", tied weights {s.shared_s:.3f}" if s.shared_s > 0 else ""
    return (
        f"step {p.step_s:.3f} s simulated ({s.step_s:.3f} s by formula: compute {s.compute_s:.3f}, transfer "
        f"{s.transfer_s:.3f}, latency {s.latency_s:.3f}, codecs {s.codec_s:.3f}{tied}, then {p.costs.m - 1} x "
        f"{s.bottleneck_s * 1e3:.1f} ms = {rest:.3f}); within {max(0.0, p.gap):.0%} of what any plan could do "
        f"({p.lower_bound_s:.3f} s)"
    )


def _bottleneck(p: Proposal) -> str:
    s, devices = p.score, p.network.devices
    if s.hop_s and max(s.hop_s) >= s.bottleneck_s * 0.999:
        k = max(range(len(s.hop_s)), key=lambda k: s.hop_s[k])
        a, b = p.chain.hosts[k], p.chain.hosts[k + 1]
        rest = max(sorted([*s.stage_s, *s.hop_s])[-2], max(s.stage_s))
        gain = (p.costs.m - 1) * (s.bottleneck_s - rest)
        return (
            f"the link {devices[a].name} -> {devices[b].name} sets the pace ({s.bottleneck_s * 1e3:.1f} ms); "
            f"a link twice as fast would save up to {max(0.0, gain):.3f} s a step"
        )
    k = max(range(len(s.stage_s)), key=lambda k: s.stage_s[k])
    d = devices[p.chain.hosts[k]]
    count = len(s.stage_s)
    gain = (p.costs.m - 1) * s.bottleneck_s / (count + 1)
    return (
        f"stage {k} on {d.name} sets the pace ({s.bottleneck_s * 1e3:.1f} ms, "
        f"mean {sum(s.stage_s) / count * 1e3:.1f}); "
        f"one more device like {d.name} on a link as good would save up to {gain:.3f} s a step"
    )


def _crossings(p: Proposal) -> list[str]:
    if len(p.chain.hosts) < 2 or len(p.fences) < 2:
        return []
    fence_of = {d: n for n, f in enumerate(p.fences) for d in f}
    hops = [(a, b) for a, b in pairwise(p.chain.hosts) if fence_of.get(a) != fence_of.get(b)]
    used = len({fence_of.get(h) for h in p.chain.hosts})
    if used < 2:
        return [f"one fence of {len(p.fences)} is used, so that no hop crosses between fences"]
    names = ", ".join(f"{p.network.devices[a].name} -> {p.network.devices[b].name}" for a, b in hops[:6])
    more = f" and {len(hops) - 6} more" if len(hops) > 6 else ""
    return [f"{used} fences of {len(p.fences)} are crossed in {len(hops)} hops: {names}{more}"]


def _codecs(p: Proposal) -> list[str]:
    count = [k for k, r in enumerate(p.chain.rungs) if r.byte_share < 1.0]
    if not count:
        return ["no link is compressed: none would hold the pipeline up"] if p.chain.rungs else []
    k = min(count, key=lambda k: p.chain.rungs[k].byte_share)
    a, b = p.chain.hosts[k], p.chain.hosts[k + 1]
    line = (
        f"{len(count)} of {len(p.chain.rungs)} links are compressed, the most {p.network.devices[a].name} -> "
        f"{p.network.devices[b].name} ({p.chain.rungs[k].codec}, {p.chain.rungs[k].byte_share:.1%} of dense)"
    )
    return [line, *_dearer(p)]


def _dearer(p: Proposal) -> list[str]:
    """For the slowest link that the last rung does not make short enough: what a dearer one would do."""
    ladder, limit_s = p.costs.ladder, p.costs.ladder.tau * p.score.bottleneck_s
    slow = [k for k, r in enumerate(p.chain.rungs) if r == ladder.rungs[-1] and p.score.hop_s[k] > limit_s]
    if not slow:
        return []
    k = max(slow, key=lambda k: p.score.hop_s[k])
    more = beyond(ladder, p.score.hop_s[k] / p.chain.rungs[k].byte_share, limit_s)
    a, b = (p.network.devices[h].name for h in p.chain.hosts[k : k + 2])
    return [f"{a} -> {b} takes {p.score.hop_s[k]:.3g} s with {p.chain.rungs[k].codec}: {more}"] if more else []


def _tied(p: Proposal) -> list[str]:
    if not p.workload.shared or len(set(p.chain.hosts)) < 2:
        return []
    size = sum(w.size_bytes for w in p.workload.shared) / 1e6
    if p.score.shared_s > 0:
        return [f"tied weights ({size:.3g} MB) travel once a step and their gradients back: {p.score.shared_s:.3g} s"]
    return [f"tied weights ({size:.3g} MB) never travel: one device has all their uses"]


def _spares(p: Proposal) -> list[str]:
    if not p.spares:
        return []
    names = [p.network.devices[i].name for i in p.spares]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return [f"left out as spares: {shown}; their share of the work would save less than their hops cost"]


def _marks(p: Proposal) -> list[str]:
    d = p.durability
    alone = sum(1 for b in d.buddies if b < 0)
    line = f"marks every {d.mark_interval} steps (slowest set reaches its buddy in {d.upload_s:.0f} s), "
    line += f"{sum(d.logged)} of {len(d.logged)} links logged, {len(d.groups)} recovery groups"
    if alone:
        line += f"; {alone} stages have no other machine to keep their sets"
    return [line]

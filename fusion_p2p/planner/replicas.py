"""One long pipeline, or several that average now and then? The rule of thumb, and plans for the second answer."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.errors import InputError
from fusion_p2p.planner.fences import average_linkage, cut_at, transfer_s
from fusion_p2p.planner.ladder import Ladder
from fusion_p2p.planner.network import Network
from fusion_p2p.planner.proposal import Constraints, Proposal, plan
from fusion_p2p.planner.workload import Workload


def replicas_pay(
    *,
    replicas: int,
    parameters: float,
    bytes_per_parameter: float,
    steps_between: int,
    micro_batches: int,
    cut_bytes: float,
    ratio: float,
) -> bool:
    """Whether averaging over a link moves less than a pipeline across it: 2(R-1)/R * P * b / H < M * cut / r.

    `ratio`: how many times the pipeline's frames are compressed; `steps_between`: H, steps from averaging to averaging.
    """
    averaging = 2 * (replicas - 1) / replicas * parameters * bytes_per_parameter / steps_between
    return averaging < micro_batches * cut_bytes / ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaPlan:
    """`pipelines` that share the micro-batches in proportion to speed. `step_s` includes averaging's share."""

    pipelines: tuple[Proposal, ...]
    step_s: float
    averaging_s: float  # one averaging

    @property
    def replicas(self) -> int:
        return len(self.pipelines)


def best_replicas(
    workload: Workload,
    network: Network,
    *,
    micro_batches: int,
    steps_between: int,
    bytes_per_parameter: float = 4.0,
    most: int = 4,
    ladder: Ladder | None = None,
    tau: float = 0.25,
    constraints: Constraints | None = None,
    local_search: bool = False,
) -> ReplicaPlan:
    """The fastest of R = 1 .. `most` pipelines, the network parted at its slowest links (average linkage)."""
    best: ReplicaPlan | None = None
    parts = _parts(network, float(workload.cut_bytes.mean()), min(most, micro_batches))
    for groups in parts:
        found = _plan_groups(
            workload, network, groups, micro_batches, steps_between, bytes_per_parameter, ladder, tau, constraints,
            local_search,
        )  # fmt: skip
        if found is not None and (best is None or found.step_s < best.step_s):
            best = found
    if best is None:
        raise InputError("the model fits no part of the network; add peers or raise memory caps")
    return best


def pays(one: Proposal, several: ReplicaPlan) -> bool:
    """Whether several pipelines beat the best single one."""
    return several.replicas > 1 and several.step_s < one.step_s


def _parts(network: Network, size_bytes: float, most: int) -> list[tuple[tuple[int, ...], ...]]:
    import numpy as np

    everything = tuple(range(len(network)))
    out: list[tuple[tuple[int, ...], ...]] = [(everything,)]
    if len(network) > 1:
        merges = average_linkage(np.log(np.maximum(transfer_s(network, size_bytes), 1e-9)))
        for r in range(2, min(most, len(network)) + 1):
            height = merges[-r][2] if r <= len(merges) else -np.inf
            groups = cut_at(merges, len(network), height)
            if 1 < len(groups) <= most and groups not in out:
                out.append(groups)
    return out


def _plan_groups(
    workload: Workload,
    network: Network,
    groups: tuple[tuple[int, ...], ...],
    micro_batches: int,
    steps_between: int,
    bytes_per_parameter: float,
    ladder: Ladder | None,
    tau: float,
    constraints: Constraints | None,
    local_search: bool,
) -> ReplicaPlan | None:
    """Plans for groups that fit the model; micro-batches go in proportion to each group's pace."""
    options = {"ladder": ladder, "tau": tau, "constraints": constraints, "local_search": local_search}
    count = len(groups)
    first = []
    for g in groups:
        try:
            first.append(plan(workload, network.subset(g), micro_batches=max(1, micro_batches // count), **options))  # type: ignore[arg-type]
        except InputError:
            continue  # too small a group: its peers stay spares
    if not first:
        return None
    pace = [1.0 / p.score.bottleneck_s for p in first]
    shares = [max(1, round(micro_batches * x / sum(pace))) for x in pace]
    while sum(shares) > micro_batches and max(shares) > 1:
        shares[shares.index(max(shares))] -= 1
    shares[shares.index(max(shares))] += max(0, micro_batches - sum(shares))
    final = [
        p if s == p.costs.m else plan(workload, p.network, micro_batches=s, **options)  # type: ignore[arg-type]
        for p, s in zip(first, shares, strict=True)
    ]
    averaging = _averaging_s(network, final, float(workload.parameters.sum()) * bytes_per_parameter)
    step = max(p.step_s for p in final) + averaging / steps_between
    return ReplicaPlan(pipelines=tuple(final), step_s=step, averaging_s=averaging)


def _averaging_s(network: Network, pipelines: list[Proposal], size_bytes: float) -> float:
    """Seconds of one ring averaging: each stage's host sends 2(R-1)/R of its weights to the next replica's host.

    Stages transfer side by side; each pair of replicas is taken at its fastest link, which all stages share.
    """
    r = len(pipelines)
    if r == 1:
        return 0.0
    where = {d.name: i for i, d in enumerate(network.devices)}
    slowest = 0.0
    for a, b in zip(pipelines, (*pipelines[1:], pipelines[0]), strict=True):
        ia = [where[a.network.devices[h].name] for h in set(a.chain.hosts)]
        ib = [where[b.network.devices[h].name] for h in set(b.chain.hosts)]
        fastest = max(float(network.bandwidth_bytes_per_s[i, j]) for i in ia for j in ib)
        slowest = max(slowest, 2 * (r - 1) / r * size_bytes / fastest)
    return slowest

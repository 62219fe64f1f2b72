"""What plans promise: memory, constraints, marks, absorbing, hysteresis, replicas, explanations, bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.planner import (
    DENSE,
    Constraints,
    Device,
    Ladder,
    Link,
    Network,
    Workload,
    default_ladder,
    explain,
    from_measurements,
    plan,
    top_k_ladder,
)
from fusion_p2p.planner.baselines import network_only, published, published_adatopk, random_equal_layers
from fusion_p2p.planner.fences import average_linkage, find_fences, leaves, louvain
from fusion_p2p.planner.gantt import svg
from fusion_p2p.planner.replan import absorb, corrected, weigh
from fusion_p2p.planner.replicas import best_replicas, replicas_pay
from fusion_p2p.planner.synthetic import noisy
from fusion_p2p.planner.workload import SharedWeight, from_atoms

DENSE_ONLY = Ladder((DENSE,))


def blocks(count: int = 24, *, parameters: float = 2e6, cut: float = 1e6) -> Workload:
    """`count` equal blocks."""
    one = np.ones(count)
    return Workload(
        name="blocks",
        forward_flops=one * 1e11,
        backward_flops=one * 2e11,
        forward_bytes=one * 1e6,
        parameters=one * parameters,
        stash_bytes=one * 1e6,
        kernels=one,
        cut_bytes=np.full(count + 1, cut),
    )


def two_sites(per_site: int = 6, *, between: float = 2e6, memory: float = 8e9) -> Network:
    """Two sites of equal devices on 1 Gbit/s; `between` them slow."""
    n = 2 * per_site
    site = np.arange(n) // per_site
    same = site[:, None] == site[None, :]
    devices = tuple(
        Device(
            peer=f"{'ab'[site[i]]}{i % per_site}",
            flops_per_s=1e13,
            memory_bytes_per_s=1e12,
            memory_bytes=memory,
            site="ab"[site[i]],
        )
        for i in range(n)
    )
    return Network(
        devices=devices,
        bandwidth_bytes_per_s=np.where(same, 1.25e8, between),
        latency_s=np.where(same, 0.0003, 0.03),
        name="two sites",
    )


def test_a_plan_says_which_codec_would_fit_a_link_and_what_it_would_cost() -> None:
    w = blocks()
    slow = plan(w, two_sites(between=2e3), micro_batches=16, allow_skip=False)
    assert slow.chain.rungs.count(default_ladder().rungs[-1]) == 1
    (line,) = [r for r in explain(slow).splitlines() if "of the loss" in r]
    assert "topk-masked:0.01 would take" in line and "compression adatopk:" in line
    allowed = plan(w, two_sites(between=2e3), micro_batches=16, allow_skip=False, ladder=default_ladder(most_loss=9.0))
    assert "topk-masked:0.01" in {r.codec for r in allowed.chain.rungs}
    assert "of the loss" not in explain(allowed)


def test_a_slow_link_between_sites_is_not_used_dense_and_is_when_compressed() -> None:
    w, net = blocks(), two_sites()
    dense = plan(w, net, micro_batches=16, ladder=DENSE_ONLY)
    assert len({net.devices[h].site for h in dense.chain.hosts}) == 1
    compressed = plan(w, net, micro_batches=16, ladder=top_k_ladder())
    sites = [net.devices[h].site for h in compressed.chain.hosts]
    assert set(sites) == {"a", "b"}
    assert sum(a != b for a, b in pairwise(sites)) == 1
    assert compressed.step_s < dense.step_s
    for p in (dense, compressed):
        assert p.lower_bound_s <= p.step_s
        assert p.score.step_s == pytest.approx(p.step_s, rel=0.1)


def test_fences_find_the_sites() -> None:
    net = two_sites()
    expected = {tuple(range(6)), tuple(range(6, 12))}
    assert set(find_fences(net, 1e6)) == expected
    assert set(louvain(net)) == expected
    elected = replace(net, fences=((0, 1),))
    assert find_fences(elected, 1e6)[0] == (0, 1)


def test_linkage_agrees_with_itself_on_a_line() -> None:
    where = np.array([0.0, 1.0, 10.0, 11.0, 100.0])
    d = np.abs(where[:, None] - where[None, :])
    merges = average_linkage(d)
    assert [h for _, _, h in merges] == pytest.approx([1, 1, 10, 94.5])
    order = [where[i] for i in leaves(merges, d)]
    assert order in (sorted(order), sorted(order, reverse=True))


def test_memory_is_respected_and_shortage_is_one_line() -> None:
    w = blocks(parameters=1e8)  # 1.6 GB of state a block, 38 GB in all
    p = plan(w, two_sites(memory=8e9), micro_batches=16, ladder=top_k_ladder())
    bounds = p.chain.bounds(w.atoms)
    for k in range(len(p.chain.hosts)):
        assert w.parameters[bounds[k] : bounds[k + 1]].sum() * 16 <= 0.9 * 8e9
    with pytest.raises(InputError, match="GiB") as short:
        plan(w, two_sites(memory=2.5e9), micro_batches=16)
    assert "\n" not in str(short.value)
    with pytest.raises(InputError, match="largest atom"):
        plan(replace(w, parameters=np.append(np.full(23, 1e3), 1e9)), two_sites(memory=8e9), micro_batches=16)


def test_refusals_newcomers_exclusions_and_upload_caps_are_respected() -> None:
    w, net = blocks(), two_sites(between=1.25e8)
    devices = list(net.devices)
    devices[0] = replace(devices[0], accepts=False)
    devices[1] = replace(devices[1], confirmed=False)
    devices[2] = replace(devices[2], upload_bytes_per_step=1.0)
    net = replace(net, devices=tuple(devices))
    p = plan(w, net, micro_batches=16, ladder=DENSE_ONLY, constraints=Constraints(exclude=frozenset({"a3"})))
    assert not {0, 1, 2, 3} & set(p.chain.hosts)
    assert p.score.fits


def test_tied_atoms_stay_together_and_pinned_cuts_stand() -> None:
    w = replace(blocks(), together=((0, 7),))
    p = plan(w, two_sites(), micro_batches=16, ladder=DENSE_ONLY)
    assert all(c == 0 or c >= 8 for c in p.chain.cuts)
    pinned = plan(
        blocks(), two_sites(), micro_batches=16, ladder=DENSE_ONLY, constraints=Constraints(pinned_cuts=(3, 9, 20))
    )
    assert pinned.chain.cuts == (3, 9, 20)
    assert len(pinned.chain.hosts) == 4


def test_a_tied_weight_costs_its_transfer_once_a_step() -> None:
    w = blocks()
    shared = replace(w, shared=(SharedWeight(0, 23, 1e7),))
    net = two_sites()
    a, b = (plan(x, net, micro_batches=16, ladder=DENSE_ONLY) for x in (w, shared))
    assert b.score.shared_s == pytest.approx(2 * 1e7 / 1.25e8 + 0.0006, rel=1e-6)
    assert b.step_s == pytest.approx(a.step_s + b.score.shared_s, rel=0.05)


def test_from_atoms_sizes_tied_weights() -> None:
    class Atom:
        weights: tuple[str, ...] = ()
        owned: tuple[str, ...] = ()
        parameters, weight_bytes, forward_flops, backward_flops, forward_bytes = 10, 48, 100, 200, 50
        stash_bytes, kernels, cut_bytes, cut_weight_bytes, heavier = 5, 1, 4, 0, 1.0

        def __init__(self, weights: tuple[str, ...], across: int) -> None:
            self.weights, self.cut_weight_bytes = weights, across

    w = from_atoms("m", [Atom(("wte", "a"), 0), Atom(("b",), 400), Atom(("b", "wte"), 440)], samples=2)
    assert w.shared == (SharedWeight(0, 2, 400.0), SharedWeight(1, 2, 40.0))
    assert w.fixed_bytes is not None and w.fixed_bytes.tolist() == [8, 8, 8]
    assert w.cut_bytes.tolist() == [4, 4, 4, 0]


def test_an_unrolled_loop_is_never_cut() -> None:
    class Atom:
        owned: tuple[str, ...] = ()
        parameters, weight_bytes, forward_flops, backward_flops, forward_bytes = 10, 48, 100, 200, 50
        stash_bytes, kernels, cut_bytes, cut_weight_bytes, heavier = 5, 1, 4, 400, 1.0

        def __init__(self, *weights: str) -> None:
            self.weights = weights

    def allowed(*atoms: Atom) -> list[int]:
        w = from_atoms("m", atoms, samples=2)
        return [k for k, ok in enumerate(w.cut_allowed().tolist()) if ok and 0 < k < len(atoms)]

    cell = [Atom("cell.ih"), Atom("cell.hh"), Atom()]
    looped = allowed(Atom("embed"), *cell * 3, Atom("head"), Atom("more"))
    assert looped == [1, 9, 10, 11], "what follows the last reader is out of the loop"
    blocks = [Atom("wte"), Atom("a"), Atom("wte"), Atom("b"), Atom("wte")]
    assert allowed(*blocks) == [1, 2, 3, 4], "an embedding with three readers is no loop"
    assert allowed(*[Atom("shared")] * 2) == [1], "nor is a weight that is used twice"


def test_to_plan_names_hosts_windows_codecs_and_buddies() -> None:
    w, net = blocks(), two_sites()
    p = plan(w, net, micro_batches=16, ladder=top_k_ladder())
    made = p.to_plan(number=3, epoch=2)
    assert [s.peer for s in made.placement] == [net.devices[h].peer for h in p.chain.hosts]
    assert made.numerics.cuts == p.chain.cuts
    assert made.numerics.micro_batches == 16
    named = {(c.src, c.dst): c.codec for c in made.numerics.codecs}
    assert named == {(k, k + 1): r.codec for k, r in enumerate(p.chain.rungs) if r.codec != "dense"}
    assert all(s.buddies and s.buddies[0] != s.peer for s in made.placement)
    assert all(1 <= s.window <= 16 for s in made.placement)
    assert made.mark_interval >= 10
    assert made.prediction is not None and made.prediction.lower_bound_s > 0
    skip = p.numerics(channels=[(0, len(p.chain.hosts) - 1)])
    assert skip.codecs[0].codec == min(p.chain.rungs, key=lambda r: r.byte_share).codec


def test_explanation_and_picture() -> None:
    p = plan(blocks(), two_sites(), micro_batches=16, ladder=top_k_ladder())
    text = explain(p)
    for word in ("sets the pace", "of what any plan could do", "fences", "compressed", "marks every"):
        assert word in text
    root = ElementTree.fromstring(svg(p))
    assert len(list(root)) > 2 * 16 * len(p.chain.hosts)


def test_absorbing_a_loss_keeps_cuts_and_says_why() -> None:
    p = plan(blocks(), two_sites(), micro_batches=16, ladder=top_k_ladder())
    for host in p.chain.hosts:
        name = p.network.devices[host].peer
        repair = absorb(p, {name})
        assert repair.proposal.chain.cuts == p.chain.cuts
        assert repair.proposal.chain.rungs == p.chain.rungs
        assert host not in repair.proposal.chain.hosts
        assert name in repair.proposal.reasons[0]
        assert repair.proposal.step_s >= p.step_s * 0.95
        assert (repair.restore_s == 0) == (repair.moves[0].source == repair.moves[0].new)  # the buddy has it
    with pytest.raises(InputError, match="no remaining peer"):
        absorb(p, {d.peer for d in p.network.devices})


def test_noise_moves_nothing_and_a_collapse_does() -> None:
    w, net = blocks(), two_sites()
    p = plan(w, net, micro_batches=16, ladder=top_k_ladder())
    for seed in range(5):
        assert not weigh(p, plan(w, noisy(net, 0.1, seed), micro_batches=16, ladder=top_k_ladder())).switch
    slow = p.network.devices[p.chain.hosts[2]].peer
    worse = replace(net, devices=tuple(replace(d, correction=5.0) if d.peer == slow else d for d in net.devices))
    decision = weigh(p, plan(w, worse, micro_batches=16, ladder=top_k_ladder()))
    assert decision.switch
    assert decision.new_step_s < decision.current_step_s * 0.8
    assert any("moved from" in r and "because" in r for r in decision.proposal.reasons)
    assert not weigh(p, decision.proposal, horizon_s=1e-3).switch  # no time left to earn the move back


def test_measured_times_override_claims() -> None:
    net = two_sites()
    seen = corrected(net, {"a0": 1.0}, {"a0": 3.0})
    for _ in range(30):
        claimed = seen.devices[0].correction
        seen = corrected(seen, {"a0": claimed}, {"a0": 3.0})
    assert seen.devices[0].correction == pytest.approx(3.0, rel=0.01)
    assert seen.devices[1].correction == 1.0


def test_a_link_counts_as_the_lower_of_both_ends_and_gaps_are_estimated() -> None:
    devices = [
        Device(peer=p, flops_per_s=1e12, memory_bytes_per_s=1e10, memory_bytes=1e9, site=p[0])
        for p in ("a0", "a1", "b0")
    ]
    links = [
        Link(src="a0", dst="a1", bandwidth_bytes_per_s=5e6, latency_s=0.01),
        Link(src="a0", dst="a1", bandwidth_bytes_per_s=3e6, latency_s=0.02),
        Link(src="a0", dst="b0", bandwidth_bytes_per_s=1e6, latency_s=0.05),
    ]
    net = from_measurements(devices, links)
    assert net.bandwidth_bytes_per_s[0, 1] == net.bandwidth_bytes_per_s[1, 0] == 3e6
    assert net.latency_s[0, 1] == 0.02
    assert net.bandwidth_bytes_per_s[1, 2] == 1e6  # as the other pair of these two sites
    with pytest.raises(InputError, match="no link"):
        from_measurements(devices, [])


def test_replicas_rule_and_plans() -> None:
    rule = dict(replicas=2, parameters=1e6, bytes_per_parameter=4.0, micro_batches=16, cut_bytes=1e6, ratio=1.0)
    assert replicas_pay(steps_between=10, **rule)  # type: ignore[arg-type]
    assert not replicas_pay(steps_between=10, **(rule | {"parameters": 1e9}))  # type: ignore[arg-type]
    apart = best_replicas(blocks(), two_sites(between=1e6), micro_batches=32, steps_between=500, ladder=DENSE_ONLY)
    assert apart.replicas == 2
    assert sum(p.costs.m for p in apart.pipelines) == 32
    together = best_replicas(blocks(), two_sites(between=1e6), micro_batches=32, steps_between=1, ladder=DENSE_ONLY)
    assert together.replicas == 1


def test_baselines_use_every_device_and_lose() -> None:
    w, net = blocks(), two_sites()
    p = plan(w, net, micro_batches=16, ladder=top_k_ladder())
    for chain, score in (random_equal_layers(p.costs, 1), published(p.costs), network_only(p.costs)):
        assert sorted(chain.hosts) == list(range(12))
        assert score.step_s >= p.score.step_s * (1 - 1e-9)  # equal devices, equal blocks: fences alone find the best
    assert random_equal_layers(p.costs, 1)[1].step_s > p.score.step_s
    ratio = published_adatopk(p.costs, published(p.costs)[0])
    assert min(r.byte_share for r in ratio[0].rungs) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": -5.0}, "bandwidth is -5.0"),
        ({"bandwidth": float("nan")}, "bandwidth is nan"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"memory": 0.0}, "memory_bytes is 0.0"),
        ({"flops": float("inf")}, "flops_per_s is inf"),
    ],
)
def test_impossible_networks_are_refused_in_one_line(change: dict[str, float], message: str) -> None:
    net = two_sites()
    bw, lat = net.bandwidth_bytes_per_s.copy(), net.latency_s.copy()
    bw[1, 2] = change.get("bandwidth", bw[1, 2])
    lat[1, 2] = change.get("latency", lat[1, 2])
    d = net.devices[4]
    d = replace(d, memory_bytes=change.get("memory", d.memory_bytes), flops_per_s=change.get("flops", d.flops_per_s))
    devices = (*net.devices[:4], d, *net.devices[5:])
    with pytest.raises(InputError, match=message) as error:
        plan(blocks(), replace(net, bandwidth_bytes_per_s=bw, latency_s=lat, devices=devices), micro_batches=4)
    assert "\n" not in str(error.value)


def test_impossible_workloads_and_ladders_are_refused() -> None:
    w = blocks()
    with pytest.raises(InputError, match=r"parameters\[3\] is -1"):
        plan(replace(w, parameters=np.where(np.arange(24) == 3, -1.0, 1.0)), two_sites(), micro_batches=4)
    with pytest.raises(InputError, match="cut_bytes has 24 entries, expected 25"):
        plan(replace(w, cut_bytes=np.ones(24)), two_sites(), micro_batches=4)
    with pytest.raises(InputError, match="micro_batches = 0"):
        plan(w, two_sites(), micro_batches=0)
    with pytest.raises(InputError, match="tau = 2"):
        default_ladder(2.0)


@pytest.mark.parametrize("count", [0, -1, (1 << 16) + 1, 10**9])
def test_micro_batches_beyond_what_a_frame_numbers_are_refused(count: int) -> None:
    """A typing error of some digits took all the memory of the machine: the schedule is simulated one by one."""
    with pytest.raises(InputError, match=f"micro_batches = {count} must lie within"):
        plan(blocks(), two_sites(), micro_batches=count)

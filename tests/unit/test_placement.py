"""Placement: OP-Fence on offers and links, within memory, refused with figures; codecs; losses; trial steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.outboxes import log_bytes
from fusion_p2p.plan import LinkCodec, Numerics, Plan, Prediction
from fusion_p2p.planner import AtomTimes, Ladder, Link, Rung
from fusion_p2p.planner.ladder import DENSE
from fusion_p2p.settings import ADAMW_BYTES
from fusion_p2p.workload import Atom
from peer.offers import DeviceOffer, SwarmLinks
from peer.placement import PlanRequest, make_plan, next_of, proposal_of, revise, wanted_bytes
from peer.plan_codecs import CARRY_S_PER_BYTE
from peer.rehost import NoRoomError, recovery_group, rehost
from peer.stage_load import stage_bytes
from peer.trainer_figures import codec_reasons

BASE = Numerics(cuts=(), micro_batches=4, micro_batch_size=2)
ROOM = 1 << 40


def atoms(*flops: float, weight: int = 0, cut: int = 0) -> list[Atom]:
    return [
        Atom(
            nodes=(),
            weights=(),
            owned=(),
            parameters=weight // 4,
            weight_bytes=weight,
            forward_flops=f / 3,
            backward_flops=f * 2 / 3,
            forward_bytes=0,
            stash_bytes=0,
            kernels=0,
            cut_bytes=cut,
            cut_weight_bytes=0,
        )
        for f in flops
    ]


def offers(*speeds: float, memory: int = ROOM) -> list[DeviceOffer]:
    """Peers of one machine, so that links cost next to nothing."""
    return [
        DeviceOffer(peer=f"peer{i}", flops_per_s=s, memory_bytes=memory, machine="here") for i, s in enumerate(speeds)
    ]


def step_s(costs: list[Atom], speeds: tuple[float, ...], cuts: tuple[int, ...]) -> float:
    """DESIGN section 5's formula where links are free."""
    bounds = (0, *cuts, len(costs))
    work = [a.forward_flops + a.backward_flops for a in costs]
    stages = [sum(work[bounds[k] : bounds[k + 1]]) / s for k, s in enumerate(speeds)]
    return sum(stages) + (BASE.micro_batches - 1) * max(stages)


def test_work_follows_speed() -> None:
    plan = make_plan(atoms(*[1.0] * 12), offers(1.0, 3.0), PlanRequest(base=BASE, every_device=True))
    bounds = (0, *plan.numerics.cuts, 12)
    share = {p.peer: bounds[p.stage + 1] - bounds[p.stage] for p in plan.placement}
    assert share == {"peer0": 3, "peer1": 9}
    assert all(1 <= p.window <= 4 for p in plan.placement)
    text = plan.explain()
    assert "stage 1" in text and "waiting for the slowest" in text and "at best" in text
    assert "2 of 2 links stay on one machine" in text


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=7),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_equals_brute_force(flops: list[int], speeds: list[int]) -> None:
    costs = atoms(*map(float, flops))
    plan = make_plan(costs, offers(*map(float, speeds)), PlanRequest(base=BASE))
    best = min(
        step_s(costs, order, cuts)
        for count in range(1, len(speeds) + 1)
        for order in itertools.permutations(map(float, speeds), count)
        for cuts in itertools.combinations(range(1, len(flops)), count - 1)
    )
    of = {f"peer{i}": float(s) for i, s in enumerate(speeds)}
    found = step_s(costs, tuple(of[p.peer] for p in plan.placement), plan.numerics.cuts)
    assert found == pytest.approx(best, rel=1e-3)


def test_memory_moves_the_cut() -> None:
    costs = atoms(1, 1, 1, 1, weight=100)
    hosts = [
        DeviceOffer(peer="small", flops_per_s=9.0, memory_bytes=850),
        DeviceOffer(peer="large", flops_per_s=1.0, memory_bytes=2600),
    ]
    plan = make_plan(costs, hosts, PlanRequest(base=BASE, stages=2))
    host = {p.peer: p.stage for p in plan.placement}
    assert plan.numerics.cuts == ((1,) if host["small"] == 0 else (3,))


def test_too_little_memory_names_figures() -> None:
    with pytest.raises(InputError, match=r"too little memory in the swarm: .*28\.0 MiB.*2\.0 MiB"):
        make_plan(atoms(1, 1, weight=2 << 20), offers(1, 1, memory=1 << 20), PlanRequest(base=BASE))


def test_nobody_and_nonsense() -> None:
    with pytest.raises(InputError, match="fusion-peer join"):
        make_plan(atoms(1), [], PlanRequest(base=BASE))
    with pytest.raises(InputError, match="1 to 2 stages"):
        make_plan(atoms(1, 1), offers(1), PlanRequest(base=BASE, stages=3))


def test_more_stages_than_devices_share_them() -> None:
    plan = make_plan(atoms(*[1.0] * 8), offers(1.0, 1.0), PlanRequest(base=BASE, stages=4))
    assert sorted(p.peer for p in plan.placement) == ["peer0", "peer0", "peer1", "peer1"]
    assert {p.device for p in plan.placement} == {"cpu"}
    assert plan.numerics.cuts == (2, 4, 6)


def test_pinned_cuts_stand_whoever_hosts_them() -> None:
    pinned = Numerics(cuts=(2, 3), micro_batches=4, micro_batch_size=2)
    plan = make_plan(atoms(*[1.0] * 8), offers(1.0), PlanRequest(base=pinned, pinned=True))
    assert plan.numerics == pinned
    assert [p.peer for p in plan.placement] == ["peer0"] * 3
    plan = make_plan(atoms(*[1.0] * 8), offers(1.0, 1.0), PlanRequest(base=pinned, pinned=True))
    assert {p.peer for p in plan.placement} == {"peer0", "peer1"}
    assert plan.host(2).peer != plan.host(0).peer  # the heaviest stage does not share


def test_spares_are_named() -> None:
    plan = make_plan(atoms(1, 1), offers(1.0, 5.0, 5.0), PlanRequest(base=BASE, stages=2))
    assert plan.spares == ("peer0",)


def test_a_lost_peers_stage_goes_to_a_spare_then_beside_another() -> None:
    costs, hosts = atoms(1, 1), offers(5.0, 5.0, 1.0)
    plan = make_plan(costs, hosts, PlanRequest(base=BASE, stages=2))
    left, lost = plan.host(0).peer, plan.host(1).peer
    first = rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES)
    assert [(p.peer, p.incarnation) for p in first.placement] == [(left, 1), (left, 2)]  # still sooner than 1.0
    hosts[2] = DeviceOffer(peer="peer2", flops_per_s=5.0, memory_bytes=ROOM)
    second = rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES)
    assert [(p.peer, p.incarnation) for p in second.placement] == [(left, 1), ("peer2", 2)]
    assert second.numerics == plan.numerics and second.number == plan.number + 1
    assert f"{lost} was lost" in second.reasons[-1]


def test_a_lost_stage_goes_to_the_leaders_nominee_if_it_is_free_and_has_room() -> None:
    costs, hosts = atoms(1, 1), offers(5.0, 5.0, 9.0, 2.0)
    plan = make_plan(costs, hosts[:2], PlanRequest(base=BASE, stages=2))
    lost = plan.host(1).peer
    assert rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES).host(1).peer == "peer2"
    assert rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES, ("peer3",)).host(1).peer == "peer3"
    costs, hosts = atoms(1, 1), offers(5.0, 5.0, 9.0, 2.0, 3.0)
    for proposed in (("peer3", "peer4"), ("peer4", "peer3")):  # the first, not the fastest of them
        assert rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES, proposed).host(1).peer == proposed[0]
    busy = (plan.host(0).peer, "gone")  # proposed, but not free or not there
    assert rehost(plan, frozenset({lost}), (1,), costs, hosts, ADAMW_BYTES, busy).host(1).peer == "peer2"


def test_no_room_for_a_lost_stage_is_named() -> None:
    costs, hosts = atoms(1, 1, weight=100), offers(1.0, 1.0, memory=1000)
    plan = make_plan(costs, hosts, PlanRequest(base=BASE))
    with pytest.raises(NoRoomError, match="for stage 1") as refused:
        rehost(plan, frozenset({plan.host(1).peer}), (1,), costs, hosts, ADAMW_BYTES)
    assert (refused.value.stage, refused.value.need_bytes) == (1, stage_bytes(plan, 1, costs, ADAMW_BYTES))


def test_what_each_wanted_volunteer_should_offer() -> None:
    costs, request = atoms(1, 1, 1, 1, weight=100), PlanRequest(base=BASE)
    alone = wanted_bytes(costs, request, 1)
    assert alone == 4 * 100 * 7
    assert wanted_bytes(costs, request, 4) * 4 in range(alone, alone + 4)
    assert wanted_bytes(costs, request, 100) == wanted_bytes(costs, request, 4)  # an atom is not divided


def test_recovery_groups_follow_the_logs() -> None:
    plan = make_plan(atoms(*[1.0] * 8), offers(1.0, 1.0, 1.0, 1.0), PlanRequest(base=BASE, mark_interval=4))
    assert all(p.logged for p in plan.placement)
    chain = [(0, 1), (1, 2), (2, 3)]
    assert recovery_group(plan, [2], chain) == (2,)
    unlogged = tuple(msgspec.structs.replace(p, logged=p.stage != 1) for p in plan.placement)
    plan = msgspec.structs.replace(plan, placement=unlogged)
    assert recovery_group(plan, [2], chain) == (0, 1, 2)
    assert recovery_group(plan, [3], chain) == (3,)
    moved = rehost(
        plan, frozenset({plan.host(2).peer}), (0, 1, 2), atoms(*[1.0] * 8), offers(1.0, 1.0, 1.0, 1.0), ADAMW_BYTES
    )
    assert [p.incarnation for p in moved.placement] == [2, 2, 2, 1]


def test_nothing_is_logged_without_marks_or_above_the_cap() -> None:
    """The cap is the executor's own: a sixteenth of its memory, and 64 MiB at least."""
    marked = PlanRequest(base=BASE, mark_interval=4, stages=2)
    cut = (log_bytes(4 << 30) // (4 * BASE.micro_batches)) - 1  # bytes of a micro-batch that just fit, four steps long
    for request, size, memory, logged in (
        (PlanRequest(base=BASE, stages=2), 1, ROOM, False),
        (marked, cut, 4 << 30, True),
        (marked, cut, 2 << 30, False),
        (marked, (64 << 20) // 32, 1 << 28, True),
    ):
        plan = make_plan(atoms(*[1.0] * 8, cut=size), offers(1.0, 1.0, memory=memory), request)
        assert [p.logged for p in plan.placement] == [logged] * 2


def test_a_stage_that_moves_to_a_smaller_device_keeps_no_log_that_does_not_fit() -> None:
    cut = (log_bytes(4 << 30) // (4 * BASE.micro_batches)) - 1
    model, devices = atoms(*[1.0] * 8, cut=cut), offers(1.0, 1.0, 1.0, memory=4 << 30)
    plan = make_plan(model, devices, PlanRequest(base=BASE, mark_interval=4, stages=2))
    lost = plan.host(1).peer
    for memory, logged in ((4 << 30, True), (2 << 30, False)):
        there = [d if d.peer in (lost, plan.host(0).peer) else replace(d, memory_bytes=memory) for d in devices]
        moved = rehost(plan, frozenset({lost}), (1,), model, there, ADAMW_BYTES)
        assert moved.host(1).peer == plan.spares[0] and moved.host(1).logged is logged


def slow_links(count: int, bytes_per_s: float) -> SwarmLinks:
    names = [f"peer{i}" for i in range(count)]
    return SwarmLinks(
        links=tuple(
            Link(src=a, dst=b, bandwidth_bytes_per_s=bytes_per_s, latency_s=0.01)
            for a in names
            for b in names
            if a != b
        )
    )


def apart(*speeds: float) -> list[DeviceOffer]:
    return [DeviceOffer(peer=f"peer{i}", flops_per_s=s, memory_bytes=ROOM) for i, s in enumerate(speeds)]


def test_a_link_that_costs_more_than_it_brings_is_not_used() -> None:
    costs, hosts = atoms(*[1.0] * 8, cut=10_000), apart(1.0, 1.0)
    assert make_plan(costs, hosts, PlanRequest(base=BASE, links=slow_links(2, 1e9))).numerics.stages == 2
    dense = PlanRequest(base=BASE, links=slow_links(2, 100.0), compression="none")
    plan = make_plan(costs, hosts, dense)
    assert plan.numerics.stages == 1 and len(plan.spares) == 1
    assert make_plan(costs, hosts, replace(dense, every_device=True)).numerics.stages == 2


def test_an_unmeasured_link_is_assumed_and_said() -> None:
    plan = make_plan(atoms(*[1.0] * 8, cut=1000), apart(1.0, 1.0), PlanRequest(base=BASE))
    assert any("2 of 2 links are not measured yet: assumed 10 Mbit/s" in r for r in plan.reasons)


def test_adatopk_compresses_slow_links_only() -> None:
    costs = atoms(*[1.0] * 8, cut=4_000)
    hosts = apart(1.0, 1.0)
    fast = make_plan(costs, hosts, PlanRequest(base=BASE, links=slow_links(2, 1e9), stages=2))
    assert fast.numerics.codecs == ()
    slow = make_plan(costs, hosts, PlanRequest(base=BASE, links=slow_links(2, 2_000.0), stages=2))
    (codec,) = slow.numerics.codecs
    assert (codec.src, codec.dst) == (0, 1) and codec.codec not in ("dense", "int8")
    assert any(r.startswith(f"link 0-1: {codec.codec}") and "dense would take" in r for r in slow.reasons)
    assert f"link 0-1: {codec.codec}" in slow.explain()
    assert list(codec_reasons(slow)) == [(0, 1)] and "dense would take" in codec_reasons(slow)[0, 1]
    pinned = make_plan(costs, hosts, PlanRequest(base=slow.numerics, pinned=True, links=slow_links(2, 1e9)))
    assert pinned.numerics == slow.numerics  # the first entry stands, whatever links there are now


@pytest.mark.parametrize(
    ("compression", "codec"),
    [("none", None), ("int8", "int8"), ("topk:100", "topk:0.01"), ("adatopk-paper", "topk:0.00333333")],
)
def test_compression_can_be_forced(compression: str, codec: str | None) -> None:
    request = PlanRequest(base=BASE, links=slow_links(3, 2_000.0), stages=3, compression=compression)
    plan = make_plan(atoms(*[1.0] * 8, cut=4_000), apart(1.0, 1.0, 1.0), request)
    wanted = () if codec is None else tuple(LinkCodec(k, k + 1, codec) for k in range(2))
    assert plan.numerics.codecs == wanted


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(InputError, match="compression 'zip' is unknown"):
        make_plan(atoms(1, 1), offers(1.0), PlanRequest(base=BASE, compression="zip"))


def test_a_trial_step_that_contradicts_the_record_moves_work() -> None:
    costs, hosts = atoms(*[1.0] * 12), offers(1.0, 1.0)
    request = PlanRequest(base=BASE, every_device=True)
    plan = make_plan(costs, hosts, request)
    assert plan.numerics.cuts == (6,)
    as_promised, other, same = revise(plan, costs, hosts, request, {0: 6.5, 1: 5.0})
    assert other is None and as_promised.placement == plan.placement and as_promised.number == plan.number
    assert {o.peer: o.correction for o in same}[plan.host(0).peer] == pytest.approx(6.5 / 6)
    slow = plan.host(0).peer
    seen, revised, known = revise(plan, costs, hosts, request, {0: 30.0, 1: 6.0})
    assert revised is not None and seen.prediction is not None and revised.prediction is not None
    assert seen.prediction.step_time_s == pytest.approx(4 * 30)
    assert revised.prediction.step_time_s < seen.prediction.step_time_s
    share = {p.peer: p.stage for p in revised.placement}
    assert revised.number == plan.number + 1
    assert revised.numerics.cuts == ((1,) if share[slow] == 0 else (11,))  # 16 + 3 x 11 s; ten on ten take 20 + 3 x 10
    assert any("take 5 times what its record promises" in r for r in revised.reasons)
    assert {o.peer: o.correction for o in known}[slow] == pytest.approx(5.0)


def test_all_slower_alike_moves_nothing_but_the_prediction() -> None:
    costs, hosts = atoms(*[1.0] * 12), offers(1.0, 1.0)
    request = PlanRequest(base=BASE, every_device=True)
    plan = make_plan(costs, hosts, request)
    revised, other, _ = revise(plan, costs, hosts, request, {0: 18.0, 1: 18.0})
    assert other is None and revised.number == plan.number and revised.placement == plan.placement
    assert plan.prediction is not None and revised.prediction is not None
    assert revised.prediction.step_time_s == pytest.approx(3 * plan.prediction.step_time_s, rel=0.01)


def test_trial_steps_of_a_tiny_model_make_no_second_plan() -> None:
    """They take milliseconds, and tell as much of the machine as of the device."""
    costs, hosts = atoms(*[1.0] * 12), offers(2000.0, 2000.0)
    request = PlanRequest(base=BASE, every_device=True)
    plan = make_plan(costs, hosts, request)
    revised, other, known = revise(plan, costs, hosts, request, {0: 0.009, 1: 0.003})
    assert other is None and (revised.number, revised.placement) == (plan.number, plan.placement)
    assert known[0].correction == pytest.approx(3.0, rel=0.01) or known[1].correction == pytest.approx(3.0, rel=0.01)
    assert revise(plan, costs, hosts, request, {0: 18.0, 1: 6.0}).other is not None


def test_plans_are_tried_while_others_promise_more_and_then_the_best_of_them_is_taken() -> None:
    plan = make_plan(atoms(1, 1), offers(1.0, 1.0), PlanRequest(base=BASE))

    def seen(step_s: float) -> Plan:
        return msgspec.structs.replace(plan, prediction=Prediction(step_s, {}, 0.0))

    good, bad, fair, hope = seen(2.0), seen(4.0), seen(2.1), seen(1.0)
    assert next_of([bad], hope) is hope
    assert next_of([bad], None) is None
    assert next_of([good, bad], hope) is hope  # it promises more than the last, which is known to be bad
    assert next_of([good, bad], None) is good
    assert next_of([good, fair], None) is None  # no better by so much that placing again would pay
    assert next_of([fair, bad, good], hope) is None
    assert next_of([good, fair, bad], hope) is good
    assert next_of([good, fair, bad, seen(3.0)], hope) is None  # that was the good one, placed again


def test_two_sites_are_crossed_once() -> None:
    site = {f"peer{i}": i % 2 for i in range(6)}
    known = SwarmLinks(
        links=tuple(
            Link(
                src=a,
                dst=b,
                bandwidth_bytes_per_s=125e6 if site[a] == site[b] else 2.5e6,
                latency_s=1e-3 if site[a] == site[b] else 20e-3,
            )
            for a in site
            for b in site
            if a != b
        ),
        fences=(("peer0", "peer2", "peer4"), ("peer1", "peer3", "peer5")),
    )
    hosts = [DeviceOffer(peer=p, flops_per_s=1.0, memory_bytes=ROOM) for p in site]
    costs = atoms(*[1.0] * 24, cut=1 << 20)
    plan = make_plan(costs, hosts, PlanRequest(base=BASE, links=known))
    order = [site[p.peer] for p in plan.placement]
    assert plan.numerics.stages == 6 and sum(a != b for a, b in itertools.pairwise(order)) == 1
    assert any(r.startswith("2 fences of 2 are crossed in 1 hops") for r in plan.reasons)
    three = make_plan(costs, hosts, PlanRequest(base=BASE, links=known, stages=3))
    assert len({site[p.peer] for p in three.placement}) == 1  # three of one site rather than the first three


def test_stages_go_to_devices_of_the_runs_class_only() -> None:
    mixed = [replace(o, device=d) for o, d in zip(offers(9.0, 1.0, 2.0), ("cuda:0", "cpu", "cuda:1"), strict=True)]
    on_cuda = msgspec.structs.replace(BASE, device_class="cuda")
    plan = make_plan(atoms(*[1.0] * 6), mixed, PlanRequest(base=on_cuda, every_device=True))
    assert {p.device for p in plan.placement} == {"cuda:0", "cuda:1"} and plan.numerics.device_class == "cuda"
    with pytest.raises(InputError, match="no volunteer has"):  # the CPU is no refuge
        rehost(plan, frozenset({"peer0", "peer2"}), (), atoms(*[1.0] * 6), mixed, ADAMW_BYTES)
    only_cpu = make_plan(atoms(*[1.0] * 6), mixed, PlanRequest(base=BASE))
    assert {p.device for p in only_cpu.placement} == {"cpu"}
    with pytest.raises(InputError, match=r"computes on cpu, the volunteers offer cuda.*numerics\.device_class"):
        make_plan(atoms(1.0), mixed[:1], PlanRequest(base=BASE))


def test_an_automatic_class_is_the_one_that_is_faster_in_sum() -> None:
    mixed = [replace(o, device=d) for o, d in zip(offers(3.0, 2.0, 2.0), ("cuda:0", "cpu", "cpu"), strict=True)]
    request = PlanRequest(base=msgspec.structs.replace(BASE, device_class="auto"))
    assert make_plan(atoms(*[1.0] * 6), mixed, request).numerics.device_class == "cpu"
    assert make_plan(atoms(*[1.0] * 6), mixed[:2], request).numerics.device_class == "cuda"


def far_apart(*rates: tuple[int, int, float]) -> SwarmLinks:
    """Links both ways between peers of different machines, bytes per second."""
    both = [(a, b, r) for a, b, r in rates] + [(b, a, r) for a, b, r in rates]
    return SwarmLinks(
        links=tuple(Link(src=f"peer{a}", dst=f"peer{b}", bandwidth_bytes_per_s=r, latency_s=0.001) for a, b, r in both)
    )


def test_the_planner_names_buddies_by_link_and_marks_no_oftener_than_sets_can_be_sent() -> None:
    peers = [replace(o, machine="") for o in offers(1e9, 1e9, 1e8, 1e8)]
    links = far_apart((0, 1, 1e9), (0, 2, 1e6), (0, 3, 1e8), (1, 2, 1e8), (1, 3, 1e6), (2, 3, 1e6))
    model = atoms(*[1e9] * 8, weight=4_000_000, cut=1000)
    request = PlanRequest(base=BASE, stages=2, links=links, mark_interval=1)
    plan = make_plan(model, peers, request)
    hosts = {p.peer for p in plan.placement}
    assert hosts == {"peer0", "peer1"}
    # peer0 reaches peer1 ten times faster than spare peer3; peer1 likewise peer0
    assert {p.peer: p.buddies for p in plan.placement} == {"peer0": ("peer1",), "peer1": ("peer0",)}
    little = [replace(o, disk_bytes=1e6) if o.peer == "peer1" else o for o in peers]
    assert make_plan(model, little, request).host(0).buddies == ("peer3",)  # what peer1 gives does not hold three sets
    slow = make_plan(model, peers, replace(request, links=far_apart((0, 1, 1e5), (0, 2, 1e4), (1, 2, 1e4))))
    assert plan.mark_interval == 1
    assert slow.mark_interval > 1
    none = make_plan(model, peers, replace(request, mark_interval=0))
    assert none.mark_interval == 0 and not any(p.logged for p in none.placement)
    here = make_plan(model, offers(1e9, 1e9, 1e8), PlanRequest(base=BASE, stages=2, mark_interval=7))
    assert here.mark_interval == 7 and all(p.buddies == () for p in here.placement)


def test_the_rules_that_ours_is_measured_against_use_every_device_and_are_functions_of_their_seed() -> None:
    costs, hosts = atoms(*[1.0] * 12, cut=1 << 10), offers(1.0, 1.0, 2.0)
    made = {}
    for planner in ("equal-compute:1", "equal-compute:1", "equal-compute:2", "published:0", "equal-layers"):
        plan = make_plan(costs, hosts, PlanRequest(base=BASE, planner=planner, compression="topk:100"))
        assert {p.peer for p in plan.placement} == {o.peer for o in hosts}, planner
        assert all(c.codec == "topk:0.01" for c in plan.numerics.codecs) and len(plan.numerics.codecs) == 2
        assert made.setdefault(planner, plan.placement) == plan.placement
    bounds = (0, *plan.numerics.cuts, 12)
    assert [b - a for a, b in itertools.pairwise(bounds)] == [4, 4, 4], "equal layers whatever the speed"
    published = make_plan(costs, hosts, PlanRequest(base=BASE, planner="published:3"))
    ends = (0, *published.numerics.cuts, 12)
    share = {p.peer: ends[p.stage + 1] - ends[p.stage] for p in published.placement}
    assert share == {"peer0": 3, "peer1": 3, "peer2": 6}, "in proportion to speed"
    for unknown in ("random", "published:x", "opfence:1", "equal-compute:-1"):
        with pytest.raises(InputError, match="use opfence, or equal-layers:SEED"):
            make_plan(costs, hosts, PlanRequest(base=BASE, planner=unknown))


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_what_a_stage_takes_beyond_the_others_goes_with_its_pieces_unless_it_is_far_off(slow: float) -> None:
    """Three alike devices, of which one may be slower than its record says; the model's first third is heavier."""
    chain = atoms(*[1e9] * 9)
    shape = AtomTimes(forward_s=np.full(9, 1.0), backward_s=np.full(9, 2.0))
    devices = [replace(o, shape=shape) for o in offers(1e9, 1e9, 1e9)]
    request = PlanRequest(base=msgspec.structs.replace(BASE, cuts=(3, 6)), pinned=True)
    plan = make_plan(chain, devices, request)
    measured = {0: 2 * 3.9, 1: 2 * 3.0, 2: 2 * 3.0 * slow}
    found = revise(plan, chain, devices, request, measured).offers
    now = proposal_of(plan, chain, found, request, alone=True)
    assert now.score.stage_s == pytest.approx(tuple(measured.values()))
    by_peer = {o.peer: o.correction for o in found}
    first, second, third = (by_peer[p.peer] for p in plan.placement)
    assert first == pytest.approx(second)
    assert third / second == pytest.approx(1.0 if slow == 1.0 else 8.0 / 2.6), "its own pieces count as the median's"
    plain = [replace(o, shape=None) for o in devices]  # nothing is known of its pieces: the device it is
    by_device = {o.peer: o.correction for o in revise(plan, chain, plain, request, measured).offers}
    assert [by_device[p.peer] for p in plan.placement] == pytest.approx([2.6, 2.0, 2.0 * slow])


def test_codecs_take_as_much_longer_as_the_model_does_on_the_devices() -> None:
    """Timed on the trainer's CPU, where the model takes 6 s; on the devices it takes 60 s, as their trial steps say."""
    chain = atoms(3e9, 3e9, cut=4_000_000)
    coder = Rung("int8", 0.25, 1e-7, 1e-7, 0.001)
    shape = AtomTimes(forward_s=np.full(2, 1.0), backward_s=np.full(2, 2.0))
    for in_use, codec_s in ((False, 2.0), (True, 0.2)):
        request = PlanRequest(
            base=msgspec.structs.replace(BASE, cuts=(1,), codecs=(LinkCodec(0, 1, "int8"),)),
            pinned=True,
            ladder=Ladder((DENSE, coder), in_use=in_use),
            shape=shape,
        )
        devices = [replace(o, correction=10.0) for o in offers(1e9, 1e9)]
        plan = make_plan(chain, devices, request)
        stages = proposal_of(plan, chain, devices, request, alone=True).score.stage_s
        assert stages == pytest.approx([30 + codec_s, 30 + codec_s])


@pytest.mark.parametrize(("codec", "sent"), [("int8", 1e6), ("dense", 4e6)])
def test_stages_pay_for_the_bytes_they_carry(codec: str, sent: float) -> None:
    """Each end sends as much as it gets; these devices are ten times slower than where a byte's cost was measured."""
    chain, devices = atoms(3e9, 3e9, cut=4_000_000), [replace(o, correction=10.0) for o in offers(1e9, 1e9)]
    codecs = (LinkCodec(0, 1, "int8"),) if codec == "int8" else ()
    request = PlanRequest(
        base=msgspec.structs.replace(BASE, cuts=(1,), codecs=codecs),
        pinned=True,
        ladder=Ladder((DENSE, Rung("int8", 0.25))),
        shape=AtomTimes(forward_s=np.full(2, 1.0), backward_s=np.full(2, 2.0)),
    )
    plan = make_plan(chain, devices, request)
    carried_s = 2 * sent * 10 * CARRY_S_PER_BYTE
    assert proposal_of(plan, chain, devices, request).score.stage_s == pytest.approx([30 + carried_s] * 2)
    assert proposal_of(plan, chain, devices, request, alone=True).score.stage_s == pytest.approx([30, 30])
    assert plan.prediction is not None
    assert plan.prediction.parts["coding and carrying"] == pytest.approx(2 * carried_s)
    measured = {0: 60.0, 1: 60.0}  # by trial steps, whose frames nobody carries
    seen = revise(plan, chain, devices, request, measured)
    assert [o.correction for o in seen.offers] == pytest.approx([20.0, 20.0])
    graphics = replace(request, base=msgspec.structs.replace(request.base, device_class="cuda"))
    plan = make_plan(chain, [replace(o, device="cuda:0") for o in devices], graphics)
    assert plan.prediction is not None and "coding and carrying" not in plan.prediction.parts

"""Placement: proportional, within memory, refused with figures; checked against brute force."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics
from fusion_p2p.workload import Atom
from peer.placement import DeviceOffer, PlanRequest, make_plan, recovery_group, rehost

BASE = Numerics(cuts=(), micro_batches=4, micro_batch_size=2)
ROOM = 1 << 40


def atoms(*flops: float, weight: int = 0) -> list[Atom]:
    return [
        Atom(
            nodes=(),
            weights=(),
            owned=(),
            parameters=0,
            weight_bytes=weight,
            forward_flops=f / 3,
            backward_flops=f * 2 / 3,
            forward_bytes=0,
            stash_bytes=0,
            kernels=1,
            cut_bytes=0,
            cut_weight_bytes=0,
        )
        for f in flops
    ]


def offers(*speeds: float, memory: int = ROOM) -> list[DeviceOffer]:
    return [DeviceOffer(peer=f"peer{i}", flops_per_s=s, memory_bytes=memory) for i, s in enumerate(speeds)]


def slowest(costs: list[Atom], speeds: tuple[float, ...], cuts: tuple[int, ...]) -> float:
    bounds = (0, *cuts, len(costs))
    work = [a.forward_flops + a.backward_flops for a in costs]
    return max(sum(work[bounds[k] : bounds[k + 1]]) / s for k, s in enumerate(speeds))


def test_work_follows_speed() -> None:
    plan = make_plan(atoms(*[1.0] * 12), offers(1.0, 3.0), PlanRequest(base=BASE))
    assert plan.numerics.cuts == (3,)
    assert [p.peer for p in plan.placement] == ["peer0", "peer1"]
    assert [p.window for p in plan.placement] == [3, 2]
    assert "stage 1" in plan.explain()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_equals_brute_force(flops: list[int], speeds: list[int]) -> None:
    costs = atoms(*map(float, flops))
    plan = make_plan(costs, offers(*map(float, speeds)), PlanRequest(base=BASE))
    used = tuple(float(s) for s in speeds)
    best = min(slowest(costs, used, c) for c in itertools.combinations(range(1, len(flops)), len(speeds) - 1))
    assert slowest(costs, used, plan.numerics.cuts) == pytest.approx(best)


def test_memory_moves_the_cut() -> None:
    costs = atoms(1, 1, 1, 1, weight=100)
    hosts = [
        DeviceOffer(peer="small", flops_per_s=9.0, memory_bytes=750),
        DeviceOffer(peer="large", flops_per_s=1.0, memory_bytes=2200),
    ]
    plan = make_plan(costs, hosts, PlanRequest(base=BASE))
    assert plan.numerics.cuts == (1,)


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
    assert [p.peer for p in plan.placement] == ["peer0", "peer0", "peer1", "peer1"]


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
    first = rehost(plan, frozenset({"peer1"}), (1,), costs, hosts, 7.0)
    assert [(p.peer, p.incarnation) for p in first.placement] == [("peer0", 1), ("peer0", 2)]  # still sooner than 1.0
    hosts[2] = DeviceOffer(peer="peer2", flops_per_s=5.0, memory_bytes=ROOM)
    second = rehost(plan, frozenset({"peer1"}), (1,), costs, hosts, 7.0)
    assert [(p.peer, p.incarnation) for p in second.placement] == [("peer0", 1), ("peer2", 2)]
    assert second.numerics == plan.numerics and second.number == plan.number + 1
    assert "peer1 was lost" in second.reasons[-1]


def test_no_room_for_a_lost_stage_is_named() -> None:
    costs, hosts = atoms(1, 1, weight=100), offers(1.0, 1.0, memory=1000)
    plan = make_plan(costs, hosts, PlanRequest(base=BASE))
    with pytest.raises(InputError, match="for stage 1"):
        rehost(plan, frozenset({"peer1"}), (1,), costs, hosts, 7.0)


def test_recovery_groups_follow_the_logs() -> None:
    plan = make_plan(atoms(*[1.0] * 8), offers(1.0, 1.0, 1.0, 1.0), PlanRequest(base=BASE, mark_interval=4))
    assert all(p.logged for p in plan.placement)
    chain = [(0, 1), (1, 2), (2, 3)]
    assert recovery_group(plan, [2], chain) == (2,)
    unlogged = tuple(msgspec.structs.replace(p, logged=p.stage != 1) for p in plan.placement)
    plan = msgspec.structs.replace(plan, placement=unlogged)
    assert recovery_group(plan, [2], chain) == (0, 1, 2)
    assert recovery_group(plan, [3], chain) == (3,)
    moved = rehost(plan, frozenset({"peer2"}), (0, 1, 2), atoms(*[1.0] * 8), offers(1.0, 1.0, 1.0, 1.0), 7.0)
    assert [p.incarnation for p in moved.placement] == [2, 2, 2, 1]


def test_nothing_is_logged_without_marks_or_above_the_cap() -> None:
    for request in (PlanRequest(base=BASE), PlanRequest(base=BASE, mark_interval=4, log_bytes=3)):
        plan = make_plan(atoms(*[1.0] * 8), offers(1.0, 1.0), request)
        assert not any(p.logged for p in plan.placement)

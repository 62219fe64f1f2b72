"""Fences elected by the real state machines in a simulated world: loss, delay, skew, noise, deaths, partitions."""

from __future__ import annotations

import random

import pytest

from tests.sim.fence_world import ROUND_S, TTL_S, Faults, Site, World, adjusted_rand_index, make_sites

FAULTS = Faults(loss=0.02, delay_s=2.0, skew_s=1.5, noise=0.1)
LEASE_ROUNDS = int(TTL_S / ROUND_S) + 2


def elected(seed: int, *, sites: int = 5, peers: int = 70) -> World:
    world = World(make_sites(sites, peers, random.Random(seed)), seed, FAULTS)
    world.run(8)
    assert world.rand_index() >= 0.9
    return world


def rounds_until_one_leader_each(world: World) -> int:
    for n in range(1, 20):
        world.step()
        if world.one_leader_each():
            return n
    return 99


@pytest.mark.parametrize("seed", [1, 2])
def test_fences_match_the_sites_within_six_rounds(seed: int) -> None:
    world = World(make_sites(6, 90, random.Random(seed)), seed, FAULTS)
    world.run(6)
    assert world.rand_index() >= 0.9
    assert world.one_leader_each()
    heads = world.index(world.now)
    assert {h.leader for h in heads.values()} >= {p.name for p in world.living() if p.machine.leading}


def test_noise_moves_nobody() -> None:
    world = elected(3)
    world.run(6)
    world.faults.noise = 0.3
    before = {p.name: p.machine.fence for p in world.living()}
    world.run(30)
    assert {p.name: p.machine.fence for p in world.living()} == before


def test_a_dead_leader_is_replaced_within_its_lease_and_two_rounds() -> None:
    world = elected(4)
    fence, members = max(world.fences().items(), key=lambda item: len(item[1]))
    (leader,) = world.leaders(fence)
    term = leader.machine.term
    world.kill(leader)
    assert rounds_until_one_leader_each(world) <= LEASE_ROUNDS
    (new,) = world.leaders(fence)
    assert new in members
    assert new.machine.term > term


def test_a_partition_heals_to_one_leader_each() -> None:
    world = elected(5)
    fences = set(world.fences())
    side = {p.name: n % 2 for n, p in enumerate(world.living())}
    world.partition(lambda peer: side[peer.name])
    world.run(8)
    sides = {(p.machine.fence, p.side) for p in world.living() if p.machine.leading}
    assert len(sides) > len(fences)  # both halves have leaders: two at once, who only nominate
    world.heal()
    assert rounds_until_one_leader_each(world) <= LEASE_ROUNDS
    assert world.rand_index() >= 0.9


def test_a_dead_host_gets_a_nominee_of_its_own_fence() -> None:
    from dht.records import Work

    world = elected(6)
    world.run(4)
    fence, members = max(world.fences().items(), key=lambda item: len(item[1]))
    host = next(p for p in members if not p.machine.leading)
    host.work = (Work("ab" * 16, 2),)
    world.run(6)
    world.kill(host)
    for _ in range(12):
        world.step()
        (leader,) = world.leaders(fence)
        assert leader.stand is not None
        assert leader.stand.record is not None
        if leader.stand.record.nominees:
            break
    (nominee,) = leader.stand.record.nominees
    assert (nominee.dead, nominee.stage) == (host.name, 2)
    assert nominee.spare in {p.name for p in members}


def test_latency_alike_but_bandwidth_not_makes_two_fences() -> None:
    mbit = 1e6 / 8
    places = [(0.0, 0.0), (300.0, 0.0)]
    sites = [Site(8, *place, 1e-3, 1000 * mbit, 8 * mbit) for place in places]
    world = World(sites, 7, FAULTS)
    near = {name: p for name, p in world.peers.items()}
    world.rtt_s = lambda a, b: 1e-3  # type: ignore[method-assign]
    world.run(6)
    assert len(world.fences()) == 1  # by latency there is but one
    world.run(45)
    assert adjusted_rand_index([(p.machine.fence, p.site) for p in near.values()]) >= 0.9


def test_peers_that_come_and_go_leave_tables_flat() -> None:
    world, rng = elected(8, peers=40), random.Random(8)
    sizes = []
    for _ in range(6):
        for _ in range(3):
            world.kill(rng.choice(world.living()))
            world.add(rng.randrange(5))
            world.run(4)
        tables = sum(len(p.machine.sights.table) + len(p.machine._members) for p in world.living())
        sizes.append((tables, sum(map(len, world.board.values()))))
    assert max(s[0] for s in sizes[-2:]) <= 1.3 * max(s[0] for s in sizes[:3])
    assert max(s[1] for s in sizes[-2:]) <= 1.3 * max(s[1] for s in sizes[:3])


def test_the_rand_index_is_right() -> None:
    assert adjusted_rand_index([(1, 1), (1, 1), (2, 2), (2, 2)]) == 1.0
    assert adjusted_rand_index([(1, 1), (1, 2), (2, 1), (2, 2)]) == pytest.approx(-0.5)

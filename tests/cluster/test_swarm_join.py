"""Peers that start at once, swarms that met apart, addresses that are all dead: one swarm comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path

import pytest
import uvloop

from dht import p2p
from dht.errors import SwarmUnreachable
from dht.identity import Identity, load_or_create
from peer.joining import FIRST_S, MOST_S, delay_s, join_patiently
from tests.cluster.eventually import WITHIN_S
from tests.cluster.swarm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
DEAD = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}" for port in (9, 10)]


def free_ports(count: int) -> list[int]:
    """From below those that the kernel gives to others, who would have them before they are used."""
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] * (port not in ports)
    return ports


async def four_at_once(folder: Path) -> float:
    """Two of them are the bootstraps, which nobody has started before."""
    cluster, ports = Cluster(), free_ports(2)
    names = [load_or_create(folder / str(i) / "identity").peer_id for i in range(2)]
    boot = tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port, peer in zip(ports, names, strict=True))
    try:
        await asyncio.gather(*(cluster.join(folder / str(i), boot, port=ports[i] if i < 2 else 0) for i in range(4)))
        return await cluster.until_one()
    finally:
        await cluster.close()


@pytest.mark.parametrize("attempt", range(3))
def test_four_peers_started_at_once_on_two_bootstraps_find_one_swarm(tmp_path: Path, attempt: int) -> None:
    uvloop.run(four_at_once(tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_they_do_twenty_times_of_twenty(tmp_path: Path) -> None:
    for i in range(20):
        uvloop.run(four_at_once(tmp_path / str(i)))


def test_two_swarms_that_met_apart_merge(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            halves = []
            for half in range(2):
                first = await cluster.join(tmp_path / f"{half}a", ())
                await cluster.join(tmp_path / f"{half}b", tuple(first.addresses))
                halves.append(first.addresses[0])
            await cluster.join(tmp_path / "between", tuple(halves))
            await cluster.until_one()
        finally:
            await cluster.close()

    uvloop.run(main())


def test_when_all_addresses_are_dead_it_names_each_and_keeps_trying_until_one_lives(tmp_path: Path) -> None:
    async def main() -> None:
        (port,) = free_ports(1)
        late = load_or_create(tmp_path / "late").peer_id
        addresses = (*DEAD, f"/ip4/127.0.0.1/tcp/{port}/p2p/{late}")
        one = await p2p.start(tmp_path / "one", host_addresses=p2p.LOOPBACK, bootstrap=addresses, join=False)
        said: list[str] = []
        joining = asyncio.create_task(join_patiently(one, give_up_s=0.0, say=said.append))
        while len(said) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert all(a in said[0] for a in addresses) and "trying again in" in said[0]
        two = await p2p.start(tmp_path / "late", host_addresses=(f"/ip4/127.0.0.1/tcp/{port}",), bootstrap=())
        async with asyncio.timeout(WITHIN_S):
            assert await joining
        assert late in await one.connected()
        with pytest.raises(SwarmUnreachable):
            three = await p2p.start(tmp_path / "three", host_addresses=(), bootstrap=tuple(DEAD), join=False)
            try:
                await join_patiently(three, give_up_s=0.1, say=said.append)
            finally:
                await three.close()
        await one.close()
        await two.close()

    uvloop.run(main())


def test_the_pauses_grow_to_a_minute() -> None:
    pauses = [delay_s(n, 0.5) for n in range(20)]
    assert pauses[0] == FIRST_S and pauses == sorted(pauses) and pauses[-1] == MOST_S
    assert delay_s(3, 0.0) < delay_s(3, 1.0)

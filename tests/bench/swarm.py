"""The swarm: fences elected, control traffic, a real cluster.

Simulated peers are the real state machines over a simulated board and links (tests/sim/fence_world.py); traffic uses
hivemind's own search and messages with sealed records (tests/sim/dht_traffic.py).
"""

from __future__ import annotations

import asyncio
import collections
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.bench.rows import Row, arguments, at_least, at_most, progress, report
from tests.sim.dht_traffic import Tally, search_cost
from tests.sim.fence_world import NEW_ROUND_S, ROUND_S, Faults, Site, World, make_sites

FAULTS = Faults(loss=0.02, delay_s=2.0, skew_s=1.5, noise=0.1)


def formation(quick: bool) -> tuple[list[Row], World]:
    peers, sites = (300, 12) if quick else (1000, 12)
    world = World(make_sites(sites, peers, random.Random(1)), 1, FAULTS)
    reached = math.inf
    for n in range(1, 7):
        world.step()
        if world.rand_index() >= 0.9 and world.one_leader_each() and reached == math.inf:
            reached = n
    name = f"{peers} peers, {sites} sites, from nothing"
    rows = [
        at_least(f"{name}: adjusted Rand index after 6 rounds", world.rand_index(), 0.9),
        at_most(f"{name}: rounds until then, one leader each", reached, 6),
        Row(f"{name}: fences, most leaders of one", f"{len(world.fences())}, {_most_leaders(world)}", "= 12, 1",
            len(world.fences()) == sites and _most_leaders(world) == 1),
    ]  # fmt: skip
    return rows, world


def _most_leaders(world: World) -> int:
    return max(len(world.leaders(fence)) for fence in world.fences())


def noise(world: World, quick: bool) -> list[Row]:
    world.run(6)
    world.faults.noise = 0.3
    for peer in world.peers.values():
        peer.changes = 0
    rounds = 20 if quick else 100
    world.run(rounds)
    changed = sum(p.changes for p in world.peers.values())
    world.faults.noise = 0.1
    return [at_most(f"noise of +-30 % for {rounds} rounds: changes of fence", changed, 0)]


def traffic(quick: bool, world: World) -> list[Row]:
    """Of settled swarms of several sizes. In full, results/swarm_traffic.json and .svg are made anew."""
    sizes = ((300, 4), (1000, 12)) if quick else ((300, 4), (1000, 12), (3000, 36), (10_000, 120))
    rows, figures = [], []
    for peers, sites in sizes:
        if peers != len(world.peers):
            world = grown(make_sites(sites, peers, random.Random(2)), 2)
            world.run(8)
        found = traffic_of(world, rounds=8 if peers < 3000 else 4)
        figures.append(found)
        parts, total = found.parts, found.bytes_per_s
        detail = ", ".join(f"{k} {v:.0f}" for k, v in sorted(parts.items(), key=lambda kv: -kv[1])[:5])
        case = f"control traffic at {peers} peers, sent and received ({detail})"
        if peers <= 1000:
            rows.append(at_most(case, total / 1e3, 5.0, " KB/s a peer"))
        else:
            rows.append(Row(case, f"{total / 1e3:.4g} KB/s a peer", "reported", None))
        progress(f"{case}: {total / 1e3:.4g} KB/s")
    base = figures[0] if quick else figures[1]
    for last in figures[figures.index(base) + 1 :]:
        growth = last.bytes_per_s / base.bytes_per_s / (math.log(last.peers) / math.log(base.peers))
        rows.append(at_most(f"growth from {base.peers} to {last.peers} peers, over the logarithm's", growth, 1.0))
    if not quick:
        _save(figures)
    return rows


def grown(sites: list[Site], seed: int, rounds: int = 10) -> World:
    """A world whose sites fill up over `rounds`, as swarms grow; all at once, thousands of fences would be founded, and
    merged again, before what is measured here begins."""
    world = World([replace(s, size=s.size // rounds) for s in sites], seed)
    for k in range(1, rounds):
        world.step()
        for number, site in enumerate(sites):
            for _ in range(site.size * (k + 1) // rounds - site.size * k // rounds):
                world.add(number)
    return world


@dataclass(frozen=True)
class Traffic:
    """`parts`: bytes per second a peer, sent and received, by what they are for."""

    peers: int
    fences: int
    bytes_per_s: float
    parts: dict[str, float]


def traffic_of(world: World, rounds: int) -> Traffic:
    """Of the next `rounds`."""
    counts: collections.Counter[str] = collections.Counter()
    world.watch = lambda kind, count: counts.update({kind: int(count)})
    world.run(rounds)
    world.watch = lambda kind, count: None
    peers, fences, seconds = len(world.peers), len(world.fences()), rounds * ROUND_S
    found = Tally(counts).bytes(search_cost(peers), peers / max(1, fences), seconds, peers)
    parts = {kind: round(2 * total / seconds / peers, 1) for kind, total in found.items()}
    return Traffic(peers, fences, round(sum(parts.values()), 1), parts)


def _save(figures: list[Traffic]) -> None:
    """The figures as JSON and as an SVG: traffic against log(peers), beside what would grow as the logarithm does."""
    folder = Path(__file__).parent / "results"
    (folder / "swarm_traffic.json").write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
    sizes, rates = [f.peers for f in figures], [f.bytes_per_s for f in figures]
    base = sizes.index(1000)
    bound = [rates[base] * math.log(n) / math.log(sizes[base]) for n in sizes]
    low, high, top = math.log10(sizes[0]), math.log10(sizes[-1]), max(*rates, *bound) * 1.4

    def dots(values: list[float]) -> list[tuple[float, float]]:
        return [
            (60 + 480 * (math.log10(n) - low) / (high - low), 280 - 240 * v / top)
            for n, v in zip(sizes, values, strict=True)
        ]

    def line(values: list[float], dashes: str) -> str:
        points = " ".join(f"{x:.0f},{y:.0f}" for x, y in dots(values))
        return f'<polyline points="{points}" fill="none" stroke="black" stroke-dasharray="{dashes}"/>'

    label = '<text x="{:.0f}" y="{:.0f}" text-anchor="middle">{}</text>'
    texts = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4"/>'
        + label.format(x, y + 20, f"{v / 1e3:.2f} KB/s")
        + label.format(x, 298, f"{n} peers")
        for (x, y), n, v in zip(dots(rates), sizes, rates, strict=True)
    )
    (folder / "swarm_traffic.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 320" font-family="sans-serif" font-size="12">'
        f'<rect width="600" height="320" fill="white"/>{line(rates, "none")}{line(bound, "2 5")}{texts}'
        '<text x="300" y="16" text-anchor="middle">control traffic a peer, sent and received, against the number of '
        "peers (log); dashed: the logarithm's growth</text></svg>\n"
    )


def deaths(quick: bool) -> list[Row]:
    bound = 45 + 2 * ROUND_S
    killed, healed = [], []
    for seed in range(3 if quick else 10):
        world = World(make_sites(6, 120, random.Random(seed)), seed, FAULTS)
        world.run(10)
        fence = max(world.fences().items(), key=lambda item: len(item[1]))[0]
        world.kill(world.leaders(fence)[0])
        killed.append(_until_one_leader(world, fence))
        world.run(2)
        world.partition(lambda peer, rng=world.rng: rng.randrange(2))  # type: ignore[misc]
        world.run(8)
        world.heal()
        healed.append(_until_one_leader(world, ""))
    return [
        at_most(f"the leader dies, {len(killed)} worlds: worst time to one leader", max(killed), bound, " s"),
        at_most(f"a partition heals, {len(healed)} worlds: worst time to one leader each", max(healed), bound, " s"),
    ]


def _until_one_leader(world: World, fence: str) -> float:
    start = world.now
    while world.now - start < 300:
        world.step(NEW_ROUND_S)
        if world.one_leader_each() and (not fence or not world.fences().get(fence) or len(world.leaders(fence)) == 1):
            break
    return world.now - start


def day(quick: bool) -> list[Row]:
    """24 hours, with peers that come and go."""
    world = World(make_sites(4, 40, random.Random(5)), 5, FAULTS)
    rng, sizes = random.Random(6), []
    hours = 2 if quick else 24
    world.run(20)
    for _ in range(hours):
        for _ in range(4):  # one comes and one goes four times an hour
            world.kill(rng.choice(world.living()))
            world.add(rng.randrange(4))
            world.run(60)
        sizes.append((_table_entries(world), sum(map(len, world.board.values()))))
        for name in [p.name for p in world.peers.values() if not p.alive][:-40]:
            del world.peers[name]
    third = max(1, len(sizes) // 3)
    rows = []
    for i, what in enumerate(("entries of the peers' tables", "records on the board")):
        early, late = max(s[i] for s in sizes[:third]), max(s[i] for s in sizes[-third:])
        rows.append(at_most(f"{hours} h simulated, {what}: last third over first", late / early, 1.1))
    rows.append(
        Row(
            f"{hours} h simulated: one leader each at the end",
            str(_most_leaders(world)),
            "= 1",
            _most_leaders(world) == 1,
        )
    )
    return rows


def _table_entries(world: World) -> int:
    total = 0
    for p in world.living():
        m = p.machine
        total += len(m.sights.table) + len(m.sights.hints) + len(m._members) + len(m._links) + len(m._heads)
    return total


def wire() -> list[Row]:
    """What the model of the traffic takes for a call and a ping, held against an interface's own counters."""
    from tests.netlab.network import unavailable
    from tests.netlab.wire_peer import measure
    from tests.sim.dht_traffic import PING_BYTES, find_bytes

    if why := unavailable():
        return [Row("bytes of a call and of a ping at an interface", why, "not measured", None)]
    found = measure()
    return [
        at_most("bytes of a call of the board at an interface", found["call"], find_bytes(0, neighbours=1), " bytes"),
        at_most("bytes of a ping at an interface", found["ping"], PING_BYTES, " bytes"),
    ]


async def cluster() -> list[Row]:
    """20 real peers on loopback."""
    from tests.cluster.swarm_cluster import Cluster

    with tempfile.TemporaryDirectory() as folder:
        async with Cluster.start(Path(folder), 20) as swarm:
            slowest = max(swarm.seen_s)
            victims = swarm.names[3:9]
            await swarm.kill(victims)
            times, missing = await swarm.read_all(rounds=3)
    ordered = sorted(times)
    return [
        at_most("20 real peers: from node ready to seen by all, slowest", slowest, 5.0, " s"),
        at_most("6 of 20 killed at once: records of the living not readable", missing, 0),
        at_most("6 of 20 killed at once: p99 of a read", ordered[int(0.99 * (len(ordered) - 1))], 2.0, " s"),
    ]


def main(args: list[str]) -> int:
    options = arguments(__doc__ or "", "fewer peers, seeds and hours").parse_args(args)
    quick = options.quick
    rows, world = formation(quick)
    rows += noise(world, quick) + traffic(quick, world) + deaths(quick) + day(quick)
    rows += wire() + asyncio.run(cluster())
    return report(rows, options.json)


if __name__ == "__main__":
    start = time.perf_counter()
    code = main(sys.argv[1:])
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    sys.exit(code)

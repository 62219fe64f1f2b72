"""A lab without root: from a testbed to addresses, shares, and the commands that build it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.planner import load_testbed
from peer.lab import bed as b
from peer.lab import measure
from peer.lab.netns import is_orphan, prefix
from peer.lab.quota import DutyCycle, pinned

FILE = Path("examples/testbeds/lab.json")


def test_every_testbed_is_a_bed_of_the_planners_network() -> None:
    for name, peers, sites in (("N1", 6, 3), ("N2", 8, 5), ("N3", 4, 1), ("N4", 6, 6)):
        bed = b.load_bed(FILE, name)
        assert (len(bed.peers), len(bed.sites)) == (peers, sites)
        assert [p.name for p in bed.peers] == [d.peer for d in load_testbed(FILE, name).devices]
        assert sum(p.cores for p in bed.peers) == pytest.approx(1.2)
        assert len({p.address for p in bed.peers}) == peers


def test_rates_are_those_of_the_file_times_the_scale() -> None:
    bed = b.load_bed(FILE, "N1", rate_scale=0.1)
    found = {(bed.sites[x.src], bed.sites[x.dst]): x.bits_per_s / 1e6 for x in bed.links}
    assert found == pytest.approx(
        {("A", "A"): 100, ("B", "B"): 100, ("C", "C"): 100, ("A", "B"): 10, ("B", "A"): 10,
         ("B", "C"): 2, ("C", "B"): 2, ("A", "C"): 0.8, ("C", "A"): 0.8}
    )  # fmt: skip
    i, j = 0, 4
    assert bed.network.bandwidth_bytes_per_s[i, j] * 8 == pytest.approx(0.8e6), "the planner sees the scaled rates"


def test_speeds_share_the_cores() -> None:
    cores = {p.name: p.cores for p in b.load_bed(FILE, "N3").peers}
    assert cores == pytest.approx({"A0": 0.4, "A1": 0.4, "A2": 0.2, "A3": 0.2})


def test_homes_send_less_than_they_receive() -> None:
    bed = b.load_bed(FILE, "N2")
    h0, s = bed.sites.index("H0"), bed.sites.index("S")
    assert (bed.link(h0, s).bits_per_s, bed.link(s, h0).bits_per_s) == pytest.approx((8e6, 40e6))


def _tc(made: list[b.Command], space: str, device: str) -> list[b.Command]:
    return [c for c in made if c[:3] == ("tc", "-n", space) and device in c]


def test_each_direction_of_a_pair_of_sites_has_a_queue_with_small_packets_first() -> None:
    bed = b.load_bed(FILE, "N1", rate_scale=0.1)
    made = b.commands(bed, "x-")
    shaped = _tc(made, "x-site-0", "wan")
    parents = [c for c in shaped if "class" in c and c[c.index("parent") + 1] == "1:"]
    rates = [float(c[c.index("rate") + 1].removesuffix("bit")) for c in parents]
    assert rates == pytest.approx([10e6 * b.MTU / b.PAYLOAD, 0.8e6 * b.MTU / b.PAYLOAD], rel=1e-5)
    for parent in (c[c.index("classid") + 1] for c in parents):
        leaves = [c for c in shaped if "class" in c and c[c.index("parent") + 1] == parent]
        assert [c[-1] for c in leaves] == ["0", "1"], "priorities"
        assured = sum(float(c[c.index("rate") + 1].removesuffix("bit")) for c in leaves)
        assert assured == pytest.approx(rates[[c[c.index("classid") + 1] for c in parents].index(parent)], rel=1e-4)
    filters = [c for c in shaped if "filter" in c]
    assert {c[c.index("dst") + 1] for c in filters} == {"10.77.1.0/24", "10.77.2.0/24"}
    small = [c for c in filters if b.SMALL_MASK in c]
    assert len(small) == 2 and all(c[c.index("prio") + 1] == "1" for c in small)


def test_every_name_begins_with_the_prefix_and_is_made_before_use() -> None:
    made = b.commands(b.load_bed(FILE, "N2"), "x-")
    names = {c[3] for c in made if c[:3] == ("ip", "netns", "add")}
    assert names == {f"x-{n}" for n in b.namespaces(b.load_bed(FILE, "N2"))}
    seen: set[str] = set()
    for c in made:
        if c[:3] == ("ip", "netns", "add"):
            seen.add(c[3])
        else:
            assert {word for word in c if word.startswith("x-")} <= seen, c


def test_the_queue_that_counts_a_link_is_the_one_that_shapes_it() -> None:
    bed = b.load_bed(FILE, "N4")
    made = b.commands(bed, "x-")
    for link in bed.links:
        ((space, device, number),) = b.queues(bed, link)
        to = next(
            c for c in made if "filter" in c and c[2] == f"x-{space}" and f"10.77.{link.dst}.0/24" in c and "2" in c
        )
        leaf = to[-1]
        parent = next(c for c in made if "class" in c and c[2] == f"x-{space}" and leaf in c and device in c)
        assert parent[parent.index("parent") + 1] == number


def test_another_rate_changes_the_queue_that_carries_the_link() -> None:
    bed = b.load_bed(FILE, "N4")

    def queue(command: b.Command) -> b.Command:
        return tuple(word for word in command if word not in ("add", "change"))[:10]

    made = {queue(c) for c in b.commands(bed, "x-")}
    for link in bed.links:
        changed = b.rate_commands(bed, "x-", link, 1e6)
        assert all("change" in c and queue(c) in made for c in changed)
        ceils = [float(c[c.index("ceil") + 1].removesuffix("bit")) for c in changed if "ceil" in c]
        assert ceils == pytest.approx([1e6 * b.MTU / b.PAYLOAD] * 3, rel=1e-5)
    with pytest.raises(InputError, match="a lab carries"):
        b.rate_commands(bed, "x-", bed.links[0], 1.0)


@pytest.mark.parametrize("name", ["N1", "N2", "N4"])
def test_every_link_is_measured_once_and_unlike_directions_in_turn(name: str) -> None:
    bed = b.load_bed(FILE, name)
    groups = measure._groups(bed)
    assert sorted((x.src, x.dst) for g in groups for x in g) == sorted((x.src, x.dst) for x in bed.links)
    rate = {(x.src, x.dst): x.bits_per_s for x in bed.links}
    for group in groups:
        ends = {(x.src, x.dst) for x in group}
        for src, dst in ends:
            if src != dst:
                fast, slow = sorted((rate[src, dst], rate[dst, src]), reverse=True)
                assert ((dst, src) in ends) == (fast <= measure.UNLIKE * slow)


def test_what_one_queue_cannot_carry_is_refused_by_name() -> None:
    network = load_testbed(FILE, "N1")
    table = network.bandwidth_bytes_per_s.copy()
    table[0, 2] *= 2
    with pytest.raises(InputError, match="A to B have 100, 200 Mbps"):
        b.bed_of(replace(network, bandwidth_bytes_per_s=table))
    with pytest.raises(InputError, match="several testbeds; name one"):
        b.load_bed(FILE)
    with pytest.raises(InputError, match="rate scale 0"):
        b.load_bed(FILE, "N1", rate_scale=0)
    with pytest.raises(InputError, match=r"no testbed 'N9'"):
        b.load_bed(FILE, "N9")


@pytest.mark.parametrize("name", ["../x", "$(reboot)", "a b", "-n", "a;b", "core", "trainer", "site-", "", "x" * 40])
def test_names_that_are_no_word_of_a_command_are_refused(name: str) -> None:
    network = load_testbed(FILE, "N3")
    first = replace(network.devices[0], peer=name + ("" if name in ("core", "trainer", "") else "0"))
    with pytest.raises(InputError, match="cannot be a peer's name in a lab"):
        b.bed_of(replace(network, devices=(first, *network.devices[1:])))


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(1e-3, 0.0), (1e30, 0.0), (1e6, 1e9)])
def test_links_that_no_queue_makes_are_refused(bytes_per_s: float, latency_s: float) -> None:
    network = load_testbed(FILE, "N3")
    shape = network.latency_s.shape
    with pytest.raises(InputError, match=r"a lab carries 0\.008 to 100000 Mbps"):
        b.bed_of(
            replace(network, bandwidth_bytes_per_s=np.full(shape, bytes_per_s), latency_s=np.full(shape, latency_s))
        )


def test_a_burst_is_short_against_the_link_and_never_below_a_frame() -> None:
    for bits in (0.8e6, 10e6, 1e9):
        assert 2 * b.MTU <= b.burst_bytes(bits) <= 65536
    assert b.burst_bytes(1e8) == pytest.approx(1e8 / 8 * 0.002)


def test_names_tell_a_living_owner_from_a_dead_one() -> None:
    assert not is_orphan(prefix() + "A0")
    assert is_orphan(f"flab-{os.getpid()}-1-A0"), "the same process id, begun at another time"
    assert is_orphan("flab-4194305-77-core"), "no process has this id"
    assert not is_orphan("somebody-elses")


def test_scaling_leaves_latency_alone() -> None:
    network = load_testbed(FILE, "N2")
    scaled = b.scaled(network, 0.5)
    off = ~np.eye(len(network), dtype=bool)
    assert np.allclose(scaled.bandwidth_bytes_per_s[off], network.bandwidth_bytes_per_s[off] / 2)
    assert np.array_equal(scaled.latency_s, network.latency_s)


def test_a_duty_cycle_stops_a_process_for_a_while_and_lets_it_go_in_the_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        duty = DutyCycle(process.pid, 0.1)
        try:
            end, seen = time.monotonic() + 200, set[str]()
            while len(seen & {"stopped", "sleeping"}) < 2 and time.monotonic() < end:
                seen.add(psutil.Process(process.pid).status())
                time.sleep(0.003)
            assert {"stopped", "sleeping"} <= seen
        finally:
            duty.stop()
        end = time.monotonic() + 200
        while psutil.Process(process.pid).status() == "stopped" and time.monotonic() < end:
            time.sleep(0.003)
        assert psutil.Process(process.pid).status() != "stopped"


def test_peers_stay_on_one_cpu_where_all_fit_so() -> None:
    two = {"A0": 0.24, "A1": 0.24, "B0": 0.24, "B1": 0.24, "C0": 0.12, "C1": 0.12}
    found = pinned(two, {4, 7})
    loads = [sum(two[name] for name, cpu in found.items() if cpu == each) for each in (4, 7)]
    assert found.keys() == two.keys() and loads == pytest.approx([0.6, 0.6])
    assert pinned({"a": 0.6, "b": 0.6, "c": 0.6}, {0, 1}) == {}
    assert pinned({"a": 1.5}, {0, 1}) == pinned({}, {0, 1}) == {}

"""The delay element without a network: who waits how long, what is lost, what is cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from peer.lab import delay as d
from peer.lab.bed import commands, load_bed

BED = """{"gpus": {"core": [0.05, 2, 4]}, "testbeds": {"two": {"intra_node": [50, 0.1], "intra_site": [50, 0.1],
"sites": [{"name": "A", "gpu": "core", "count": 1}, {"name": "B", "gpu": "core", "count": 1},
{"name": "C", "gpu": "core", "count": 1}], "inter": {"A-B": [20, 25], "B-C": [20, 0.1], "A-C": [20, 0.1]}}}}"""


def frame(site: int, mark: int = 0, kind: bytes = b"\x08\x00") -> bytes:
    """An offload header, an Ethernet header, and enough of an IPv4 packet to 10.77.SITE.9."""
    return bytes(10 + 12) + kind + bytes(16) + bytes((10, 77, site, 9)) + bytes([mark])


def test_the_destination_is_read_from_ipv4_only() -> None:
    assert d.site_of(frame(3)) == 3
    assert d.site_of(frame(3, kind=b"\x08\x06")) == -1, "ARP"
    assert d.site_of(b"short") == -1


def test_each_destination_has_its_delay_and_keeps_its_order() -> None:
    line = d.Line(d.Rules(delay_s={1: 0.5, 2: 0.1}), seed=0)
    for mark in range(3):
        line.push(frame(1, mark), mark * 0.01)
    line.push(frame(2, 9), 0.02)
    line.push(frame(0, 8), 0.02)
    assert line.due(0.02) == [frame(0, 8)], "nobody said a delay for it"
    assert line.wait_s(0.02) == pytest.approx(0.1)
    assert line.due(0.2) == [frame(2, 9)]
    assert [f[-1] for f in line.due(1.0)] == [0, 1, 2]
    assert line.wait_s(1.0) is None


def test_loss_is_a_share_by_the_seed_and_a_cut_takes_all() -> None:
    def lost(seed: int) -> int:
        line = d.Line(d.Rules(loss={1: 0.2}), seed)
        for _ in range(1000):
            line.push(frame(1), 0.0)
            line.push(frame(2), 0.0)
        return line.dropped

    assert 150 < lost(1) < 250 and lost(1) == lost(1) != lost(2)
    line = d.Line(d.Rules(cut=(1,)), seed=0)
    line.push(frame(1), 0.0)
    line.push(frame(2), 0.0)
    assert line.due(0.0) == [frame(2)] and line.dropped == 1


def test_what_is_on_its_way_is_bounded() -> None:
    line = d.Line(d.Rules(delay_s={1: 1.0}), seed=0)
    for _ in range(d.MOST_FRAMES + 5):
        line.push(frame(1), 0.0)
    assert line.dropped == 5 and len(line.due(2.0)) == d.MOST_FRAMES


def test_only_sites_with_a_long_link_have_an_element_and_both_its_ends(tmp_path: Path) -> None:
    (tmp_path / "bed.json").write_text(BED)
    bed = load_bed(tmp_path / "bed.json")
    rules = d.delays({(x.src, x.dst): x.latency_s for x in bed.links}, 1e-3)
    assert rules == {0: d.Rules(delay_s={1: 0.025}), 1: d.Rules(delay_s={0: 0.025})}
    assert [bed.is_delayed(k) for k in range(3)] == [True, True, False]
    words = {word for c in commands(bed, "x-") for word in c}
    assert {"d0", "e0", "s0", "d1", "e1", "s1", "s2"} <= words and "d2" not in words
    assert msgspec.json.decode(msgspec.json.encode(rules[0]), type=d.Rules) == rules[0]

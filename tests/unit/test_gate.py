"""The gate's decisions: who is connected, by the kernel's table, and which ranges have more than their share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dht.gate import LOCAL, MAX_PENDING_PER_RANGE, MAX_PER_RANGE, MAX_RANGES, overfull, program, remotes, room

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TABLE = HEAD + "".join(
    f"   {k}: {local} {remote} {state} 00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 30 10 -1\n"
    for k, (local, remote, state) in enumerate([
        ("00000000:7A62", "00000000:0000", "0A"),
        ("0100000B:7A62", "057100CB:C350", "01"),
        ("0100000B:7A62", "067100CB:C351", "03"),
        ("0100000B:7A62", "077100CB:C352", "06"),
        ("0100000B:1F90", "087100CB:C353", "01"),
    ])
)  # fmt: skip
TABLE6 = HEAD + (
    "   0: 00000000000000000000000000000000:7A62 B80D0120000000000000000001000000:C350 01 0 0 0 0 0 0 0 0 0\n"
)


def crowd(prefix: str, count: int) -> list[tuple[str, int]]:
    return [(f"{prefix}.{k % 250 + 1}", 1000 + k) for k in range(count)]


def test_the_kernels_table_is_read() -> None:
    assert remotes(TABLE, 31330) == [("203.0.113.5", 50000), ("203.0.113.6", 50001)]
    assert remotes(TABLE6, 31330) == [("2001:db8::1", 50000)]
    assert remotes("", 31330) == remotes("what is this\n" * 3, 31330) == []


def test_a_range_over_its_share_is_turned_away_until_it_is_clearly_below() -> None:
    few, many = crowd("1.2.3", MAX_PENDING_PER_RANGE - 1), crowd("5.6.7", MAX_PENDING_PER_RANGE)
    assert overfull(few, frozenset(), frozenset()) == frozenset()
    shut = overfull([*few, *many], frozenset(), frozenset())
    assert shut == {"5.6.7.0/24"}
    assert overfull(many[:-2], frozenset(), shut) == shut
    assert overfull(many[: MAX_PENDING_PER_RANGE // 2], frozenset(), shut) == frozenset()
    assert overfull(many, frozenset(many), frozenset()) == frozenset()  # they have authenticated
    known = crowd("5.6.7", MAX_PER_RANGE)
    assert overfull(known, frozenset(known), frozenset()) == {"5.6.7.0/24"}
    assert overfull(known[1:], frozenset(known), frozenset()) == frozenset()
    house = [(f"2a00:1:1:{k:x}::9", k) for k in range(MAX_PENDING_PER_RANGE)]
    assert overfull(house, frozenset(), frozenset()) == {"2a00:1:1::/48"}


def test_a_local_networks_range_has_more() -> None:
    """Whoever comes through a container's published port may be seen at one private address."""
    many = crowd("172.17.0", LOCAL * MAX_PENDING_PER_RANGE)
    assert overfull(many[1:], frozenset(), frozenset()) == frozenset()
    assert overfull(many, frozenset(), frozenset()) == {"172.17.0.0/24"}


@given(
    st.dictionaries(st.sampled_from(["1.2.3", "5.6.7", "172.17.0"]), st.integers(0, 200)),
    st.sampled_from(["1.2.3", "5.6.7", "9.9.9", "172.17.0"]),
)
def test_fewer_than_there_is_room_for_need_no_look(there: dict[str, int], prefix: str) -> None:
    connected = [r for where, count in there.items() for r in crowd(where, count)]
    left = room(connected)
    assert (left < 1) == bool(overfull(connected, frozenset(), frozenset()))
    assert left < 1 or not overfull([*connected, *crowd(prefix, left - 1)], frozenset(), frozenset())


def test_the_fullest_ranges_come_first_and_the_program_fits() -> None:
    fullest = crowd("1.2.3", 2 * MAX_PENDING_PER_RANGE)
    others = [r for k in range(600) for r in crowd(f"8.{k // 250}.{k % 250}", MAX_PENDING_PER_RANGE)]
    shut = overfull([*others, *fullest], frozenset(), frozenset())
    assert len(shut) == MAX_RANGES and "1.2.3.0/24" in shut
    wide = [f"2001:db8:{k:x}::/48" for k in range(MAX_RANGES)]
    for ranges, v6 in ((shut, False), (wide, True)):
        assert len(program(ranges, v6=v6)) <= 8 * 4096
    assert len(program(wide, v6=False)) == 8 * 3  # nothing of the other family

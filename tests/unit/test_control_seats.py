"""Control streams at a volunteer: made-up peers cannot keep others out."""

from __future__ import annotations

from peer.control_seats import MAX_PER_PEER, MAX_PER_RANGE, MAX_STREAMS, Seat, Seats


class Room:
    def __init__(self, *held: str) -> None:
        self.seats = Seats(lambda run: run in held)
        self.gone: list[Seat] = []

    def sit(self, peer: str, place: str = "", since: float = 0.0, run: str = "") -> str:
        seat = Seat(peer, place, since, lambda: self.gone.append(seat), run)
        return self.seats.take(seat)


def test_a_peer_has_few() -> None:
    room = Room()
    assert [room.sit("a") for _ in range(MAX_PER_PEER)] == [""] * MAX_PER_PEER
    assert "4 control streams" in room.sit("a")
    assert room.sit("b") == ""


def test_a_range_has_a_quarter() -> None:
    room = Room()
    taken = [room.sit(f"p{i}", "203.0.113.0/24") for i in range(MAX_PER_RANGE + 8)]
    assert taken.count("") == MAX_PER_RANGE
    assert "203.0.113.0/24" in taken[-1]
    assert room.sit("q", "198.51.100.0/24") == ""


def test_made_up_peers_give_way_to_others_and_first_those_of_the_fullest_range() -> None:
    room = Room("mine")
    assert room.sit("trainer", "192.0.2.0/24", run="mine") == ""
    for i in range(MAX_PER_RANGE):
        room.sit(f"bot{i}", "203.0.113.0/24", since=float(i), run="made up")
    for i in range(MAX_STREAMS - MAX_PER_RANGE - 1):
        room.sit(f"guest{i}", f"10.0.{i}.0/24", run="other")
    assert len(room.seats) == MAX_STREAMS
    assert room.sit("late", "198.51.100.0/24") == ""
    assert [s.peer for s in room.gone] == ["bot0"]
    assert len(room.seats) == MAX_STREAMS
    for i in range(MAX_PER_RANGE - 2):
        assert room.sit(f"late{i}", f"172.16.{i}.0/24") == ""
    assert all(s.peer.startswith("bot") for s in room.gone)


def test_streams_of_runs_that_have_something_here_stay() -> None:
    room = Room("mine")
    for i in range(MAX_STREAMS):
        room.sit(f"t{i}", run="mine")
    assert "in use" in room.sit("late")
    assert room.gone == []


def test_a_seat_given_up_is_free() -> None:
    room = Room("mine")
    seats = [Seat(f"t{i}", "", 0.0, lambda: None, "mine") for i in range(MAX_STREAMS)]
    for seat in seats:
        assert room.seats.take(seat) == ""
    room.seats.give_up(seats[5])
    room.seats.give_up(seats[5])
    assert room.sit("late") == ""

"""Pauses on battery and while the user is active: the decision, and what logind says."""

from __future__ import annotations

import pytest

from peer.cli_peer_options import join_options, parser
from peer.courtesy import Courtesy, Surroundings, Watch, idle_of, look, untold, why_pause


@pytest.mark.parametrize(
    ("asked", "now", "reason"),
    [
        (Courtesy(), Surroundings(on_battery=True, idle_s=0.0), ""),
        (Courtesy(on_battery=True), Surroundings(on_battery=True), "on battery"),
        (Courtesy(on_battery=True), Surroundings(on_battery=False), ""),
        (Courtesy(on_battery=True), Surroundings(), ""),
        (Courtesy(idle_s=300), Surroundings(idle_s=299.0), "its user is active"),
        (Courtesy(idle_s=300), Surroundings(idle_s=300.0), ""),
        (Courtesy(idle_s=300), Surroundings(), ""),
    ],
)
def test_when_it_pauses(asked: Courtesy, now: Surroundings, reason: str) -> None:
    found = why_pause(asked, now)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_what_a_system_does_not_tell_is_said() -> None:
    asked = Courtesy(on_battery=True, idle_s=60)
    assert "no battery" in untold(asked, Surroundings(idle_s=1.0))
    assert "does not tell" in untold(asked, Surroundings(on_battery=False))
    assert untold(Courtesy(), Surroundings()) == ""


def test_logind_counts_graphical_sessions() -> None:
    active = "Type=wayland\nIdleHint=no\nIdleSinceHint=0\n"
    away = "Type=x11\nIdleHint=yes\nIdleSinceHint=900000000\n"
    shell = "Type=tty\nIdleHint=no\nIdleSinceHint=0\n"
    assert idle_of([shell, ""], 1000.0) is None
    assert idle_of([away, shell], 1000.0) == 100.0
    assert idle_of([away, active], 1000.0) == 0.0


def test_the_watch_looks_now_and_then_only() -> None:
    seen = [Surroundings(on_battery=True), Surroundings(on_battery=False)]
    watch = Watch(Courtesy(on_battery=True), every_s=10.0, look=lambda: seen.pop(0))
    assert watch.due(0.0) and watch.update(0.0) and not watch.due(9.0)
    assert watch.due(10.0) and watch.update(10.0) == ""
    assert not Watch(Courtesy()).due(1e9)


def test_this_machine_can_be_looked_at() -> None:
    found = look()
    assert found.idle_s is None or found.idle_s >= 0


def test_the_options() -> None:
    given = ["join", "--loopback", "--memory", "1GiB", "--pause-on-battery", "--pause-while-active", "5"]
    assert join_options(parser().parse_args(given)).courtesy == Courtesy(on_battery=True, idle_s=300.0)
    assert join_options(parser().parse_args(given[:4])).courtesy == Courtesy()

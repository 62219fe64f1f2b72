"""examples/friends.md, word for word where it is about commands: three houses (on loopback), two steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from peer import config
from tests.cluster.eventually import until
from tests.cluster.trainer_process import ROOT, ended, environment, small_run
from tests.cluster.volunteer_process import Peer

DOC = (ROOT / "examples" / "friends.md").read_text()


@pytest.mark.timeout(1800)
def test_three_houses_train_together(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(line: str, module: str, *more: str) -> str:
        """Runs a line of the document as Ada, with `more` behind it."""
        assert f"    {line}\n" in DOC or f"    {line} " in DOC, line
        done = ended(place, "-m", module, *line.split()[1:], *more)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    for name, value in environment(place).items():
        monkeypatch.setenv(name, value)
    houses = [Peer(place / "home")]  # Ada, whose state folder is the environment's
    try:
        houses[0].event("joined")
        invitation = command("fusion-peer invite", "peer.cli_peer").strip()
        assert re.fullmatch(r"fusion-peer join( /ip4/127\.0\.0\.1/tcp/\d+/p2p/12D3KooW\w+)+", invitation)
        houses += [Peer(place / name, *invitation.split()[2:]) for name in ("ben", "cleo")]
        ids = {houses[0].event("devices")["peer"]}
        for house in houses[1:]:
            ids.add(house.event("joined")["peer"])
            house.event("devices")

        def on_the_board() -> set[str]:
            seen = json.loads(command("fusion-monitor status", "dht.cli_monitor", "--json", "--timeout", "200"))
            return {p["peer"] for p in seen["peers"]}

        until(lambda: on_the_board() == ids, "the three houses on the board")
        assert config.parse(command("fusion-run init gpt2", "peer.cli_run")).model.family == "gpt2"
        small_run(place)
        (place / "gpt2.toml").write_text((place / "run.toml").read_text() + "[numerics]\nstages = 3\n")
        out = command("fusion-run train gpt2.toml", "peer.cli_run", "--steps", "2", "--report", "r.json")
        assert "volunteers can see or reconstruct" in out and "held-out loss after 2 steps" in out
        report = json.loads((place / "r.json").read_text())
        assert len(report["steps"]) == 2
        hosts = {p["peer"] for p in report["plan"]["placement"]}
        assert len(hosts) == 3 and len(hosts - ids) <= 1  # Ada's trainer lends a device of its own too
        assert all(house.end() == 0 for house in houses)
    finally:
        for house in houses:
            house.close()

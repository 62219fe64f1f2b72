"""The systemd unit and the Dockerfile of a volunteer: no privileges, the options that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from peer.cli_peer_options import parser

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "volunteer"
UNIT, DOCKER = FOLDER / "fusion-peer.service", FOLDER / "Dockerfile"


def test_the_unit_gives_no_privileges_and_time_to_leave() -> None:
    text = UNIT.read_text("utf-8")
    for line in ("NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict", "KillMode=mixed"):
        assert f"\n{line}\n" in text
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > 10
    assert re.findall(r"^User=(\S+)", text, re.M) == ["fusion"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "fusion-peer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = re.sub(r"ExecStart=\S+", f"ExecStart={program}", UNIT.read_text("utf-8"))
    (tmp_path / "fusion-peer.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "fusion-peer.service")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "fusion-peer.service" not in done.stderr, done.stderr


def test_the_image_runs_as_nobody_special_and_its_folders_exist() -> None:
    lines = DOCKER.read_text("utf-8").splitlines()
    assert lines.index("USER fusion") > max(i for i, line in enumerate(lines) if line.startswith("RUN"))
    assert not any("--privileged" in line or "--cap-add" in line for line in lines)
    root = FOLDER.parents[1]
    for line in lines:
        if line.startswith("COPY"):
            assert all((root / part).exists() for part in line.split()[1:-1]), line


def test_the_settings_file_holds_settings_only() -> None:

    known = {
        a for action in parser()._subparsers._group_actions[0].choices["join"]._actions for a in action.option_strings
    }  # type: ignore[union-attr,index]
    for key in tomllib.loads((FOLDER / "peer.toml").read_text("utf-8")):
        assert f"--{key}" in known

"""The wheel holds the three packages and nothing else, and its commands run where nothing else of ours lies."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_wheel_installs_alone_and_carries_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, files):  # a copy: setuptools writes build products beside the sources
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"dht", "fusion_p2p", "peer"}
    assert {n for n in files if n.startswith("dht/web/static/")} <= set(names)  # the monitor's page

    env_dir = tmp_path / "env"
    venv.EnvBuilder(with_pip=True).create(env_dir)
    python = env_dir / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    site = next((env_dir / "lib").glob("python*/site-packages"))
    # The dependencies come from this environment: a .pth adds the folder but not the editable install inside it.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    for command in ("fusion-peer", "fusion-run", "fusion-monitor"):
        ran = subprocess.run(
            [str(env_dir / "bin" / command), "--help"],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ran.returncode == 0, ran.stderr
        assert "Usage" in ran.stdout or "usage" in ran.stdout
    where = subprocess.run(
        [str(python), "-c", "import peer; print(peer.__file__)"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert str(env_dir) in where.stdout

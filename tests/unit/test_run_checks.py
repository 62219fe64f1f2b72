"""Each senseless argument of `Run` is one line that names it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_p2p.errors import InputError
from peer.api import Run

BAD: list[tuple[str, Any, str]] = [
    ("seed", 2**70, "seed = 1180591620717411303424 must be a whole number from 0 to 2147483647"),
    ("seed", 1.5, "seed = 1.5 must be a whole number"),
    ("seed", -1, "seed = -1"),
    ("micro_batch_size", 10**30, "micro_batch_size = 1000"),
    ("micro_batches", True, "micro_batches = True must be a whole number"),
    ("optimizer", "adam", "optimizer = 'adam'; use fusion_p2p.AdamW"),
    ("threads", 0, "threads = 0 must be a whole number from 1 to 256"),
    ("threads", 500, "threads = 500"),
    ("dtype", "float8", "dtype = 'float8' is unknown; use float32, bfloat16"),
    ("save_every", -1, "save_every = -1"),
    ("recover_s", -1, "recover_s = -1"),
    ("recover_s", float("nan"), "recover_s = nan"),
    ("name", "a/b", "name = 'a/b'"),
    ("name", "a\0", "name = 'a\\x00'"),
    ("name", "..", "name = '..'"),
    ("name", "x" * 300, "name = 'xxx"),
    ("name", "x\n", "name = 'x\\n'"),
    ("allow_peers", ["me"], "allow_peers: 'me' is no peer id"),
    ("allow_peers", "12D3KooW", "allow_peers = '12D3KooW': give a list"),
    ("model", torch.nn.ReLU(), "ReLU has no trainable parameter"),
    ("model", 3, "model is a int"),
]


@pytest.mark.parametrize(("what", "value", "said"), BAD)
def test_a_senseless_argument_is_one_line(what: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        Run(**{"model": torch.nn.Linear(1, 1), "data": [], what: value})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(InputError), Run(torch.nn.Linear(1, 1), data=[], swarm="nowhere"):
        pass
    assert not list((tmp_path / "temporary").iterdir())


def test_a_run_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.write_text("kept")
    with (
        pytest.raises(InputError, match="cannot be used: File exists"),
        Run(torch.nn.Linear(1, 1), data=[], run_dir=file),
    ):
        pass
    assert file.read_text() == "kept"

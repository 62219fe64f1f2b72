"""How a `Run` begins on its folder: alone, and without a trace if it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_p2p.errors import InputError
from peer import api
from peer.api import Run
from peer.run_control import SESSION_LOCK, TrainerLock


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).square().mean()
        return loss


@pytest.fixture(autouse=True)
def _nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No volunteer takes part."""

    async def open_session(**_: Any) -> None:
        raise InputError("no volunteer came")

    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(api, "open_session", open_session)


def new_run(folder: Path, **options: Any) -> Run:
    data = [(torch.randn(2, 2),)]
    return Run(
        Net(),
        data=data,
        loss=lambda out, _: out,
        micro_batches=1,
        micro_batch_size=2,
        swarm="a",
        run_dir=folder,
        **options,
    )


def test_a_failed_start_can_be_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match="no volunteer came"), new_run(tmp_path / "run"):
            pass
    assert not (tmp_path / "run" / "spec.json").exists()


def test_one_folder_has_one_trainer(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        TrainerLock(tmp_path / "run", SESSION_LOCK),
        pytest.raises(InputError, match="in use by another trainer"),
        new_run(tmp_path / "run"),
    ):
        pass


@pytest.mark.parametrize("option", [{"dtype": "float16"}, {"device_class": "tpu"}, {"micro_batches": 0}])
def test_bad_numerics_are_named(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        Run(Net(), data=[], run_dir=tmp_path / "run", **option)

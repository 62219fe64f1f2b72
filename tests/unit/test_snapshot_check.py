"""What a volunteer says is its stage's snapshot: bounded, and checked by name and shape."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.optim import AdamW
from fusion_p2p.plan import LinkCodec
from fusion_p2p.snapshot import to_bytes
from fusion_p2p.snapshot_check import SnapshotCheck
from tests.unit.stage_models import gpt2

State = dict[str, torch.Tensor]
OPTIMIZER = AdamW(lr=1e-3)


@pytest.fixture(scope="module")
def stages() -> list[tuple[SnapshotCheck, State]]:
    """Both stages after a step, the link's codec with its state."""
    case = gpt2()
    pipeline = case.pipeline(2, codecs=(LinkCodec(0, 1, "transform:2/1"),))
    pipeline.train_step(case.batch(0))
    return [
        (SnapshotCheck(s.program, case.captured.opdag, pipeline.numerics, OPTIMIZER), s.snapshot())
        for s in pipeline.stages
    ]


def take(check: SnapshotCheck, state: State) -> None:
    raw = to_bytes(state)
    assert len(raw) <= check.most_bytes
    check.check(io.BytesIO(raw), len(raw))


def test_real_snapshots_pass_and_are_within_the_bound(stages: list[tuple[SnapshotCheck, State]]) -> None:
    for check, state in stages:
        assert any(key.startswith("optim/exp_avg/") for key in state)
        assert any(key.startswith("codec/") for key in state)
        take(check, state)
        assert check.most_bytes < 3 * len(to_bytes(state)) + (1 << 20)
    with pytest.raises(InputError):
        take(stages[0][0], stages[1][1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s, p: s.pop(p), "lacks param/"),
        (lambda s, p: s.update({p: s[p][:1]}), "expected"),
        (lambda s, p: s.update({p: s[p].double()}), "expected"),
        (lambda s, p: s.update({p.replace("param", "optim/exp_avg"): torch.zeros(3)}), "expected"),
        (lambda s, p: s.update({p.replace("param", "optim/step"): torch.zeros(3)}), "expected one number"),
        (lambda s, p: s.update({"param/more": torch.zeros(3)}), "not the stage's"),
        (lambda s, p: s.update({"optim/exp_avg/more": torch.zeros(3)}), "not the stage's"),
        (lambda s, p: s.update({"codec/0/7/9/basis": torch.zeros(3)}), "not the stage's"),
    ],
)
def test_what_is_not_the_stages_is_refused(
    stages: list[tuple[SnapshotCheck, State]], change: Callable[[State, str], object], why: str
) -> None:
    check, state = stages[0][0], dict(stages[0][1])
    change(state, max((k for k in state if k.startswith("param/")), key=lambda k: state[k].numel()))
    with pytest.raises(InputError, match=why):
        take(check, state)


def test_a_codecs_state_is_bounded(stages: list[tuple[SnapshotCheck, State]]) -> None:
    check, state = stages[0]
    key = next(k for k in state if k.startswith("codec/"))
    large = {**state, key.rsplit("/", 1)[0] + "/more": torch.zeros(1 << 20)}
    raw = to_bytes(large)
    with pytest.raises(InputError, match="takes more than"):
        check.check(io.BytesIO(raw), len(raw))

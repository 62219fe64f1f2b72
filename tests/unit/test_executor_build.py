"""What a refused stage leaves behind in its executor: nothing."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from fusion_p2p.compute import Compute
from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from peer import executor_build
from peer.errors import RefusedError
from peer.executor_build import Built, build
from peer.executor_compute import ComputeThread
from peer.executor_memory import MemoryLimit
from peer.executor_protocol import HostStage
from peer.protocol import Assignment, BlobRef, RunSpec

LIMIT = MemoryLimit("cpu", 1 << 40, 0)


class Tensors:
    """What the trial step of an offer has made so far."""


def offer() -> HostStage:
    spec = RunSpec(
        run="r", name="n", owner=b"", opdag_hash="h", seed=1, optimizer=OptimizerSpec(kind="sgd", lr=0.1), created=1.0
    )
    assignment = Assignment(
        run="r", epoch=1, plan=1, stage=3, replica=0, incarnation=0, opdag_hash="h", target_peer="p", device="cpu",
        expires=0.0,
    )  # fmt: skip
    numerics = Numerics(cuts=(), micro_batches=1, micro_batch_size=1)
    return HostStage(
        spec=spec, assignment=assignment, numerics=numerics, window=1, opdag=b"-", state=BlobRef("", 0, ()),
        first_tick=0, trial=True, logged=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), "memory"),
        (InputError("it has no operators"), "admission"),
        (RefusedError("state", "stage 3: its bytes are others"), "state"),
    ],
)
def test_a_refusal_keeps_nothing_that_the_step_made(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str
) -> None:
    made: list[weakref.ref[Tensors]] = []

    def step(tensors: Tensors) -> None:
        made.append(weakref.ref(tensors))
        raise failure

    def trial(*_: Any) -> Built:
        step(Tensors())
        raise AssertionError

    monkeypatch.setattr(executor_build, "_build", trial)
    compute = ComputeThread(lambda hosted, error: None)
    compute.start()
    asked = compute.call(lambda: build(offer(), Path(), LIMIT, 1, Compute, Path()))  # its error stays with the future
    with pytest.raises(RefusedError) as caught:
        asked.result(timeout=60)
    assert caught.value.code == code
    assert made[0]() is None


def test_what_is_nobody_s_refusal_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(*_: Any) -> Built:
        raise RuntimeError("a defect")

    monkeypatch.setattr(executor_build, "_build", trial)
    with pytest.raises(RuntimeError, match="a defect"):
        build(offer(), Path(), LIMIT, 1, Compute, Path())

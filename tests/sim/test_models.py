"""Every model of the survey captures exactly, or is refused with a reason (issue: "any model")."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import torch

import fusion_p2p
from fusion_p2p.admit import admit
from fusion_p2p.capture import capture
from fusion_p2p.errors import CaptureError
from fusion_p2p.ir import OpDag
from tests import model_zoo
from tests.refused_models import Refused


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", model_zoo.SUPPORTED, ids=lambda c: c.name)
def test_captures_exactly(case: model_zoo.Case) -> None:
    """`capture` itself compares loss, gradients, buffers and weights; a difference raises."""
    model, batch, loss = case.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    captured = capture(model, batch, loss=loss)
    dag = captured.opdag
    assert msgspec.json.decode(dag.to_bytes(), type=OpDag) == dag
    loss_line, *_ = captured.report.checks
    assert loss_line.endswith("bit for bit")
    assert captured.report.worst < 1e-6 or case.name == "regions", captured.report.checks  # bf16 region
    admit(dag.to_bytes())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "capture changed the module"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", model_zoo.REFUSED, ids=lambda c: c.name)
def test_refuses_with_reason(case: Refused) -> None:
    with pytest.raises(CaptureError, match=case.says) as caught:
        capture(case.build(), torch.randn(3, 5), loss=lambda output, batch: output.mean())
    assert "\n" not in str(caught.value)


def test_support_page_has_not_drifted() -> None:
    page = pathlib.Path(fusion_p2p.__file__).with_name("SUPPORT.md")
    assert page.read_text() == model_zoo.support_markdown(), "run: python -m tests.model_zoo"

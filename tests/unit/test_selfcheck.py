"""Where a difference from the module is rounding, and where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_p2p import arbiter
from fusion_p2p.capture import Captured, capture
from fusion_p2p.errors import CaptureError


class Reordered(nn.Module):
    """While traced, gradients that nearly cancel meet in the reverse order; `factor` 1 changes nothing but rounding."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.a, self.factor = nn.Linear(5, 4), factor
        shares = 3.0 * torch.randn(64, generator=torch.Generator().manual_seed(0))
        self.shares = [*shares.tolist(), 1.0 - float(shares.sum())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        traced = torch.compiler.is_exporting()
        h = self.a(x)
        shares = self.shares[::-1] if traced else self.shares
        side = sum(torch.tanh(h) * s for s in shares) * (self.factor if traced else 1.0)
        return (h.square() + side - side.detach()).mean()


def captured(factor: float) -> Captured:
    torch.manual_seed(0)
    return capture(Reordered(factor), torch.randn(3, 5))


def test_another_order_of_the_same_sums_is_accepted() -> None:
    report = captured(1.0).report
    assert 1e-6 < report.worst < 1e-4
    assert "gradients: to rounding" in report.checks[1]


@pytest.mark.parametrize("factor", [1 + 5e-5, 1 + 1e-3])
def test_another_gradient_is_refused_however_near(factor: float) -> None:
    why = "no rounding: of 'a.weight' the graph's error" if factor < 1 + 1e-4 else "usual causes"
    with pytest.raises(CaptureError, match=why):
        captured(factor)


def test_a_module_that_does_not_repeat_itself_is_never_explained() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    turns = iter(range(9))

    def run(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"w": (exact * (1 + 1e-5 * next(turns))).to(dtype)}

    held = {"w": exact.float()}
    why = arbiter.no_rounding(lambda: nn.Linear(1, 1), run, held, held, floor=0.0, tol=1e-6)
    assert why == ""  # the first turn
    why = arbiter.no_rounding(lambda: nn.Linear(1, 1), run, held, held, floor=0.0, tol=1e-6)
    assert "differs when computed again" in why


def test_one_that_cannot_run_in_double_precision_is_refused() -> None:
    def run(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if dtype == torch.float64:
            raise RuntimeError("expected float")
        return {"w": torch.ones(3)}

    held = {"w": torch.ones(3)}
    why = arbiter.no_rounding(lambda: nn.Linear(1, 1), run, held, held, floor=0.0, tol=1e-6)
    assert why == "the module does not run in double precision (expected float)"

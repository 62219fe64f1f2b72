"""The trial step: any stage of a split model by itself, with every kind of edge and codec, and nothing else around."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusion_p2p.capture import capture
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import initial_state
from fusion_p2p.split import atoms, split
from fusion_p2p.trial import trial


class Tied(torch.nn.Module):
    """Token ids in, a tied weight at both ends, a skip over the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for layer in self.middle:
            x = torch.nn.functional.gelu(layer(x))
        logits = (x + first) @ self.embed.weight.t()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("codec", ["dense", "int8", "topk-masked:0.25"])
def test_each_stage_runs_a_full_step_alone(codec: str) -> None:
    torch.manual_seed(0)
    got = capture(Tied(), (torch.randint(0, 11, (2, 5)),), loss=lambda output, batch: output)
    count = len(atoms(got.opdag))
    cuts = tuple(range(1, min(count, 4)))
    programs = split(got.opdag, cuts)
    codecs = tuple(LinkCodec(a, b, codec) for a, b in itertools.combinations(range(len(programs)), 2))
    numerics = Numerics(cuts=cuts, codecs=codecs, micro_batches=4, micro_batch_size=3)
    assert len(programs) > 1
    assert any(p.shared for p in programs)
    ticks = itertools.count()
    for program in programs:
        state = initial_state(got.state, program)
        before = {k: v.clone() for k, v in state.items()}
        times = trial(
            program, got.opdag, numerics, OptimizerSpec(kind="adamw", lr=0.1), 7, state,
            window=2, device="cpu", clock=lambda: float(next(ticks)),
        )  # fmt: skip
        assert times.forward_s > 0
        assert times.backward_s > 0
        assert all(torch.equal(before[k], state[k]) for k in state)  # the state given is only read


def test_a_slow_first_step_does_not_count_and_a_long_one_is_not_run_again() -> None:
    got = capture(Tied(), (torch.randint(0, 11, (2, 5)),), loss=lambda output, batch: output)
    (program,) = split(got.opdag, ())
    numerics = Numerics(cuts=(), micro_batches=2, micro_batch_size=3)

    def run(first_s: float, later_s: float) -> tuple[float, int]:
        """Seconds of a forward, and how often the clock was read, of which the first six reads are slow."""
        read = [0.0]

        def clock() -> float:
            read.append(read[-1] + (first_s if len(read) <= 6 else later_s))
            return read[-1]

        times = trial(
            program, got.opdag, numerics, OptimizerSpec(kind="adamw", lr=0.1), 7, initial_state(got.state, program),
            window=2, device="cpu", clock=clock,
        )  # fmt: skip
        return times.forward_s, len(read)

    short_s, reads = run(0.1, 0.001)
    assert short_s == pytest.approx(0.001)
    warm_s, _ = run(0.5, 0.001)  # three seconds: longer than all that come after it may take
    assert warm_s == pytest.approx(0.001)
    long_s, once = run(10.0, 10.0)
    assert long_s == pytest.approx(10.0)
    assert reads > 2 * once

"""Codecs of a plan's links: what stages exchange, edges that pass over stages included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_p2p.capture import capture
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.split import split
from fusion_p2p.workload import atoms
from peer.offers import DeviceOffer
from peer.placement import PlanRequest, make_plan
from peer.plan_codecs import Channel, channels_of, link_codecs, rungs_of


class _Skip(nn.Module):
    """The first layer's output is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.a(x))
        return (self.c(torch.tanh(self.b(first)) + first) - y).square().mean()


def test_an_edge_over_a_stage_has_a_codec_of_its_own() -> None:
    dag = capture(_Skip(), {"x": torch.randn(4, 16), "y": torch.randn(4, 16)}).opdag
    chain = atoms(dag, 4)
    offers = [DeviceOffer(peer=f"peer{k}", flops_per_s=1e6, memory_bytes=1 << 30, machine="here") for k in range(3)]
    request = PlanRequest(
        base=Numerics(cuts=(), micro_batches=4, micro_batch_size=4),
        stages=3,
        compression="int8",
        channels=lambda cuts: channels_of(dag, cuts, 4),
    )
    plan = make_plan(chain, offers, request)
    pairs = {(e.src, e.dst) for program in split(dag, plan.numerics.cuts) for e in program.edges_out}
    assert (0, 2) in pairs
    assert plan.numerics.codecs == tuple(LinkCodec(a, b, "int8") for a, b in sorted(pairs))
    found = channels_of(dag, plan.numerics.cuts, 4)
    assert Channel(0, 2, 64) in found
    assert sum(c.elements for c in found) * 2 == sum(c.elements for c in channels_of(dag, plan.numerics.cuts, 8))


def test_given_codecs_are_counted_with_their_bytes() -> None:
    rungs = rungs_of((LinkCodec(0, 1, "int8"), LinkCodec(1, 2, "topk:0.01")))
    assert rungs[0, 1].byte_share == pytest.approx(0.26, abs=0.02) and rungs[0, 1].encode_s_per_element > 0
    assert rungs[1, 2].byte_share < 0.05
    assert link_codecs(()) == ()

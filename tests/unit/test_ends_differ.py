"""Ends of a link that no longer agree: who is told, when that is honest, and which sets are not complete."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

import msgspec
import torch

from fusion_p2p.errors import EndsDiffer
from fusion_p2p.snapshot import to_bytes
from fusion_p2p.snapshot_check import codec_digests, parted
from peer.executor import Executor
from peer.executor_compute import Hosted
from peer.rehost import computed_apart
from tests.unit.test_elastic_rules import plan_of


def test_an_executor_blames_nobody_for_ends_that_differ() -> None:
    said: list[tuple[str, int, str]] = []
    hosted = SimpleNamespace(links=SimpleNamespace(report=lambda *what: said.append(what)))
    error = EndsDiffer("gradient frame at mask 00, which is not the one sent")
    error.src = 2
    Executor._tell_failure(cast(Executor, None), cast(Hosted, hosted), error)
    assert said == [("apart", 2, str(error))]


def test_only_stages_that_were_made_at_other_times_may_differ() -> None:
    plan = plan_of("a", "b", "c")
    assert not computed_apart(plan)
    first = msgspec.structs.replace(plan.placement[0], incarnation=plan.placement[0].incarnation + 1)
    assert computed_apart(msgspec.structs.replace(plan, placement=(first, *plan.placement[1:])))


def test_what_both_ends_of_an_edge_hold_is_compared_and_nothing_else() -> None:
    axes, key = torch.arange(6.0).view(2, 3), "codec/7/0/1/forward.synthesis"

    def digests(**entries: torch.Tensor) -> dict[str, bytes]:
        raw = to_bytes({"param/w": torch.rand(3), **entries})
        return codec_digests(io.BytesIO(raw), len(raw))

    sender = digests(**{key: axes, "codec/7/0/1/forward.analysis": axes.T.contiguous()})
    assert parted([sender, digests(**{key: axes}), digests()]) == ""
    other = axes.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(0.0))
    assert parted([sender, digests(**{key: other})]) == key

"""What strangers write reaches a terminal, a log and the board only as printable, bounded text."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dht.records import Device, PeerRecord
from fusion_p2p.plan import Numerics, Plan, StagePlacement
from peer import plain, protocol
from peer.events import LinkBytes, PlanAdopted, RunEvent
from peer.protocol import Drop, Refused, StageFault, StageStatus
from peer.swarm_network import offers_of
from peer.view import View

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nstep 9/9 \u202e\x9b31m"
DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(protocol.ToTrainer)
NAMES: dict[str, Any] = {"run": "0" * 32, "stage": 0, "incarnation": 0}


@given(st.text(max_size=600), st.integers(1, 300))
def test_one_line_prints_and_is_bounded(text: str, most: int) -> None:
    out = plain.one_line(text, most)
    assert out.isprintable() and len(out) <= most
    if text.isprintable() and len(text) <= most:
        assert out == text


@given(st.text(max_size=200))
def test_lines_keep_their_ends_and_tabs(text: str) -> None:
    out = plain.lines(text)
    assert (out.count("\n"), out.count("\t"), len(out)) == (text.count("\n"), text.count("\t"), len(text))
    assert out.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "refused", "code": HOSTILE, "reason": HOSTILE * 1000},
        {"type": "fault", **NAMES, "code": HOSTILE, "reason": HOSTILE, "peer": HOSTILE},
        {"type": "status", **NAMES, "tick": 0, "waiting_for": HOSTILE},
    ],
)
def test_messages_of_a_volunteer_print(message: dict[str, Any]) -> None:
    found = DECODER.decode(msgspec.msgpack.encode(message))
    for field in ("code", "reason", "peer", "waiting_for"):
        text = getattr(found, field, "")
        assert text.isprintable() and len(text) <= plain.MOST


def test_messages_made_here_are_cleaned_alike() -> None:
    assert "\x1b" not in Refused(code="busy", reason=HOSTILE).reason
    assert "\x1b" not in StageFault(**NAMES, code="died", reason=HOSTILE).reason
    assert "\x1b" not in Drop(run="", stage=0, reason=HOSTILE).reason


@pytest.mark.parametrize(
    "lie",
    [
        {"type": "status", **NAMES, "tick": 0, "bytes_sent": {"\x1b[2J": 1}},
        {"type": "status", **NAMES, "tick": 0, "bytes_sent": {"0-1": -1}},
        {"type": "status", **NAMES, "tick": 0, "bytes_sent": {"0-1": 1 << 61}},
        {"type": "status", **NAMES, "tick": 0, "bytes_sent": {f"0-{i}": 1 for i in range(5000)}},
        {"type": "status", **NAMES, "tick": 0, "waited_s": float("nan")},
        {"type": "refused", "code": "memory", "reason": "", "needed": -1, "cap": 1},
        {"type": "accepted", **NAMES, "endpoint": "e", "memory_bytes": -1},
        {"type": "accepted", **NAMES, "endpoint": "e", "memory_bytes": 1, "trial_forward_s": float("inf")},
        {"type": "accepted", **NAMES, "endpoint": "e", "memory_bytes": 1, "trial_backward_s": float("nan")},
    ],
)
def test_figures_beyond_reason_end_the_stream(lie: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(lie))


def test_honest_figures_pass() -> None:
    status = StageStatus(**NAMES, tick=3, bytes_sent={"0--1": 5, "-1-0": 7}, waited_s=0.5)
    assert DECODER.decode(msgspec.msgpack.encode(status)) == status


def test_a_device_of_a_kind_that_nobody_runs_is_no_offer() -> None:
    device = Device(
        kind="cpu", name="", flops_per_s=1e9, memory_bytes_per_s=1e9, memory_bytes=1 << 30, free_bytes=1 << 30
    )
    record = PeerRecord(
        peer="12D3KooWJafHNHDXap1z4LiCt1RJQQje4SB9Hy9hKqBVkdoeYyCM",
        version="1",
        devices=(msgspec.structs.replace(device, kind=HOSTILE), device),
    )
    assert [o.device for o in offers_of(record)] == ["cpu"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view_shows_no_escape_of_others(terminal: bool) -> None:
    out = io.StringIO()
    view = View("books", 3, console=Console(file=out, force_terminal=terminal, width=120))
    plan = Plan(
        number=1,
        epoch=1,
        numerics=Numerics(cuts=(), micro_batches=1, micro_batch_size=1),
        placement=(StagePlacement(stage=0, peer="12D3KooWabc", device=HOSTILE.replace("\n", "")),),
    )
    with view:
        view(PlanAdopted(plan))
        view(RunEvent(kind="refused", text=HOSTILE, time_s=0.0))
        view(LinkBytes({}, {0: HOSTILE}))
    for bad in ("\x1b]0;", "\x1b[2J", "\x9b", "\u202e", "\nstep 9/9"):
        assert bad not in out.getvalue()

"""Ticks at the trainer: what ends one, and what no stage may say."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest

from fusion_p2p.errors import FrameError
from fusion_p2p.frame import TRAINER, CutReport, Frame, Kind, StepHeader, TickReport
from peer.trainer_ticks import TickBook, bound


def book() -> TickBook:
    """Two stages, tick 5 open with micro-batches of 2 and 1 samples."""
    made = TickBook(2, 1, 5)
    made.release(StepHeader(True, 0, (2, 1)), 7, 0.0)
    return made


def loss(micro_batch: int, value: float, src: int = 1) -> Frame:
    return Frame(
        Kind.LOSS, src=src, dst=TRAINER, tick=5, value=0, micro_batch=micro_batch, payload=struct.pack("<f", value)
    )


def done(src: int, wait_s: float = 0.0, cuts: tuple[CutReport, ...] = ()) -> Frame:
    payload = msgspec.msgpack.encode(TickReport(1.0, 2.0, 0.5, wait_s, cuts))
    return Frame(Kind.DONE, src=src, dst=TRAINER, tick=5, value=0, micro_batch=0, payload=payload)


def cut(src: int, dst: int, codec_s: float = 0.1, rms: float = 1.0) -> CutReport:
    return CutReport(src, dst, 10, 40, codec_s, rms, 0.0)


def test_a_report_may_hold_norms_that_are_no_numbers() -> None:
    made = book()
    assert made.take(done(0, cuts=(cut(0, 1, rms=math.nan),)), 1.0) is None
    assert made.missing() == "tick 5: 2 losses, reports of stages [1]"


def test_a_stage_may_exchange_frames_with_a_thousand_others() -> None:
    report = done(0, cuts=tuple(CutReport(0, 1000 + k, 10**9, 10**9, 0.1, 0.1, 0.1) for k in range(1000)))
    assert len(report.payload) <= bound(0, Kind.DONE, 0)


def test_a_tick_ends_with_its_last_loss_and_report() -> None:
    made = book()
    assert [made.take(f, 1.0) for f in (loss(0, 1.0), done(0), loss(1, 4.0))] == [None] * 3
    result = made.take(done(1, 3.0), 2.0)
    assert result is not None and result.loss == 2.0 and result.time_s == 2.0 and result.reports[1].wait_s == 3.0


@pytest.mark.parametrize(
    "frame",
    [
        loss(0, 1.0, src=0),
        loss(2, 1.0),
        done(2),
        *(done(0, s) for s in (math.nan, math.inf, -1.0)),
        done(-1),
        done(0, cuts=(cut(0, 2),)),
        done(0, cuts=(cut(1, 1),)),
        done(0, cuts=(cut(0, 1), cut(0, 1))),
        done(0, cuts=(cut(0, 1, codec_s=math.nan),)),
        done(0, cuts=(cut(0, 1, codec_s=-1.0),)),
        done(0, cuts=(cut(0, 1, rms=-1.0),)),
    ],
    ids=str,
)
def test_what_a_stage_may_not_say(frame: Frame) -> None:
    made = book()
    with pytest.raises(FrameError):
        made.take(frame, 1.0)
    assert made.missing() == "tick 5: 2 losses, reports of stages [0, 1]"

"""Frames that came again with other bytes: told once, counted over hosts, in the report."""

from __future__ import annotations

from peer.events import Happening, RunEvent
from peer.protocol import StageStatus
from peer.report import Report
from peer.trainer_watch import Watch


def status(stage: int, incarnation: int, differing: int) -> StageStatus:
    return StageStatus(run="ab" * 16, stage=stage, incarnation=incarnation, tick=3, differing=differing)


def test_a_run_is_exact_to_the_bit_until_a_frame_comes_again_otherwise_and_that_is_said_once() -> None:
    heard: list[Happening] = []
    report = Report()

    def sink(happening: Happening) -> None:
        heard.append(happening)
        report(happening)

    watch = Watch(sink, lambda: 5.0)
    watch.status(status(0, 1, 0), {}, 0)
    assert report.as_dict("")["exact_to"] == "bit" and not [h for h in heard if isinstance(h, RunEvent)]
    watch.status(status(1, 1, 2), {}, 0)
    watch.status(status(1, 1, 3), {}, 0)
    watch.status(status(1, 4, 1), {}, 5)  # rebuilt: it counts anew, and the trainer's own streams count too
    watch.begin()
    watch.status(status(1, 5, 0), {}, 0)
    said = [h for h in heard if isinstance(h, RunEvent)]
    assert [(e.kind, e.stage) for e in said] == [("notice", 1)] and "exact to rounding" in said[0].text
    shown = report.as_dict("")
    assert (shown["exact_to"], shown["differing_frames"]) == ("rounding", 3 + 1 + 5)

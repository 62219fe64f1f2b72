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
    watch.status(status(0, 1, 0), 2, {}, 0)
    assert report.as_dict("")["exact_to"] == "bit" and not [h for h in heard if isinstance(h, RunEvent)]
    watch.status(status(1, 1, 2), 2, {}, 0)
    watch.status(status(1, 1, 3), 2, {}, 0)
    watch.status(status(1, 4, 1), 2, {}, 5)  # rebuilt: it counts anew, and the trainer's own streams count too
    watch.begin()
    watch.status(status(1, 5, 0), 2, {}, 0)
    said = [h for h in heard if isinstance(h, RunEvent)]
    assert [(e.kind, e.stage) for e in said] == [("notice", 1)] and "exact to rounding" in said[0].text
    shown = report.as_dict("")
    assert (shown["exact_to"], shown["differing_frames"]) == ("rounding", 3 + 1 + 5)


def test_a_stage_speaks_of_its_own_links_only() -> None:
    watch = Watch(lambda happening: None, lambda: 5.0)
    for k in range(100):
        made_up = {f"1-{7 + 5000 * k + n}": 1 for n in range(4000)}
        said = StageStatus(
            run="ab" * 16, stage=1, incarnation=1, tick=3, bytes_sent={**made_up, "1-0": k, "1--1": 5, "0-1": 10**9}
        )
        watch.status(said, 2, {"-1-0": 3})
    assert watch.bytes_sent == {"1-0": 99, "1--1": 5, "-1-0": 3}


def test_ends_that_no_longer_agree_make_the_run_exact_to_rounding() -> None:
    heard: list[Happening] = []
    report = Report()

    def sink(happening: Happening) -> None:
        heard.append(happening)
        report(happening)

    watch = Watch(sink, lambda: 5.0)
    watch.apart(1)
    watch.apart(2)
    watch.status(status(0, 1, 0), 2, {}, 0)
    assert [e.stage for e in heard if isinstance(e, RunEvent)] == [1]
    assert report.as_dict("")["exact_to"] == "rounding"

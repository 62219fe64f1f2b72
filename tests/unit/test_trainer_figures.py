"""Stage times, bytes a step and receipts, as a trainer and a volunteer publish them."""

from __future__ import annotations

from dht.identity import Identity
from fusion_p2p.plan import LinkCodec, Numerics, Plan, StagePlacement
from peer.events import LinkBytes, StepResult
from peer.protocol import StageStatus, Took
from peer.receipts import receipts
from peer.trainer_figures import Figures, ratio
from peer.volunteer import HostedStage

ME, NEXT, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
RUN = "ab" * 16


def plan(codec: str = "int8") -> Plan:
    numerics = Numerics(cuts=(3,), codecs=(LinkCodec(0, 1, codec),), micro_batches=4, micro_batch_size=2)
    return Plan(
        number=1,
        epoch=1,
        numerics=numerics,
        placement=(StagePlacement(stage=0, peer=ME), StagePlacement(stage=1, peer=NEXT)),
    )


def step(number: int) -> StepResult:
    return StepResult(step=number, loss=1.0, step_time_s=1.0, samples=8, stages={0: (0.3, 0.6), 1: (0.8, 0.1)})


def fed(reports: list[tuple[int, int, float]]) -> Figures:
    """(step, bytes so far on link 0-1, seconds that stage 0 was held up so far)"""
    figures = Figures()
    for number, sent, held in reports:
        figures.take(step(number))
        figures.take(LinkBytes({"0-1": sent, "-1-0": 10 * number}, {1: "a gradient"}, {0: held}))
    return figures


def test_bytes_a_step_span_reports_not_steps() -> None:
    figures = fed([(0, 1000, 0.0), (2, 1000, 0.0), (10, 11000, 2.0), (11, 11000, 2.0), (15, 11000, 2.0)])
    by_ends = {(k.src, k.dst): k for k in figures.links(plan())}
    link = by_ends[0, 1]
    assert (link.bytes_sent, link.bytes_per_step, link.codec) == (11000, 1000, "int8")
    assert 3.5 < link.dense_bytes_per_step / link.bytes_per_step < 4.1
    assert by_ends[-1, 0].bytes_per_step == by_ends[-1, 0].dense_bytes_per_step == 10


def test_time_held_up_is_told_from_waiting() -> None:
    first, second = fed([(0, 1000, 0.0), (10, 11000, 2.0)]).stages(plan())
    assert (first.compute_s, first.send_s) == (0.3, 0.2)
    assert first.wait_s is not None and abs(first.wait_s - 0.4) < 1e-9
    assert (second.compute_s, second.send_s, second.waiting_for) == (0.8, None, "a gradient")


def test_a_new_plan_starts_anew() -> None:
    figures = fed([(0, 1000, 0.0), (10, 11000, 2.0)])
    figures.adopt()
    assert all(k.bytes_per_step == 0 for k in figures.links(plan()))
    assert Figures().links(plan()) == () and Figures().stages(plan())[0].compute_s is None


def test_ratios_are_the_codecs_own() -> None:
    assert abs(ratio("dense", forward=True) - 1) < 0.01
    assert ratio("topk-masked:0.01", forward=False) > ratio("topk-masked:0.01", forward=True) > 20


def held(stage: int, took: dict[int, Took]) -> HostedStage:
    status = StageStatus(run=RUN, stage=stage, incarnation=1, tick=5, accepted=took)
    made = HostedStage.__new__(HostedStage)
    made.status, made.hosts = status, {0: ME, 1: NEXT, 2: OTHER}
    return made


def test_receipts_speak_of_others_only() -> None:
    took = {0: Took(9, 9, 9.0), 1: Took(4, 400, 8e9), 7: Took(1, 1, 1.0), -1: Took(5, 5, 0.0)}
    (found,) = receipts(ME, {(RUN, 2): held(2, took), (RUN, 0): held(0, {1: Took(2, 100, 8e9)})})
    assert (found.peer, found.run) == (ME, RUN)
    (credit,) = found.credits  # of one stage by two of mine: frames add up, its work counts once
    assert (credit.peer, credit.stage, credit.frames, credit.bytes_accepted, credit.flops) == (NEXT, 1, 6, 500, 8e9)

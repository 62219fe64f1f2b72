"""The live view: prediction beside what steps take, codecs beside links."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from fusion_p2p.plan import LinkCodec, Numerics, Plan, Prediction, StagePlacement
from peer.events import LinkBytes, PlanAdopted, RunEvent, StepResult
from peer.view import Picture, View

PLAN = Plan(
    number=1,
    epoch=1,
    numerics=Numerics(cuts=(3,), codecs=(LinkCodec(0, 1, "rotated:4/2"),), micro_batches=2, micro_batch_size=1),
    placement=(StagePlacement(stage=0, peer="12D3peerA"), StagePlacement(stage=1, peer="12D3peerB")),
    prediction=Prediction(0.5, {"compute": 0.3, "transfer": 0.2}, 0.25),
    reasons=("link 0-1: rotated:4/2, because",),
)


def test_the_panel_holds_prediction_against_steps() -> None:
    picture = Picture("run", 10, None, 0.0)
    picture.take(PlanAdopted(PLAN))
    for step in range(2):
        picture.take(StepResult(step=step, loss=1.0, step_time_s=0.75, samples=2, tokens=0))
    picture.take(LinkBytes({"0-1": 1000, "1-0": 500, "-1-0": 200}, {1: "stage 0"}))
    out = io.StringIO()
    Console(file=out, width=160).print(picture.panel())
    text = out.getvalue()
    assert "predicted step time 0.5 s (compute 0.3, transfer 0.2); at best 0.25 s; the last 2 took 0.75 s" in text
    assert "0→1 rotated:4/2 1.0 kB" in text and "1→0 rotated:4/2 500 B" in text and "trainer→0 200 B" in text


def test_the_panel_says_why_each_codec_and_what_the_gate_found() -> None:
    picture = Picture("run", 10, None, 0.0)
    why = "from step 9: link 0-1 transform:2/1 to transform:3/2: loss jumped from 2 to 3"
    picture.take(PlanAdopted(msgspec.structs.replace(PLAN, reasons=("stage 0: small", *PLAN.reasons, why))))
    picture.take(RunEvent(kind="gate", text="step 7: loss jumped from 2 to 3 (numerics are pinned)", time_s=0.0))
    out = io.StringIO()
    Console(file=out, width=160).print(picture.panel())
    text = out.getvalue()
    assert "link 0-1: rotated:4/2, because" in text and why in text
    assert "step 7: loss jumped from 2 to 3" in text and "stage 0: small" not in text


def test_plain_lines_explain_the_plan() -> None:
    out = io.StringIO()
    with View("run", 10, console=Console(file=out)) as view:
        view(PlanAdopted(PLAN))
    assert out.getvalue() == PLAN.explain() + "\n"
    assert "link 0-1: rotated:4/2\n" in out.getvalue()

"""What stages report of their cuts: true bytes, norms, the gradient's bias; the same on every replay."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.frame import CutReport, Frame, Kind, TickReport
from fusion_p2p.plan import LinkCodec
from tests.unit import stage_models as models


def reports(codec: str, steps: int = 2) -> tuple[list[dict[int, tuple[CutReport, ...]]], dict[Kind, int]]:
    """(per step: stage -> its cuts; bytes of ACT and GRAD frames of the last step)."""
    case = models.gpt2()
    heard: list[dict[int, tuple[CutReport, ...]]] = []
    sent: dict[Kind, int] = {}

    def hear(frame: Frame) -> None:
        if frame.tick == steps - 1:
            sent[frame.kind] = sent.get(frame.kind, 0) + len(frame.payload)

    pipeline = case.pipeline(
        2, codecs=[LinkCodec(0, 1, codec)], on_frame=hear, on_report=lambda stage, r: heard[-1].update({stage: r.cuts})
    )
    for step in range(steps):
        heard.append({})
        pipeline.train_step(case.batch(step))
    return heard, sent


def test_bytes_are_those_of_the_frames() -> None:
    heard, sent = reports("int8")
    (ahead,), (back,) = heard[-1][0], heard[-1][1]
    assert (ahead.src, ahead.dst, back.src, back.dst) == (0, 1, 0, 1)
    assert (ahead.sent_bytes, back.sent_bytes) == (sent[Kind.ACT], sent[Kind.GRAD])
    assert ahead.elements == back.elements > 0
    assert ahead.rms > 0 and back.rms == 0


def test_biased_codecs_show_as_such() -> None:
    bias = {name: reports(name)[0][-1][1][0].bias for name in ("dense", "topk:0.05", "rotated:4/2")}
    assert bias["dense"] == 0.0
    assert -1 < bias["topk:0.05"] < -0.1
    assert abs(bias["rotated:4/2"]) < 0.02


def test_a_replay_measures_the_same() -> None:
    first, again = (
        [{s: [c[:4] + c[5:] for c in map(msgspec.structs.astuple, cuts)] for s, cuts in step.items()} for step in steps]
        for steps in (reports("transform:2/1")[0], reports("transform:2/1")[0])
    )
    assert first == again


@pytest.mark.parametrize("name", ["transform:2/1", "subspace:8/4", "topk-masked:0.1", "rotated:4/2", "int8"])
def test_measuring_leaves_the_codec_as_it_is(name: str) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    measured, plain = parse(name), parse(name)
    for step in range(3):
        key = FrameKey(0, step, 0, 1)
        sent, _ = parse(name).encode_forward(x, FrameKey(0, 0, 0, 1))
        frames = []
        for codec in (measured, plain):
            _, aux = codec.decode_forward(sent, (64, 32), torch.float32, FrameKey(0, 0, 0, 1))
            frames.append(codec.encode_backward(x * 2, aux, key))
            if codec is measured:
                codec.mirror().decode_backward(frames[-1], (64, 32), torch.float32, aux, key)
        assert frames[0] == frames[1]
        state = [c.state_dict() for c in (measured, plain)]
        assert {k: t.tolist() for k, t in state[0].items()} == {k: t.tolist() for k, t in state[1].items()}


def test_a_report_of_an_evaluation_has_no_cuts() -> None:
    case = models.gpt2()
    heard: list[TickReport] = []
    case.pipeline(2, on_report=lambda stage, r: heard.append(r)).evaluate([case.batch(0)])
    assert [r.cuts for r in heard] == [(), ()]

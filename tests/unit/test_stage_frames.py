"""Frames in and out of stages: any interleaving gives the same bytes; what does not fit is refused."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import FrameError, FusionError, InputError
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader, Verdict
from fusion_p2p.inbox import TICKS_AHEAD
from fusion_p2p.optim import SGD
from fusion_p2p.plan import LinkCodec, Numerics
from fusion_p2p.release import cut_batch, release
from fusion_p2p.snapshot import PARAM, initial_state, weights, weights_blake2b
from fusion_p2p.split import split
from fusion_p2p.stage import Stage
from tests.unit import stage_models as models

Channels = dict[tuple[int, int], list[Frame]]
TICKS = (True, True, False, True)  # training, evaluation between
CODECS = (LinkCodec(0, 1, "dense:bf16"),)


def make_stages(count: int, windows: tuple[int, ...] = (1, 2, 3, 4)) -> list[Stage]:
    case = models.skip_net()
    numerics = Numerics(cuts=case.cuts(count), micro_batches=3, micro_batch_size=3, codecs=CODECS)
    return [
        Stage(
            p, case.captured.opdag, numerics, SGD(lr=0.1, momentum=0.9, clip_norm=0.5), 3,
            initial_state(case.captured.state, p), window=windows[p.stage],
        )
        for p in split(case.captured.opdag, numerics.cuts)
    ]  # fmt: skip


def released(stages: list[Stage]) -> list[Frame]:
    """All ticks at once: the trainer runs ahead."""
    case = models.skip_net()
    frames: list[Frame] = []
    step = 0
    for tick, training in enumerate(TICKS):
        sizes, parts = cut_batch(case.captured.opdag, case.captured.feed(case.batch(tick)), 3, training=True)
        header = StepHeader(training, step, sizes)
        frames += release(case.captured.opdag, [s.program for s in stages], tick, header, parts)
        step += training
    return frames


def run(count: int, windows: tuple[int, ...], choose: random.Random) -> tuple[Channels, str]:
    """Deliver and advance in an order drawn from `choose`; frames keep their order only within a channel."""
    stages = make_stages(count, windows)
    queues: dict[tuple[int, int], deque[Frame]] = defaultdict(deque)
    sent: Channels = defaultdict(list)
    for frame in released(stages):
        queues[frame.src, frame.dst].append(frame)
    while any(s.tick < len(TICKS) for s in stages):
        moves: list[tuple[int, int] | Stage] = [c for c in queues if queues[c]] + [
            s for s in stages if not s.waiting_for()
        ]
        assert moves, [s.waiting_for() for s in stages]
        move = choose.choice(moves)
        if not isinstance(move, Stage):
            stages[move[1]].offer(queues[move].popleft())
            continue
        for frame in move.advance() or ():
            sent[frame.src, frame.dst].append(frame)
            if frame.dst != TRAINER:
                queues[frame.src, frame.dst].append(frame)
    assert not any(queues.values())
    return dict(sent), weights_blake2b(weights(s.snapshot() for s in stages))


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False), st.tuples(*[st.integers(1, 3)] * 4))
def test_timing_changes_no_byte(choose: random.Random, windows: tuple[int, ...]) -> None:
    """Frames of every channel, in their order, and the weights are the same for every interleaving and window."""
    want = run(4, (1, 1, 1, 1), random.Random(0))
    assert run(4, windows, choose) == want


def test_no_frame_goes_to_its_sender_or_upstream_too_early() -> None:
    sent, _ = run(4, (4, 3, 2, 1), random.Random(1))
    for (src, dst), frames in sent.items():
        assert src != dst
        kinds = {f.kind for f in frames}
        if dst == TRAINER:
            assert kinds <= {Kind.LOSS, Kind.DONE}
        elif dst > src:
            assert kinds <= {Kind.ACT, Kind.WEIGHT, Kind.VERDICT}
        else:
            assert kinds <= {Kind.GRAD, Kind.WGRAD, Kind.NORM}
        assert [f.tick for f in frames] == sorted(f.tick for f in frames)
    verdicts = [f for f in sent[0, 3] if f.kind is Kind.VERDICT]
    assert [f.tick for f in verdicts] == [t for t, training in enumerate(TICKS) if training]
    verdict = msgspec.msgpack.decode(verdicts[0].payload, type=Verdict)
    assert verdict.apply
    assert verdict.scale == pytest.approx(min(1.0, 0.5 / (verdict.norm + 1e-6)))


def test_window_bounds_micro_batches_in_flight() -> None:
    stages = make_stages(2, (2, 1))
    for frame in released(stages):
        if frame.dst == 0:
            stages[0].offer(frame)
    acts = [f for _ in range(10) for f in stages[0].advance() or () if f.kind is Kind.ACT]
    assert {f.micro_batch for f in acts} == {0, 1}
    assert stages[0].waiting_for().startswith("backward of tick 0, micro-batch 0: GRAD of value ")


def test_waiting_is_named() -> None:
    first, last = make_stages(2)
    assert first.advance() is None
    assert first.waiting_for() == "open of tick 0, micro-batch 0: STEP from the trainer"
    last.offer(next(f for f in released([first, last]) if f.dst == 1))
    assert "WEIGHT" in last.waiting_for() or last.advance() == []


def changed(frame: Frame, **fields: object) -> Frame:
    return msgspec.structs.replace(frame, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dst": 1}, "meant for stage 1"),
        ({"src": 1}, "takes no"),
        ({"value": 10**6}, "takes no"),
        ({"kind": Kind.VERDICT}, "takes no"),
        ({"tick": TICKS_AHEAD}, "is at tick 0"),
        ({"tick": -1}, "is at tick 0"),
        ({"micro_batch": -1}, "micro-batch -1"),
        ({"micro_batch": 1 << 20}, "micro-batch 1048576"),
        ({"payload": bytes(1 << 20)}, "at most"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(fields: dict[str, object], words: str) -> None:
    stage = make_stages(2)[0]
    data = next(f for f in released([stage]) if f.kind is Kind.DATA)
    with pytest.raises(FrameError, match=words):
        stage.offer(changed(data, **fields))
    stage.offer(data)
    with pytest.raises(FrameError, match="comes after"):
        stage.offer(data)


@pytest.mark.parametrize("kind", [Kind.ACT, Kind.GRAD, Kind.NORM, Kind.VERDICT, Kind.WEIGHT, Kind.WGRAD])
def test_who_sent_a_malformed_payload_is_named(kind: Kind) -> None:
    stages = make_stages(3)
    waiting = deque(f for f in released(stages) if f.tick == 0)
    changed_one: Frame | None = None
    with pytest.raises(FrameError) as caught:
        while waiting or not all(s.waiting_for() for s in stages):
            while waiting:
                frame = waiting.popleft()
                if frame.kind is kind and changed_one is None:
                    changed_one = frame = changed(frame, payload=frame.payload[:-1] or b"\xc1")
                stages[frame.dst].offer(frame)
            for s in stages:
                waiting.extend(f for f in s.advance() or () if f.dst != TRAINER)
    assert changed_one is not None and caught.value.src == changed_one.src


def test_bound_is_told_before_a_payload_is_read() -> None:
    stage = make_stages(2)[0]
    data = next(f for f in released([stage]) if f.kind is Kind.DATA)
    assert len(data.payload) <= stage.bound(TRAINER, Kind.DATA, data.value) < 200
    with pytest.raises(FrameError, match="same plan"):
        stage.bound(1, Kind.ACT, data.value)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (StepHeader(True, 0, ()), "0 micro-batches"),
        (StepHeader(True, 0, (1, 1, 1, 1)), "4 micro-batches, the plan at most 3"),
        (StepHeader(True, 0, (4,)), "outside 1..3"),
        (StepHeader(True, -1, (1,)), "step -1"),
    ],
)
def test_a_step_header_that_lies_is_refused(header: StepHeader, words: str) -> None:
    stage = make_stages(2)[0]
    with pytest.raises(FrameError, match=words):
        stage.offer(Frame(Kind.STEP, TRAINER, 0, 0, 0, 0, msgspec.msgpack.encode(header)))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.sampled_from([Kind.STEP, Kind.DATA]))
def test_any_bytes_end_in_a_frame_error_or_nothing(payload: bytes, kind: Kind) -> None:
    stage = make_stages(1)[0]
    for frame in released([stage]):
        if frame.tick > 0:
            break
        hit = frame.kind is kind and frame.micro_batch == 0
        try:
            stage.offer(changed(frame, payload=payload) if hit else frame)
        except FrameError:
            return
    with pytest.raises(FrameError):
        while stage.advance() is not None:
            pass


def test_labels_outside_the_embedding_are_refused() -> None:
    """By the trainer when it feeds them, and by a stage, whatever a trainer sends."""
    case = models.gpt2()
    dag, batch = case.captured.opdag, case.batch(0)
    with pytest.raises(InputError, match=r"holds .*50, but the model indexes 0\.\.49"):
        case.captured.feed(batch | {"input_ids": torch.full_like(batch["input_ids"], 50)})
    (stage,) = case.pipeline(1).stages
    sizes, parts = cut_batch(
        dag, {v: torch.full_like(x, 50) for v, x in case.captured.feed(batch).items()}, 2, training=True
    )
    header = StepHeader(True, 0, sizes[:1])
    for frame in release(dag, [stage.program], 0, header, parts[:1]):
        stage.offer(frame)
    with pytest.raises(FrameError, match=r"values 50\.\.50, allowed 0\.\.49"):
        while stage.advance() is not None:
            pass


@pytest.mark.parametrize(("square", "words"), [(-1.0, "is negative"), (float("nan"), ""), (float("inf"), "")])
def test_norms_that_lie_skip_the_step_or_end_in_a_frame_error(square: float, words: str) -> None:
    stages = make_stages(2)
    waiting = deque(f for f in released(stages) if f.tick == 0)

    def parameters() -> str:  # batch norm's statistics go on though the update is skipped
        return weights_blake2b({k: t for s in stages for k, t in s.snapshot().items() if k.startswith(PARAM)})

    before = parameters()

    def deliver() -> None:
        while waiting or not all(s.waiting_for() for s in stages):
            while waiting:
                frame = waiting.popleft()
                if frame.kind is Kind.NORM:
                    norms = dict.fromkeys(msgspec.msgpack.decode(frame.payload), square)
                    frame = changed(frame, payload=msgspec.msgpack.encode(norms))
                stages[frame.dst].offer(frame)
            for s in stages:
                waiting.extend(f for f in s.advance() or () if f.dst != TRAINER)

    if words:
        with pytest.raises(FrameError, match=words) as caught:
            deliver()
        assert caught.value.src == 1
        return
    deliver()
    assert [s.tick for s in stages] == [1, 1]
    assert parameters() == before


def test_who_names_anothers_parameter_in_its_norms_is_blamed_and_not_the_other() -> None:
    stages = make_stages(3)
    stolen = stages[2].program.params[0]
    waiting = deque(f for f in released(stages) if f.tick == 0)
    with pytest.raises(FrameError, match="norms of stage 1 name") as caught:
        while waiting or not all(s.waiting_for() for s in stages):
            while waiting:
                frame = waiting.popleft()
                if frame.kind is Kind.NORM and frame.src == 1:
                    norms = msgspec.msgpack.decode(frame.payload) | {stolen: 1.0}
                    frame = changed(frame, payload=msgspec.msgpack.encode(norms))
                stages[frame.dst].offer(frame)
            for s in stages:
                waiting.extend(f for f in s.advance() or () if f.dst != TRAINER)
    assert caught.value.src == 1


def test_snapshots_only_between_ticks() -> None:
    stage = make_stages(1)[0]
    for frame in released([stage]):
        stage.offer(frame)
    stage.snapshot()
    stage.advance()
    with pytest.raises(FusionError, match="inside tick 0"):
        stage.snapshot()


def test_a_state_that_does_not_fit_is_refused() -> None:
    case = models.skip_net()
    (program,) = split(case.captured.opdag, ())
    good = initial_state(case.captured.state, program)
    numerics = Numerics(cuts=(), micro_batches=3, micro_batch_size=3)
    for bad, words in [
        ({k: t for k, t in good.items() if not k.endswith("last.bias")}, "lacks param/net.last.bias"),
        (good | {"param/net.last.bias": torch.zeros(4)}, r"\(4,\), the model has float32 \(3,\)"),
        (good | {"param/net.last.bias": torch.zeros(3).double()}, "float64"),
    ]:
        with pytest.raises(InputError, match=words):
            Stage(program, case.captured.opdag, numerics, SGD(lr=0.1), 0, bad)

"""Stages against plain PyTorch loops, and against themselves: other cuts, recomputation, resumption, eval."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.frame import TRAINER, Frame, Kind
from fusion_p2p.optim import SGD, AdamW
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import LinkCodec
from fusion_p2p.sent import SentHash
from fusion_p2p.snapshot import from_bytes, redistribute, to_bytes, weights, weights_blake2b
from fusion_p2p.stage import Stage
from tests.cluster import plain
from tests.unit import stage_models as models
from tests.unit.stage_models import Case, relative

STEPS = 20


def losses(pipeline: LocalPipeline, case: Case, steps: int) -> list[float]:
    return [pipeline.train_step(case.batch(step)) for step in range(steps)]


def its_own_loss(output: Any, batch: Any) -> torch.Tensor:
    return output.loss


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gpt2_equals_the_plain_loop(stages: int) -> None:
    case = models.gpt2()
    want, model = models.plain_loop(case, STEPS, its_own_loss)
    pipeline = case.pipeline(stages)
    assert losses(pipeline, case, STEPS) == pytest.approx(want, rel=1e-6)
    got, reference = pipeline.state_dict(), model.state_dict()
    assert got.keys() == reference.keys()
    everything = [torch.cat([state[n].flatten() for n in sorted(reference)]) for state in (got, reference)]
    assert relative(*everything) < 2e-6
    for name, tensor in reference.items():
        assert relative(*(plain.without_keys(name, t) for t in (got[name], tensor))) < 1e-5, name
    model.load_state_dict(got, strict=True)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gpt2_equals_our_order_of_tied_uses_bit_for_bit(stages: int) -> None:
    case = models.gpt2()
    batches = [case.batch(step) for step in range(STEPS)]
    want, params = plain.train_in_our_order(
        case.model(), batches, lambda ps: torch.optim.AdamW(ps, lr=1e-3), micro_batch_size=2, clip_norm=1.0
    )
    pipeline = case.pipeline(stages)
    assert losses(pipeline, case, STEPS) == want
    got = pipeline.state_dict()
    for name, p in params.items():
        assert torch.equal(got[name], p), name


@pytest.mark.parametrize("stages", [1, 3])
def test_resnet_equals_the_plain_loop(stages: int) -> None:
    case = models.resnet()
    want, model = models.plain_loop(case, 8, its_own_loss)
    pipeline = case.pipeline(stages)
    assert losses(pipeline, case, 8) == pytest.approx(want, rel=1e-5)
    for name, tensor in model.state_dict().items():
        assert relative(pipeline.state_dict()[name], tensor) < 1e-5, name


@pytest.mark.parametrize("name", ["gpt2-dropout", "skip-net"])
def test_cuts_do_not_change_a_bit(name: str) -> None:
    case = models.gpt2(0.1) if name == "gpt2-dropout" else models.skip_net()
    whole = case.pipeline(1)
    want = losses(whole, case, 4)
    for stages in (2, 4):
        pipeline = case.pipeline(stages)
        assert losses(pipeline, case, 4) == want
        assert pipeline.weights_blake2b() == whole.weights_blake2b()
    again = case.pipeline(1)
    losses(again, case, 4)
    assert again.weights_blake2b() == whole.weights_blake2b()


def test_a_smaller_last_micro_batch_weighs_by_its_samples() -> None:
    case = models.gpt2()
    uneven = case.pipeline(2, micro_batches=3, micro_batch_size=3)
    whole = case.pipeline(2, micro_batches=1, micro_batch_size=8)
    assert losses(uneven, case, 3) == pytest.approx(losses(whole, case, 3), rel=1e-6)


def test_recomputation_does_not_change_a_bit() -> None:
    for case in (models.gpt2(0.1), models.skip_net()):
        plain, recomputed = case.pipeline(3), case.pipeline(3, recompute=True)
        assert losses(plain, case, 3) == losses(recomputed, case, 3)
        assert plain.weights_blake2b() == recomputed.weights_blake2b()


def test_evaluation_changes_nothing_and_repeats() -> None:
    case = models.skip_net()
    pipeline = case.pipeline(3)
    losses(pipeline, case, 2)
    before = pipeline.weights_blake2b()
    first = pipeline.evaluate([case.batch(7), case.batch(8)])
    assert pipeline.evaluate([case.batch(7), case.batch(8)]) == first
    assert pipeline.weights_blake2b() == before
    undisturbed = case.pipeline(3)
    losses(undisturbed, case, 2)
    assert pipeline.train_step(case.batch(2)) == undisturbed.train_step(case.batch(2))
    assert pipeline.weights_blake2b() == undisturbed.weights_blake2b()


def test_evaluation_equals_the_module_in_eval_mode() -> None:
    case = models.gpt2(0.1)
    with torch.no_grad():
        want = float(case.model().eval()(**case.batch(3)).loss)
    assert case.pipeline(2).evaluate([case.batch(3)]) == pytest.approx(want, rel=1e-6)


def test_shorter_sequences_are_padded_to_the_captured_length() -> None:
    """Padding that nothing looks at and labels that nothing counts: the module's own loss on the short batch."""
    case = models.gpt2()
    short = {k: t[:, :7] for k, t in case.batch(3).items()}
    with pytest.raises(InputError, match=r"shape \(8, 7\), captured as \(samples, 12\); pad or cut each batch"):
        case.pipeline(2).train_step(short)
    fill = {"input_ids": 0, "labels": -100}
    padded = {k: torch.nn.functional.pad(t, (0, 5), value=fill[k]) for k, t in short.items()}
    want = float(case.model()(**short).loss.detach())
    assert case.pipeline(2).train_step(padded) == pytest.approx(want, rel=1e-6)


def test_a_single_sample_left_over_for_batch_norm_is_refused_before_anything_runs() -> None:
    case = models.skip_net()
    x, y = case.batch(0)
    pipeline = case.pipeline(2)
    with pytest.raises(InputError, match=r"7 samples in micro-batches of 3 .* batch norm of 'net\.norm\.weight'"):
        pipeline.train_step((x[:7], y[:7]))
    assert pipeline.evaluate([(x[:7], y[:7])]) > 0
    pipeline.train_step((x, y))
    images = models.resnet()  # its batch norms see many values of a single sample
    images.pipeline(2, micro_batch_size=1, micro_batches=6).train_step(images.batch(0))


def test_unused_parameter_is_left_alone() -> None:
    case = models.skip_net()
    pipeline = case.pipeline(2, optimizer=AdamW(lr=0.1, weight_decay=0.5))
    losses(pipeline, case, 2)
    assert torch.equal(pipeline.state_dict()["net.unused"], torch.ones(2))


def test_frozen_first_stage_skips_its_backward() -> None:
    case = models.frozen(models.skip_net(), "net.first.")
    seen: list[Frame] = []
    pipeline = case.pipeline(case.atoms, on_frame=seen.append)
    losses(pipeline, case, 2)
    assert not pipeline.programs[0].backward
    assert not [f for f in seen if f.kind is Kind.GRAD and f.dst == 0]
    assert [f for f in seen if f.kind is Kind.GRAD]
    frozen = case.model().state_dict()
    got = pipeline.state_dict()
    for name in ("net.first.weight", "net.first.bias"):
        assert torch.equal(got[name], frozen[name])
        assert not [k for s in pipeline.stages for k in s.snapshot() if k.startswith("optim/") and k.endswith(name)]
    whole = case.pipeline(1)
    losses(whole, case, 2)
    assert whole.weights_blake2b() == pipeline.weights_blake2b()


def test_a_step_with_nan_is_skipped() -> None:
    case = models.skip_net()
    pipeline = case.pipeline(2, optimizer=SGD(lr=0.1, momentum=0.9))
    x, y = case.batch(0)
    before = {n: t for n, t in pipeline.state_dict().items() if "norm" not in n}
    assert torch.tensor(pipeline.train_step((x * float("nan"), y))).isnan()
    after = pipeline.state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def resumed(pipeline: LocalPipeline, case: Case, **options: Any) -> LocalPipeline:
    """A pipeline that goes on from the other's snapshots, through bytes."""
    held = [from_bytes(to_bytes(s.snapshot())) for s in pipeline.stages]
    new = case.pipeline(1, **options)
    new.stages = [
        Stage(p, case.captured.opdag, new.numerics, new.optimizer, 0, redistribute(held, p), first_tick=pipeline.step)
        for p in new.programs
    ]
    new.step = new.tick = pipeline.step
    return new


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_resuming_from_snapshots_under_another_cut_changes_nothing(stages: int) -> None:
    case = models.skip_net()
    through = case.pipeline(3)
    losses(through, case, 5)
    stopped = case.pipeline(3)
    losses(stopped, case, 3)
    new = resumed(stopped, case, cuts=case.cuts(stages))
    for step in (3, 4):
        new.train_step(case.batch(step))
    assert new.weights_blake2b() == through.weights_blake2b()


def test_state_of_the_pipeline_is_its_own() -> None:
    case = models.skip_net()
    before = {n: t.clone() for n, t in case.captured.state.items()}
    pipeline = case.pipeline(2)
    losses(pipeline, case, 1)
    for name, tensor in before.items():
        assert torch.equal(case.captured.state[name], tensor)
    assert weights_blake2b(weights(s.snapshot() for s in pipeline.stages)) == pipeline.weights_blake2b()


def test_codecs_apply_to_their_link_both_ways_only() -> None:
    case = models.gpt2()
    seen: list[Frame] = []
    pipeline = case.pipeline(3, codecs=(LinkCodec(0, 1, "dense:bf16"),), on_frame=seen.append)
    want = losses(case.pipeline(3), case, 3)
    got = losses(pipeline, case, 3)
    assert got != want
    assert got == pytest.approx(want, rel=1e-2)
    sizes = {(f.kind, f.src, f.dst): len(f.payload) for f in seen if f.value == pipeline.programs[0].edges_out[0].value}
    assert sizes[Kind.ACT, 0, 1] < 0.6 * 4 * 2 * 12 * 32
    assert sizes[Kind.GRAD, 1, 0] == sizes[Kind.ACT, 0, 1]


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "topk-masked:0.1", "rotated:4/2", "subspace:4/2"])
def test_any_codec_resumes_bit_for_bit(codec: str) -> None:
    """What a codec carries from step to step is in the snapshot of both ends."""
    case = models.gpt2()
    options: dict[str, Any] = {"codecs": (LinkCodec(0, 1, codec), LinkCodec(1, 2, codec))}
    through, stopped = case.pipeline(3, **options), case.pipeline(3, **options)
    want = losses(through, case, 5)
    losses(stopped, case, 3)
    stopped.evaluate([case.batch(9)])
    held = [from_bytes(to_bytes(s.snapshot())) for s in stopped.stages]
    new = case.pipeline(3, **options)
    new.stages = [
        Stage(p, case.captured.opdag, new.numerics, new.optimizer, 0, state, first_tick=7)
        for p, state in zip(new.programs, held, strict=True)
    ]
    new.step, new.tick = 3, 7
    assert [new.train_step(case.batch(step)) for step in (3, 4)] == want[3:]
    assert new.weights_blake2b() == through.weights_blake2b()


def test_bfloat16_compute_stays_near_float32() -> None:
    case = models.gpt2()
    exact, rounded = case.pipeline(2), case.pipeline(2, dtype="bfloat16")
    want, got = losses(exact, case, 10), losses(rounded, case, 10)
    assert got != want
    assert got == pytest.approx(want, rel=1e-2)
    assert all(t.dtype == torch.float32 for t in rounded.state_dict().values())


def test_what_is_sent_has_one_hash_whenever_it_is_sent() -> None:
    frames = [
        Frame(kind, 1, dst, 5, 0, m, b"%d" % m) for m in range(3) for kind, dst in ((Kind.ACT, 2), (Kind.GRAD, 0))
    ]
    one, other, changed = SentHash(), SentHash(), SentHash()
    one.add(frames)
    other.add([f for f in frames if f.kind is Kind.GRAD])
    other.add([f for f in frames if f.kind is Kind.ACT])
    other.add([Frame(Kind.DONE, 1, TRAINER, 0, 0, 0, b"seconds")])
    changed.add([*frames[:-1], msgspec.structs.replace(frames[-1], payload=b"lie")])
    assert one.digest() == other.digest() != changed.digest() and len(one.digest()) == 16

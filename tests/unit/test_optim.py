"""Optimizers: torch.optim's results to the last bit, schedules, groups, state by name, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.optim import SGD, AdamW, Constant, Cosine, Linear, Optimizer, factor, from_torch, weight_decay
from fusion_p2p.settings import OptimizerSpec, Schedule, WeightDecayGroup


def named_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(7, 5, generator=g),
        "a.bias": torch.randn(7, generator=g),
        "b": torch.randn(3, generator=g),
    }


TorchMaker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

PAIRS: list[tuple[OptimizerSpec, TorchMaker]] = [
    (AdamW(lr=3e-3), lambda ps: torch.optim.AdamW(ps, lr=3e-3)),
    (
        AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    (SGD(lr=0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    ),
    (
        SGD(lr=0.1, momentum=0.9, dampening=0.3),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    ),
]


@pytest.mark.parametrize(("spec", "make"), PAIRS)
def test_equals_torch_bit_for_bit(spec: OptimizerSpec, make: TorchMaker) -> None:
    ours = {n: t.clone() for n, t in named_tensors().items()}
    theirs = {n: torch.nn.Parameter(t.clone()) for n, t in named_tensors().items()}
    reference = make(list(theirs.values()))
    optimizer = Optimizer(spec, ours)
    for step in range(6):
        grads = named_tensors(step + 1)
        if step % 2:
            del grads["b"]  # no gradient: left alone
        for n, p in theirs.items():
            p.grad = grads.get(n)
        reference.step()
        optimizer.step(step, grads)
    for n in ours:
        assert torch.equal(ours[n], theirs[n].detach()), n


@pytest.mark.parametrize("spec", [pair[0] for pair in PAIRS])
def test_state_moves_to_another_optimizer(spec: OptimizerSpec) -> None:
    first = named_tensors()
    one = Optimizer(spec, first)
    one.step(0, named_tensors(1))
    second = {n: t.clone() for n, t in first.items()}
    two = Optimizer(spec, second)
    two.load(one.state())
    one.step(1, named_tensors(2))
    two.step(1, named_tensors(2))
    for n in first:
        assert torch.equal(first[n], second[n])
    for key, t in one.state().items():
        assert torch.equal(t, two.state()[key])


def test_unused_parameter_has_no_state() -> None:
    params = named_tensors()
    optimizer = Optimizer(AdamW(lr=1e-3), params)
    before = params["b"].clone()
    optimizer.step(0, {"a.bias": torch.ones(7)})
    assert torch.equal(params["b"], before)
    assert {name for _, name in optimizer.state()} == {"a.bias"}


def test_foreign_state_is_refused() -> None:
    optimizer = Optimizer(SGD(lr=0.1, momentum=0.9), named_tensors())
    for key, t in [(("exp_avg", "b"), torch.ones(3)), (("momentum_buffer", "c"), torch.ones(3))]:
        with pytest.raises(InputError, match="fits no sgd parameter"):
            optimizer.load({key: t})
    with pytest.raises(InputError, match=r"\(4,\)"):
        optimizer.load({("momentum_buffer", "b"): torch.ones(4)})


def test_schedules() -> None:
    warm = Constant(warmup=4)
    assert [factor(warm, s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = Linear(warmup=2, total=6, floor=0.2)
    assert [factor(linear, s) for s in (0, 1, 2, 4, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    cosine = Cosine(warmup=0, total=10)
    assert factor(cosine, 5) == pytest.approx(0.5)
    assert factor(cosine, 10) == pytest.approx(0.0)
    assert all(factor(cosine, s) >= factor(cosine, s + 1) for s in range(10))
    assert factor(Cosine(warmup=3), 1000) == 1.0  # no end named: no decay


def test_schedule_equals_lambda_lr() -> None:
    spec = AdamW(lr=1e-2, schedule=Cosine(warmup=3, total=9, floor=0.1))
    ours, theirs = {"w": torch.ones(4)}, torch.nn.Parameter(torch.ones(4))
    reference = torch.optim.AdamW([theirs], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda s: factor(spec.schedule, s))
    optimizer = Optimizer(spec, ours)
    for step in range(12):
        g = torch.arange(4.0) - step
        theirs.grad = g.clone()
        reference.step()
        scheduler.step()
        optimizer.step(step, {"w": g})
    assert torch.equal(ours["w"], theirs.detach())


def test_decay_groups_by_glob() -> None:
    spec = AdamW(lr=1e-3, weight_decay=0.1, groups=(WeightDecayGroup("*.bias", 0.0), WeightDecayGroup("a.*", 0.5)))
    assert [weight_decay(spec, n) for n in ("a.bias", "a.weight", "b")] == [0.0, 0.5, 0.1]
    params = {n: torch.ones(2) for n in ("a.bias", "a.weight", "b")}
    Optimizer(spec, params).step(0, {n: torch.zeros(2) for n in params})
    assert [float(params[n][0]) for n in params] == pytest.approx([1.0, 1 - 5e-4, 1 - 1e-4])


def test_from_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    assert from_torch(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-7)) == AdamW(lr=1e-3, eps=1e-7)
    sgd = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5).item(), momentum=0.9, nesterov=True)
    assert from_torch(sgd) == SGD(lr=0.5, momentum=0.9, nesterov=True)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    grouped = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    spec = from_torch(grouped, model)
    assert [weight_decay(spec, n) for n, _ in model.named_parameters()] == [0.1, 0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="named_parameters"):
        from_torch(grouped)


def scheduled(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(ps, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def started(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(ps, lr=0.1)
    ps[0].grad = torch.ones_like(ps[0])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda ps: torch.optim.Adam(ps), "Adam is not supported"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "amsgrad"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, maximize=True), "maximize"),
        (lambda ps: torch.optim.SGD([{"params": ps[:1], "lr": 1.0}, {"params": ps[1:]}], lr=0.1), "differ in lr"),
        (scheduled, "schedule="),
        (started, "already taken steps"),
    ],
)
def test_from_torch_refuses_by_name(make: TorchMaker, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_torch(make([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AdamW(lr=-1.0), "lr"),
        (lambda: AdamW(lr=math.nan), "lr"),
        (lambda: AdamW(lr=1e-3, betas=(1.0, 0.9)), "betas"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov"),
        (lambda: SGD(lr=0.1, clip_norm=0.0), "clip_norm"),
        (lambda: SGD(lr=0.1, schedule=Schedule(kind="step")), "schedule.kind"),
        (lambda: SGD(lr=0.1, schedule=Cosine(warmup=10, total=5)), "schedule.total"),
        (lambda: SGD(lr=0.1, schedule=Cosine(total=1 << 62)), "schedule.total"),
        (lambda: SGD(lr=0.1, schedule=Cosine(warmup=1 << 62)), "schedule.warmup"),
        (lambda: SGD(lr=0.1, groups=(WeightDecayGroup("*", -1.0),)), "weight_decay"),
    ],
)
def test_bad_values_are_named(make: Callable[[], OptimizerSpec], field: str) -> None:
    with pytest.raises(InputError, match=field):
        make()

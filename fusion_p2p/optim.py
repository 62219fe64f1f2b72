"""Optimizers as data: `OptimizerSpec` builders for users, and `Optimizer`, which a stage runs on what it owns.

The arithmetic is torch.optim's own single-tensor code, so results are its results to the last bit; what is added is
state keyed by parameter name, a learning rate that is a pure function of the step, and decay groups by glob.
"""

from __future__ import annotations

import fnmatch
import glob
import math
from collections.abc import Mapping

import msgspec
import torch

from fusion_p2p.errors import InputError
from fusion_p2p.settings import OptimizerSpec, Schedule, WeightDecayGroup

KINDS = ("adamw", "sgd")
MAX_STEPS = 1 << 40
SLOTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def Constant(warmup: int = 0) -> Schedule:
    """Factor 1 of the learning rate after `warmup` steps of linear rise. InputError comes from AdamW and SGD."""
    return Schedule(kind="constant", warmup=warmup)


def Linear(warmup: int = 0, total: int = 0, floor: float = 0.0) -> Schedule:
    """Linear decay from 1 at step `warmup` to `floor`, a factor in [0, 1], at step `total`; `total` 0: no decay.
    AdamW and SGD raise InputError on bad values."""
    return Schedule(kind="linear", warmup=warmup, total=total, floor=floor)


def Cosine(warmup: int = 0, total: int = 0, floor: float = 0.0) -> Schedule:
    """Half a cosine from 1 at step `warmup` to `floor`, a factor in [0, 1], at step `total`; `total` 0: no decay.
    AdamW and SGD raise InputError on bad values."""
    return Schedule(kind="cosine", warmup=warmup, total=total, floor=floor)


def AdamW(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    schedule: Schedule | None = None,
    groups: tuple[WeightDecayGroup, ...] = (),
    clip_norm: float | None = None,
) -> OptimizerSpec:
    """torch.optim.AdamW as data, with its own defaults of `betas`, `eps` and `weight_decay` (decoupled).

    `lr`: at the schedule's factor 1. `schedule`: a function of the step, None: constant (`Constant`, `Linear`,
    `Cosine`). `groups`: another weight decay for parameters by name; the first match wins. `clip_norm`: the most that
    the norm of all gradients together may be (torch.nn.utils.clip_grad_norm_), None: no clipping.
    InputError on a value that torch.optim would refuse.
    """
    return check(
        OptimizerSpec(
            kind="adamw",
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            schedule=schedule or Schedule(),
            groups=groups,
            clip_norm=clip_norm,
        )
    )


def SGD(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    schedule: Schedule | None = None,
    groups: tuple[WeightDecayGroup, ...] = (),
    clip_norm: float | None = None,
) -> OptimizerSpec:
    """torch.optim.SGD as data: `momentum`, `dampening`, `nesterov`, and `weight_decay` added to the gradient.

    `lr`: at the schedule's factor 1. `schedule`: a function of the step, None: constant (`Constant`, `Linear`,
    `Cosine`). `groups`: another weight decay for parameters by name; the first match wins. `clip_norm`: the most that
    the norm of all gradients together may be (torch.nn.utils.clip_grad_norm_), None: no clipping.
    InputError on a value that torch.optim would refuse.
    """
    return check(
        OptimizerSpec(
            kind="sgd",
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            schedule=schedule or Schedule(),
            groups=groups,
            clip_norm=clip_norm,
        )
    )


def check(spec: OptimizerSpec) -> OptimizerSpec:
    """The spec itself; InputError naming the first field that makes no sense."""
    s = spec.schedule
    rules = (
        (spec.kind in KINDS, "kind", spec.kind, f"one of {', '.join(KINDS)}"),
        (math.isfinite(spec.lr) and spec.lr >= 0, "lr", spec.lr, "a number >= 0"),
        (all(0 <= b < 1 for b in spec.betas), "betas", spec.betas, "two numbers in [0, 1)"),
        (math.isfinite(spec.eps) and spec.eps >= 0, "eps", spec.eps, "a number >= 0"),
        (math.isfinite(spec.weight_decay) and spec.weight_decay >= 0, "weight_decay", spec.weight_decay, ">= 0"),
        (math.isfinite(spec.momentum) and spec.momentum >= 0, "momentum", spec.momentum, "a number >= 0"),
        (math.isfinite(spec.dampening), "dampening", spec.dampening, "a finite number"),
        (
            not spec.nesterov or (spec.momentum > 0 and spec.dampening == 0),
            "nesterov",
            spec.nesterov,
            "used with momentum > 0 and dampening 0",
        ),
        (spec.clip_norm is None or spec.clip_norm > 0, "clip_norm", spec.clip_norm, "a number > 0, or left out"),
        (s.kind in ("constant", "linear", "cosine"), "schedule.kind", s.kind, "constant, linear or cosine"),
        (0 <= s.warmup <= MAX_STEPS, "schedule.warmup", s.warmup, f"a step count in 0..{MAX_STEPS}"),
        (
            s.total == 0 or s.warmup < s.total <= MAX_STEPS,
            "schedule.total",
            s.total,
            f"more than warmup ({s.warmup}) and at most {MAX_STEPS}, or 0",
        ),
        (0 <= s.floor <= 1, "schedule.floor", s.floor, "a factor in [0, 1]"),
    )
    for holds, field, value, wanted in rules:
        if not holds:
            raise InputError(f"optimizer: {field} = {value!r} must be {wanted}")
    for g in spec.groups:
        if not (math.isfinite(g.weight_decay) and g.weight_decay >= 0):
            raise InputError(f"optimizer: weight_decay = {g.weight_decay!r} of group {g.pattern!r} must be >= 0")
    return spec


def factor(schedule: Schedule, step: int) -> float:
    """The learning rate's factor at 0-based `step`."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.kind == "constant" or schedule.total == 0:
        return 1.0
    done = min(1.0, (step - schedule.warmup) / (schedule.total - schedule.warmup))
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.floor + (1.0 - schedule.floor) * shape


def weight_decay(spec: OptimizerSpec, name: str) -> float:
    """The weight decay of the parameter `name`: the first group whose glob matches, else the spec's own."""
    for g in spec.groups:
        if fnmatch.fnmatchcase(name, g.pattern):
            return g.weight_decay
    return spec.weight_decay


class Optimizer:
    """torch.optim on named tensors, which `step` updates in place.

    A parameter without gradient keeps its value and has no state, as in torch. Slots: "exp_avg", "step", ...
    """

    def __init__(self, spec: OptimizerSpec, params: Mapping[str, torch.Tensor]) -> None:
        self._spec = check(spec)
        self._params = dict(params)
        by_decay: dict[float, list[torch.Tensor]] = {}
        for name, p in self._params.items():
            by_decay.setdefault(weight_decay(spec, name), []).append(p)
        groups = [{"params": ps, "weight_decay": decay} for decay, ps in by_decay.items()]
        self._torch: torch.optim.Optimizer | None = None
        if groups and spec.kind == "adamw":
            self._torch = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False)
        elif groups:
            self._torch = torch.optim.SGD(
                groups,
                lr=spec.lr,
                momentum=spec.momentum,
                dampening=spec.dampening,
                nesterov=spec.nesterov,
                foreach=False,
            )

    def step(self, step: int, grads: Mapping[str, torch.Tensor]) -> None:
        """One update with the learning rate of 0-based `step`; parameters without an entry are left alone."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = self._spec.lr * factor(self._spec.schedule, step)
        for name, g in grads.items():
            self._params[name].grad = g
        self._torch.step()
        for name in grads:
            self._params[name].grad = None

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        """(slot, parameter name) -> the tensor itself, not a copy."""
        if self._torch is None:
            return {}
        slots = SLOTS[self._spec.kind]
        return {
            (slot, name): held[slot]
            for name, p in self._params.items()
            if (held := self._torch.state.get(p))
            for slot in slots
            if held.get(slot) is not None
        }

    def load(self, state: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Replace all state by copies of these tensors. InputError on a slot or parameter that is not ours."""
        held: dict[str, dict[str, torch.Tensor]] = {}
        for (slot, name), tensor in state.items():
            p = self._params.get(name)
            if p is None or slot not in SLOTS[self._spec.kind]:
                raise InputError(
                    f"optimizer state {slot!r} of {name!r} fits no {self._spec.kind} parameter of this stage"
                )
            if slot == "step":
                if tensor.numel() != 1:
                    raise InputError(
                        f"optimizer state 'step' of {name!r} has shape {tuple(tensor.shape)}, not one number"
                    )
                held.setdefault(name, {})[slot] = tensor.detach().clone()
                continue
            if tensor.shape != p.shape or tensor.dtype != p.dtype:
                raise InputError(
                    f"optimizer state {slot!r} of {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the parameter {p.dtype} {tuple(p.shape)}"
                )
            held.setdefault(name, {})[slot] = tensor.detach().to(p.device, copy=True)
        if self._torch is None:
            return
        self._torch.state.clear()
        for name, slots in held.items():
            self._torch.state[self._params[name]] = slots


def from_torch(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> OptimizerSpec:
    """The spec of a fresh torch.optim.AdamW or SGD; `model` names its parameters where groups differ in decay.

    InputError, naming what cannot be translated, for another class, option or a started optimizer.
    """
    kind = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}.get(type(optimizer))
    if kind is None:
        raise InputError(f"optimizer {type(optimizer).__name__} is not supported; use torch.optim.AdamW or SGD")
    if optimizer.state:
        raise InputError(f"{type(optimizer).__name__} has already taken steps; pass a fresh one, or resume the run")
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group.get(option):
                raise InputError(f"{type(optimizer).__name__}({option}=True) is not supported; leave it out")
        if "initial_lr" in group:
            raise InputError("a torch LR scheduler cannot travel; pass schedule=fusion_p2p.Cosine(...) instead")
        for option in ("lr", "betas", "eps", "momentum", "dampening", "nesterov"):
            if group.get(option) != first.get(option):
                raise InputError(f"parameter groups differ in {option}; only weight_decay may differ")
    spec = OptimizerSpec(
        kind=kind,
        lr=float(first["lr"]),
        weight_decay=float(first["weight_decay"]),
        groups=_decay_groups(optimizer, model),
    )
    if kind == "adamw":
        betas = (float(first["betas"][0]), float(first["betas"][1]))
        return check(msgspec.structs.replace(spec, betas=betas, eps=float(first["eps"])))
    return check(
        msgspec.structs.replace(
            spec,
            momentum=float(first["momentum"]),
            dampening=float(first["dampening"]),
            nesterov=bool(first["nesterov"]),
        )
    )


def _decay_groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> tuple[WeightDecayGroup, ...]:
    """Patterns for every parameter whose decay is not the first group's."""
    first = optimizer.param_groups[0]["weight_decay"]
    names = {} if model is None else {id(p): n for n, p in model.named_parameters()}
    out = []
    for group in optimizer.param_groups[1:]:
        if group["weight_decay"] == first:
            continue
        given = group.get("param_names") or [names.get(id(p)) for p in group["params"]]
        for name in given:
            if name is None:
                raise InputError(
                    "parameter groups with their own weight_decay need names: pass model.named_parameters()"
                )
            out.append(WeightDecayGroup(glob.escape(name), float(group["weight_decay"])))
    return tuple(out)

"""The self-check: an OP-DAG is accepted only if it trains as its module does, to rounding, over several micro-batches.

Export silently drops hooks, assigned buffers, a custom Function's backward, Python counters and dice; each of them
shows here as another loss, gradient, buffer or weight, and refuses the model by the name of what differs.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_p2p import arbiter, suspects
from fusion_p2p import batch as batches
from fusion_p2p.canonical import Raw
from fusion_p2p.errors import CaptureError
from fusion_p2p.interp import Program
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import dtype_of
from fusion_p2p.replay import SeededRandom
from fusion_p2p.seeded import RngKey

TOLERANCE = 1e-6  # norm-relative, fp32; mostly equal bit for bit. A gradient beyond it: see `arbiter`
_HALF_TOLERANCE = 2e-2  # where the graph computes in 16 bits

Step = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass
class _Side:
    """One trajectory: weights and buffers by name."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy to run on, so that the user's module keeps its buffers, counters and gradients."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(
            f"the model cannot be copied for the self-check ({first[:120]}); hold only parameters and buffers, and use "
            "torch.nn.utils.parametrizations instead of the older weight_norm and spectral_norm"
        ) from error


def refuse_hooks(model: torch.nn.Module) -> None:
    """Hooks on tensors do not survive a copy, so they are looked for."""
    for name, p in model.named_parameters():
        hooks = [getattr(p, kind, None) or {} for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        for hook in (h for kind in hooks for h in kind.values()):
            raise CaptureError(
                f"{suspects.place(hook)}parameter {name!r} has a gradient hook, which cannot travel; remove it before "
                "capture"
            )


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Torch's, Python's and numpy's global generators seeded for the block and restored after it."""
    state, np_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(np_state)
        torch.set_rng_state(torch_state)


def dice_state() -> tuple[Any, bytes, int]:
    """Of Python's and numpy's global generators."""
    np_state: Any = np.random.get_state()
    return random.getstate(), np_state[1].tobytes(), np_state[2]


class DiceError(CaptureError):
    """A forward that rolls Python's or numpy's dice."""


@contextlib.contextmanager
def no_dice() -> Iterator[None]:
    """Refuse a forward that rolls Python's or numpy's global dice: the graph would hold one roll for ever."""
    before = dice_state()
    yield
    if dice_state() != before:
        raise DiceError(
            "forward uses Python's or numpy's random numbers, which a graph cannot hold; draw with torch (torch.rand) "
            "or pass the numbers in the batch"
        )


class SelfCheck:
    """Compares `model` with `opdag` over several micro-batches. `step(model, batch)` gives the module's loss."""

    def __init__(self, model: torch.nn.Module, step: Step, example: Any, opdag: OpDag, raw: Raw, seed: int) -> None:
        self._model = copied(model)
        self._step = step
        self._example = example
        self._tensors = batches.flatten(example)
        self._dag = opdag
        self._draws, self._eval_draws = raw.draws, raw.eval_draws
        self._seed = seed
        updates = [b.update for b in opdag.buffers if b.update is not None]
        self._program = Program(opdag.nodes, keep={opdag.loss, *updates})
        half = any(v.dtype in ("float16", "bfloat16") for v in opdag.values)
        self._half, self._tol = half, _HALF_TOLERANCE if half else TOLERANCE
        self.worst: dict[str, float] = {}  # what was compared -> the largest relative difference, 0 left out

    def run(self, size: int, training: Callable[[torch.nn.Module], Any]) -> tuple[str, ...]:
        """Three training micro-batches with an update before the last, then one in eval mode.

        Raises CaptureError naming the tensor that differs. Returns one line per thing checked.
        """
        model = self._model
        held = dict(model.named_parameters())
        ours = _Side(
            {p.name: held[p.name].detach().requires_grad_(p.trainable) for p in self._dag.params},
            {b.name: dict(model.named_buffers())[b.name].detach().clone() for b in self._dag.buffers},
        )
        other = 3 if size > 3 else 4
        total: dict[str, torch.Tensor] = {}
        with training(model):
            for m, count in enumerate((2, other)):
                grads = self._training_step(ours, count, RngKey(self._seed, 0, m))
                total = {n: total[n] + g if n in total else g for n, g in grads.items()}
            self._update(ours, total)
            self._training_step(ours, 2, RngKey(self._seed, 1, 0))
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        self._eval_step(ours, RngKey(self._seed, 2, 0))
        for module, mode in modes:
            module.training = mode
        return (
            f"loss of 3 micro-batches, one after an update: {self._bits('the loss')}",
            f"{len(held)} gradients: {self._bits('the gradient')}; {len(ours.buffers)} buffers: {self._bits('buffer')}",
            f"loss in eval mode: {self._bits('the loss in eval mode')}",
        )

    def _bits(self, what: str) -> str:
        worst = self.worst.get(what, 0.0)
        return f"to rounding ({worst:.0e})" if worst else "bit for bit"

    # -- one micro-batch on both sides -------------------------------------------------------------------------

    def _batch(self, count: int, turn: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """Rows rotated by `turn` and floats scaled, so that nothing baked in from the example can pass."""
        tensors = {}
        for name, t in batches.resize(self._tensors, max(count, batches.samples(self._tensors))).items():
            if t.dim() > 0 and t.shape[0] >= count:
                t = t.roll(turn, 0)[:count].clone()
            tensors[name] = t * (1.0 - turn / 16) if t.is_floating_point() and turn else t
        tensors = {n: t.to(self._tensors[n].dtype) for n, t in tensors.items()}
        return batches.rebuild(self._example, tensors), tensors

    def _training_step(self, ours: _Side, count: int, key: RngKey) -> dict[str, torch.Tensor]:
        batch, tensors = self._batch(count, key.micro_batch + key.step)
        model = self._model
        before = {n: b.clone() for n, b in model.named_buffers()}
        theirs = self._module_step(model, batch, key)
        loss, env = self._interpret(ours, tensors, count, key, True)
        self._same("the loss", "", theirs.detach(), loss.detach())
        trainable = {p.name: ours.params[p.name] for p in self._dag.params if p.trainable}
        grads: Sequence[torch.Tensor | None] = [None] * len(trainable)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        far = self._compare_grads(dict(zip(trainable, grads, strict=True)))
        if far:
            self._arbitrate(far, before, tensors, key)
        for b in self._dag.buffers:
            if b.update is not None:
                ours.buffers[b.name] = env[b.update].detach().clone()
        self._compare_buffers(ours)
        return {n: g for n, g in zip(trainable, grads, strict=True) if g is not None}

    def _module_step(self, model: torch.nn.Module, batch: Any, key: RngKey) -> torch.Tensor:
        """The module's loss, its gradients in the parameters, with the random tensors of the graph."""
        model.zero_grad(set_to_none=True)
        with own_randomness(hash(key) & 0xFFFFFFFF), SeededRandom(self._draws, key) as mode:
            with no_dice():
                loss = self._step(model, batch)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        mode.finish()
        return loss

    def _eval_step(self, ours: _Side, key: RngKey) -> None:
        batch, tensors = self._batch(2, 1)
        with own_randomness(1), SeededRandom(self._eval_draws, key) as mode, no_dice():
            theirs = self._step(self._model, batch).detach()
        mode.finish()
        loss, _ = self._interpret(ours, tensors, 2, key, False)
        self._same("the loss in eval mode", "", theirs, loss.detach())

    def _interpret(
        self, side: _Side, tensors: Mapping[str, torch.Tensor], count: int, key: RngKey, training: bool
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        env = {i.value: tensors[i.name] for i in self._dag.inputs}
        env.update({p.value: side.params[p.name] for p in self._dag.params})
        env.update({b.value: side.buffers[b.name] for b in self._dag.buffers})
        device = next((p.device for p in side.params.values()), torch.device("cpu"))
        env.update(constants(self._dag, device))
        self._program(env, batch=count, training=training, rng=key, device=device)
        return env[self._dag.loss], env

    def _update(self, ours: _Side, grads: Mapping[str, torch.Tensor]) -> None:
        """One plain gradient step on both sides, so that a weight baked into the graph shows."""
        held = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, g in grads.items():
                rate = 0.01 * float(held[name].norm()) / max(float(g.norm()), 1e-12)
                ours.params[name] = (ours.params[name] - rate * g).detach().requires_grad_(True)
                held[name].copy_(ours.params[name])

    # -- comparisons -------------------------------------------------------------------------------------------

    def _same(self, kind: str, name: str, theirs: torch.Tensor, mine: torch.Tensor) -> None:
        gap = self._gap(kind, name, theirs, mine, 0.0)
        if not gap <= self._tol:
            raise self._differs(f"{kind} {name}".strip(), gap)

    def _gap(self, kind: str, name: str, theirs: torch.Tensor, mine: torch.Tensor, floor: float) -> float:
        """Norm-relative; of `floor` where the tensor's own norm is less. Kept in `worst`."""
        if theirs.shape != mine.shape:
            what = f"{kind} {name}".strip()
            raise CaptureError(f"{what} has shape {tuple(theirs.shape)} in the module and {tuple(mine.shape)} captured")
        if torch.equal(theirs, mine):
            return 0.0
        gap = arbiter.distance(theirs, mine) / max(arbiter.norm(theirs), floor, 1e-30)
        self.worst[kind] = max(self.worst.get(kind, 0.0), gap)
        return gap

    def _differs(self, what: str, gap: float, more: str = "") -> CaptureError:
        return CaptureError(
            f"{what} differs between the module and its captured graph (relative {gap:.1e}{more}); {self._causes()}"
        )

    def _causes(self) -> str:
        with own_randomness(self._seed):
            return suspects.named(copied(self._model), lambda model: self._step(model, self._batch(2, 0)[0]))

    def _compare_grads(self, mine: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The graph's gradients that are further from the module's than the tolerance, and might yet be rounding."""
        far: dict[str, torch.Tensor] = {}
        held = dict(self._model.named_parameters())
        floor = self._floor()
        for name, g in mine.items():
            theirs = held[name].grad
            if theirs is None and g is None:
                continue
            if theirs is None or g is None:
                has, lacks = ("captured graph", "module") if theirs is None else ("module", "captured graph")
                raise CaptureError(f"{name!r} has a gradient in the {has} and none in the {lacks}; {self._causes()}")
            gap = self._gap("the gradient", f"of {name!r}", theirs, g, floor)
            if gap <= self._tol:
                continue
            if self._half or not gap <= arbiter.MOST:
                raise self._differs(f"the gradient of {name!r}", gap)
            far[name] = g
        return far

    def _floor(self) -> float:
        """What a gradient that is nothing but rounding (a key bias's) is measured against: 1% of the largest."""
        return 1e-2 * max((arbiter.norm(p.grad) for p in self._model.parameters() if p.grad is not None), default=0.0)

    def _arbitrate(
        self,
        far: Mapping[str, torch.Tensor],
        before: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        key: RngKey,
    ) -> None:
        """Raises CaptureError unless rounding explains the gradients of the graph that are far from the module's.

        `before`: the module's buffers before the step.
        """

        def copies() -> torch.nn.Module:
            model = copied(self._model)
            with torch.no_grad():
                for name, b in model.named_buffers():
                    b.copy_(before[name])
            return model

        def run(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            given = {n: t.to(dtype) if t.dtype == torch.float32 else t for n, t in tensors.items()}
            self._module_step(model, batches.rebuild(self._example, given), key)
            return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

        theirs = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None and n in far}
        why = arbiter.no_rounding(copies, run, theirs, far, floor=self._floor(), tol=self._tol)
        if why:
            name = next(iter(far))
            gap = arbiter.distance(theirs[name], far[name]) / max(arbiter.norm(theirs[name]), self._floor())
            raise self._differs(f"the gradient of {name!r}", gap, f", which is no rounding: {why}")

    def _compare_buffers(self, ours: _Side) -> None:
        for name, theirs in self._model.named_buffers():
            if name in ours.buffers:
                self._same("buffer", repr(name), theirs.detach(), ours.buffers[name])


def constants(dag: OpDag, device: torch.device) -> dict[int, torch.Tensor]:
    """Value id -> tensor of every constant of the graph."""
    out = {}
    for c in dag.consts:
        spec = dag.values[c.value]
        flat = torch.frombuffer(bytearray(c.data), dtype=dtype_of(spec.dtype)) if c.data else torch.empty(0)
        out[c.value] = flat.to(dtype_of(spec.dtype)).reshape(spec.at(0)).to(device)
    return out

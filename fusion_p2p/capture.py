"""Capture: a module and its loss become an OP-DAG that trains exactly as the module would, or are refused."""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_p2p import batch as batches
from fusion_p2p import canonical, prepass, selfcheck, suspects
from fusion_p2p.errors import CaptureError, InputError
from fusion_p2p.ir import Input, OpDag, ValueSpec
from fusion_p2p.merge import Tied, merge
from fusion_p2p.modes import combine
from fusion_p2p.propagate import ShapeError, propagate

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What capture saw and checked; `checks` are one line each."""

    nodes: int
    params: int  # trainable elements
    frozen: int  # elements without a gradient
    opdag_bytes: int
    operators: Mapping[str, int]
    checks: tuple[str, ...] = ()
    worst: float = 0.0  # the largest norm-relative difference from the module; 0: bit for bit


@dataclass(frozen=True, kw_only=True)
class Captured:
    """`state` maps primary parameter and buffer names to detached tensors that share the module's storage."""

    opdag: OpDag
    state: Mapping[str, torch.Tensor]
    report: Report
    constants: Mapping[str, Any] = field(default_factory=dict)

    def feed(self, batch: Any) -> dict[int, torch.Tensor]:
        """Value id -> tensor for every graph input, from a batch of the same structure as the example.

        Raises InputError if a tensor is missing, of another dtype or shape, or out of range, or a constant differs
        from the example's.
        """
        return feed(self.opdag, batch, self.constants)


def feed(opdag: OpDag, batch: Any, constants: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """See `Captured.feed`."""
    tensors = batches.flatten(batch)
    for name, value in batches.constants(batch).items():
        if name in constants and constants[name] != value:
            raise InputError(
                f"batch entry {name!r} is {value!r}, but the model was captured with {constants[name]!r}; "
                "pass it as a tensor if it changes"
            )
    out = {}
    for i in opdag.inputs:
        if i.name not in tensors:
            raise InputError(f"the batch lacks {i.name!r}; it has {', '.join(tensors) or 'no tensors'}")
        want = opdag.values[i.value].dtype
        have = str(tensors[i.name].dtype).removeprefix("torch.")
        if have != want:
            raise InputError(f"batch tensor {i.name!r} is {have}, captured as {want}; convert it in the data pipeline")
        _check_input(i, opdag.values[i.value], tensors[i.name])
        out[i.value] = tensors[i.name]
    return out


def _check_input(i: Input, spec: ValueSpec, tensor: torch.Tensor) -> None:
    if len(spec.shape) != tensor.dim() or any(
        isinstance(want, int) and want != have for want, have in zip(spec.shape, tensor.shape, strict=False)
    ):
        want = ", ".join(str(d) if isinstance(d, int) else "samples" for d in spec.shape)
        raise InputError(
            f"batch tensor {i.name!r} has shape {tuple(tensor.shape)}, captured as ({want}); pad or cut each batch to "
            "the example's lengths"
        )
    if i.vmin is None or i.vmax is None or tensor.numel() == 0:
        return
    low, high = int(tensor.min()), int(tensor.max())
    if low < i.vmin or high > i.vmax:
        raise InputError(
            f"batch tensor {i.name!r} holds {low}..{high}, but the model indexes {i.vmin}..{i.vmax} with it"
        )


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """A mapping calls `model(**batch)`, a tuple or list `model(*batch)`, a tensor `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar to minimise: `loss(output, batch)`, or `output.loss` / `output["loss"]` where loss is None."""
    value: Any
    if loss is not None:
        value = loss(output, batch)
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", None)
    if value is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        value = output
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"the model's output ({type(output).__name__}) has no loss; pass loss=lambda output, batch: ... "
            "or labels in the batch"
        )
    if value.numel() != 1:
        raise CaptureError(f"the loss has shape {tuple(value.shape)}; reduce it to one number, e.g. with .mean()")
    return value.reshape(())


class _WithLoss(torch.nn.Module):
    """(model, loss) as a function of the flat tensors; other leaves of the batch are constants."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None, example: Any, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._example = example
        self._names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        batch = batches.rebuild(self._example, dict(zip(self._names, tensors, strict=True)))
        return loss_of(call_model(self.model, batch), batch, self._loss)


@contextlib.contextmanager
def train_mode(model: torch.nn.Module) -> Iterator[None]:
    """Train mode for the block; a module already training keeps the submodules that its user put in eval mode."""
    modes = [(m, m.training) for m in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def _user_frame(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "call_model"]
    inside = [f for f in frames if "/torch/" not in f.filename and not f.filename.endswith("fusion_p2p/capture.py")]
    if not inside:
        return "unknown place"
    return f"{inside[-1].filename}:{inside[-1].lineno}"


_WAYS = (
    ("data-dependent", "a Python branch, number or shape depends on a tensor's value; use torch.where or a fixed mask"),
    ("GuardOnDataDependent", "a Python branch depends on a tensor's value; use torch.where"),
    ("DynamicOutputShape", "the shape of a result depends on data; use torch.where or a mask of fixed shape"),
    ("_local_scalar_dense", "a Python number is read from a tensor (.item(), float(), bool()); keep it a tensor"),
    ("DataDependentOutput", "a Python number is read from a tensor (.item(), float(), bool()); keep it a tensor"),
    ("was not installed as a parameter or buffer", "register the tensor as a parameter or a buffer of the module"),
    ("set_attr", "forward assigns an attribute; update a registered buffer in place (self.buf.copy_(...)) instead"),
    ("assigned during export", "forward assigns an attribute; update a buffer in place (self.buf.copy_(...))"),
    ("Cannot mutate", "forward assigns an attribute; update a buffer in place (self.buf.copy_(...))"),
)


def _export_error(error: Exception) -> CaptureError:
    text = f"{type(error).__name__}: {error}"
    way = next((w for mark, w in _WAYS if mark in text), "write this part with plain tensor operators")
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CaptureError(f"{_user_frame(error)}: {way} ({first[:160]})")


def _export(wrapped: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> canonical.Raw:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # where it fails, export prints the graph so far to stderr; the user gets one line
            with contextlib.redirect_stderr(io.StringIO()):
                program = torch.export.export(wrapped, tuple(tensors.values()), strict=False)
        except (InputError, KeyboardInterrupt):
            raise
        except Exception as error:  # torch.export raises anything the model's own code raises
            raise _export_error(error) from error
        prepass.rewrite(program.graph_module)
        program = prepass.decompose(program)
    raw = canonical.Lowering(program).run()
    canonical.prune(raw)
    return raw


def tied_names(model: torch.nn.Module) -> Tied:
    """Primary name of every parameter and buffer (the first of those that share it), and the others' aliases."""
    primary: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[name] = primary.setdefault(id(t), name)
    return Tied(names)


def capture(model: torch.nn.Module, example_batch: Any, *, loss: Loss | None = None, seed: int = 0) -> Captured:
    """The OP-DAG of `model` and `loss`, checked against the module itself (FusionLLM section 3; DESIGN section 4).

    `example_batch`: a mapping (`model(**batch)`), tuple (`model(*batch)`) or tensor of shape (samples, ...); all
    dimensions but the samples are fixed by it. `loss`: function of (output, batch) giving a scalar, the mean over the
    samples; None takes `output.loss`. `seed`: of the self-check's random tensors. The model is left as it was; the
    result's `state` shares its storage.
    Raises CaptureError with file:line and the way round if the model cannot be captured exactly (SUPPORT.md lists what
    can), InputError if the batch holds no samples.
    """
    if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
        raise CaptureError("the loss has parameters of its own; make it a submodule and return the loss from forward")
    example = dict(example_batch) if isinstance(example_batch, Mapping) else example_batch
    tensors = batches.flatten(example)
    size = max(2, batches.samples(tensors))
    selfcheck.refuse_hooks(model)

    def step(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(call_model(module, batch), batch, loss)

    def exported(n: int, training: bool) -> canonical.Raw:
        work = selfcheck.copied(model)
        wrapped = _WithLoss(work, loss, example, list(tensors))
        mode = train_mode(work) if training else contextlib.nullcontext(work.eval())
        try:
            with mode, selfcheck.own_randomness(n), selfcheck.no_dice():
                return _export(wrapped, batches.resize(tensors, n))
        except selfcheck.DiceError as error:
            with selfcheck.own_randomness(n):
                work = selfcheck.copied(model)
                where = suspects.place_of_change(lambda: step(work, example), selfcheck.dice_state)
            raise CaptureError(f"{where}{error}") from None

    raws = [exported(n, True) for n in (size, size + 1)]
    nodes = len(raws[0].nodes)
    combine(raws[0], exported(size, False))
    if len(raws[0].nodes) > nodes:
        combine(raws[1], exported(size + 1, False))
    opdag = merge(raws[0], raws[1], size, list(tensors), tied_names(model), model)
    _check_linear(opdag, size, raws[0].where)
    check = selfcheck.SelfCheck(model, step, example, opdag, raws[0], seed)
    checks = check.run(size, train_mode)
    state = _state(model, opdag)
    report = _report(opdag, state, checks, max(check.worst.values(), default=0.0))
    return Captured(opdag=opdag, state=state, report=report, constants=batches.constants(example))


def _check_linear(opdag: OpDag, size: int, where: Sequence[str]) -> None:
    """Sizes that fit two batch sizes may still be no linear function; a third size tells."""
    for n in (size, size + 1, size + 7):
        try:
            propagate(opdag, n)
        except ShapeError as error:
            raise CaptureError(
                f"{where[error.index]}: with {n} samples {error}; sizes must be the batch size times a number, plus a "
                "number"
            ) from None


def _state(model: torch.nn.Module, opdag: OpDag) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [p.name for p in opdag.params] + [b.name for b in opdag.buffers]
    return {name: held[name].detach() for name in names}


def _report(opdag: OpDag, state: Mapping[str, torch.Tensor], checks: tuple[str, ...], worst: float) -> Report:
    operators: dict[str, int] = {}
    for node in opdag.nodes:
        operators[node.op] = operators.get(node.op, 0) + 1
    return Report(
        nodes=len(opdag.nodes),
        params=sum(state[p.name].numel() for p in opdag.params if p.trainable),
        frozen=sum(state[p.name].numel() for p in opdag.params if not p.trainable),
        opdag_bytes=len(opdag.to_bytes()),
        operators=dict(sorted(operators.items())),
        checks=checks,
        worst=worst,
    )

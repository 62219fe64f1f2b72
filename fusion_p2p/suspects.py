"""Why a captured graph does not train as its module: what export drops or freezes, looked for by name and place.

Only run when the self-check has found a difference; each finding is a piece of one line, with the way round.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch

USUAL = (
    "usual causes: hooks, a buffer assigned instead of updated in place, a custom autograd.Function, a Python counter "
    "or random number"
)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (int, float, str, bool, type(None))


def place(thing: Any) -> str:
    """Where a class or function is written, "file:line: "; "" where Python cannot tell."""
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}: "
    except (OSError, TypeError):
        return ""


def named(model: torch.nn.Module, run: Callable[[torch.nn.Module], torch.Tensor]) -> str:
    """The causes found in one more forward of `model` (a copy: it is changed); the usual ones if there are none.

    `run`: the module's loss on some batch.
    """
    before = _attributes(model)
    loss = run(model)
    found = [*_hooks(model), *_custom_functions(loss), *_changes(model, before), *_generators(model)]
    return "; ".join(dict.fromkeys(found[:3])) or USUAL


def _forward(module: torch.nn.Module) -> str:
    return place(type(module).forward)


def _hooks(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for hook in [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]:
            yield f"{place(hook)}a backward hook of {name or 'the model'!r} cannot travel; do its work in forward"


def _custom_functions(loss: torch.Tensor) -> Iterator[str]:
    """Of the graph behind `loss`, PyTorch's own left out."""
    queue, seen = [loss.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [n for n, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            yield (
                f"{place(function)}the backward of the autograd.Function {function.__name__!r} cannot travel; "
                "write it with plain operators"
            )


def _attributes(model: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """(module, attribute) -> plain value, list of such, or a buffer's identity."""
    out: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                out[name, key] = value
            elif isinstance(value, list | tuple | dict) and not key.startswith("_"):
                out[name, key] = repr(value)
        out.update(((name, key), buffer) for key, buffer in module._buffers.items() if buffer is not None)
    return out


def _changes(model: torch.nn.Module, before: dict[tuple[str, str], Any]) -> Iterator[str]:
    modules = dict(model.named_modules())
    for (name, key), new in _attributes(model).items():
        old = before.get((name, key))
        full = f"{name}.{key}" if name else key
        if isinstance(new, torch.Tensor):
            if new is not old:
                yield f"{_forward(modules[name])}buffer {full!r} is assigned; update it in place: {key}.copy_(...)"
        elif new != old:
            yield f"{_forward(modules[name])}{full!r} changes in forward; keep it in a buffer, updated in place"


def _generators(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, _GENERATORS):
                full = f"{name}.{key}" if name else key
                yield f"{_forward(module)}{full!r} is a random generator; draw with torch (torch.rand) instead"


def place_of_change(run: Callable[[], Any], state: Callable[[], Any]) -> str:
    """The line at which `run` first changes `state()`, "file:line: ", PyTorch's own left out; "" if none does."""
    start = state()
    found: list[str] = []

    def entered(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if found or "/torch/" in name or name == random.__file__:
            return None
        at = frame.f_lineno

        def moved(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal at
            if not found and state() != start:
                found.append(f"{name}:{at}: ")
            at = frame.f_lineno

        return moved

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(before)
    return found[0] if found else ""

"""A gradient differs by more than 1e-6 from the module's: is it rounding? The module in double precision decides.

A library may take another path while it is traced (transformers writes the causal mask out and repeats grouped keys,
where eager attention does both inside its kernel): the same sums in another order, whose rounding grows with depth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

MOST = 1e-4  # norm-relative; no order of the same sums differs by more
FACTOR = 2.0  # the graph's error may be this many times the module's own

Gradients = Mapping[str, torch.Tensor]
Run = Callable[[torch.nn.Module, torch.dtype], Gradients]


def norm(t: torch.Tensor) -> float:
    return float(_wide(t).norm())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((_wide(a) - _wide(b)).norm())


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def no_rounding(
    copies: Callable[[], torch.nn.Module], run: Run, theirs: Gradients, mine: Gradients, *, floor: float, tol: float
) -> str:
    """Empty if each gradient of the graph (`mine`) is as near to the exact as the module's (`theirs`), else why not.

    `floor`: the least norm that errors are relative to. `copies`: the module as it was before the step. `run`: its
    gradients of that step, the batch's floats in the dtype.
    A module that does not repeat itself bit for bit (a counter, dice) is never explained by rounding.
    """
    again = run(copies(), torch.float32)
    if any(n not in again or not torch.equal(again[n], g) for n, g in theirs.items()):
        return "the module's own gradient differs when computed again"
    try:
        with _double_by_default():
            exact = run(copies().double(), torch.float64)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"the module does not run in double precision ({str(error).splitlines()[0][:80] if str(error) else ''})"
    for name, g in mine.items():
        size = max(norm(exact[name]), floor)
        own, ours = distance(theirs[name], exact[name]) / size, distance(g, exact[name]) / size
        if not (own <= MOST and ours <= FACTOR * own + tol):
            return f"of {name!r} the graph's error is {ours:.1e}, the module's {own:.1e}"
    return ""


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

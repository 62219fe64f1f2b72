"""Run a module eagerly with its random sources replaced by the seeded ones of its OP-DAG.

Only the sources (`bernoulli_`, `rand`, ...) are replaced, below autograd; all arithmetic stays the module's own, so
that even dropout and noise can be compared bit for bit with the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_p2p import seeded
from fusion_p2p.canonical import Draw
from fusion_p2p.errors import CaptureError
from fusion_p2p.seeded import RngKey

_ATEN = torch.ops.aten


def _keep(mode: SeededRandom, x: torch.Tensor, p: float, generator: Any = None) -> torch.Tensor:
    site = mode.next_site(x.shape)
    return seeded.bernoulli(mode.key, site, tuple(x.shape), p).to(x.device).to(x.dtype)


def _bernoulli_(mode: SeededRandom, x: torch.Tensor, p: float = 0.5, generator: Any = None) -> torch.Tensor:
    return x.copy_(_keep(mode, x, p))


def _bernoulli(mode: SeededRandom, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    unit = seeded.rand(mode.key, mode.next_site(prob.shape), tuple(prob.shape), torch.float64).to(prob.device)
    drawn: torch.Tensor = (unit < prob).to(prob.dtype)
    return drawn


def _unit(mode: SeededRandom, like: torch.Tensor) -> torch.Tensor:
    return seeded.rand(mode.key, mode.next_site(like.shape), tuple(like.shape), like.dtype).to(like.device)


def _uniform_(mode: SeededRandom, x: torch.Tensor, start: float = 0.0, end: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(_unit(mode, x).mul(end - start).add(start))


def _normal_(mode: SeededRandom, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    drawn = seeded.randn(mode.key, mode.next_site(x.shape), tuple(x.shape), x.dtype).to(x.device)
    return x.copy_(drawn.mul(std).add(mean))


def _exponential_(mode: SeededRandom, x: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return x.copy_(torch.rsub(_unit(mode, x), 1.0).log().div(-lambd))


def _made(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory (`rand(size)`, `rand_like(x)`): make the tensor, then fill it."""

    def run(mode: SeededRandom, *args: Any, func: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        return draw(mode, func(*args, **kwargs))

    return run


def _fill_rand(mode: SeededRandom, x: torch.Tensor) -> torch.Tensor:
    return x.copy_(_unit(mode, x))


def _randint(mode: SeededRandom, *args: Any, func: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    x: torch.Tensor = func(*args, **kwargs)
    bounds = [a for a in args if isinstance(a, int)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    drawn = seeded.randint(mode.key, mode.next_site(x.shape), tuple(x.shape), low, high, x.dtype)
    return x.copy_(drawn)


_SOURCES: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.bernoulli_.float: _bernoulli_,
    _ATEN.bernoulli.p: _keep,
    _ATEN.bernoulli.default: _bernoulli,
    _ATEN.uniform_.default: _uniform_,
    _ATEN.normal_.default: _normal_,
    _ATEN.exponential_.default: _exponential_,
}
_FACTORIES: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.rand.default: _made(_fill_rand),
    _ATEN.rand_like.default: _made(_fill_rand),
    _ATEN.randn.default: _made(_normal_),
    _ATEN.randn_like.default: _made(_normal_),
    _ATEN.normal.float_float: _made(_normal_),
    _ATEN.randint.default: _randint,
    _ATEN.randint.low: _randint,
    _ATEN.randint_like.default: _randint,
    _ATEN.randint_like.low_dtype: _randint,
}


class SeededRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every random source that runs inside takes the next of `draws`, in order.

    A recomputed region (activation checkpointing restores torch's generator first) takes the same draws again: a
    draw is recognised by the state of torch's generator, which each draw moves.
    """

    def __init__(self, draws: Sequence[Draw], key: RngKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key
        self._draws = draws
        self._taken = 0
        self._seen: dict[bytes, int] = {}

    def next_site(self, shape: Sequence[int]) -> int:
        state = torch.get_rng_state().numpy().tobytes()
        torch.rand(())  # moves the generator; runs outside this mode
        if state in self._seen:
            return self._seen[state]
        if self._taken >= len(self._draws):
            raise CaptureError(
                f"forward draws {len(self._draws) + 1} or more random tensors (last of shape {tuple(shape)}), but the "
                f"captured graph {len(self._draws)}; draw in the same way on every call"
            )
        site = self._seen[state] = self._draws[self._taken].site
        self._taken += 1
        return site

    def finish(self) -> None:
        """Raises CaptureError if the module drew less often than its graph."""
        if self._taken != len(self._draws):
            raise CaptureError(
                f"forward draws {self._taken} random tensors, but the captured graph {len(self._draws)}; draw in the "
                "same way on every call"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        source = _SOURCES.get(func)
        if source is not None:
            return source(self, *args, **kwargs)
        factory = _FACTORIES.get(func)
        if factory is not None:
            return factory(self, *args, func=func, kwargs=kwargs)
        return func(*args, **kwargs)

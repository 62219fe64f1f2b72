"""What is placed: a chain of atoms, their work, their state and the bytes live between them (FusionLLM 3.3).

Arrays have one entry per atom, `cut_bytes` one per position 0..n; everything is for one micro-batch. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fusion_p2p.errors import InputError
from fusion_p2p.outboxes import UNDER_WAY_MOST_BYTES
from fusion_p2p.settings import ADAMW_BYTES, StateBytes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SharedWeight:
    """A weight read by atoms `first` and `last`; on different peers it travels once a step, its gradient back."""

    first: int
    last: int
    size_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A model as the planner sees it. Stage k of cuts (c1, c2, ...) holds atoms c[k]..c[k+1]-1.

    forward_flops, backward_flops: FLOP per atom. forward_bytes: memory traffic of the forward, bytes (the backward
    moves twice that). parameters: trainable scalars. stash_bytes: activations an atom keeps for its backward.
    kernels: operator launches. cut_bytes[p]: dense bytes on the wire across position p, one direction, skip edges
    included. wire_bytes_per_element: what `cut_bytes` counts for one element. `together`: groups of atoms that one
    peer must host (uses of a tied weight). `recompute`: the backward runs the forward again and keeps no stash.
    `heavier`: seconds of each atom over what its figures promise, as real steps showed.
    """

    name: str
    forward_flops: Floats
    backward_flops: Floats
    forward_bytes: Floats
    parameters: Floats
    stash_bytes: Floats
    kernels: Floats
    cut_bytes: Floats
    recompute: bool = False
    wire_bytes_per_element: float = 4.0
    state_bytes_per_parameter: float = 16.0  # fp32 weight, gradient and two AdamW moments
    snapshot_bytes_per_parameter: float = 12.0  # the same without the gradient
    samples: int = 1
    together: tuple[tuple[int, int], ...] = ()  # (first, last) atom, inclusive: no cut between them
    shared: tuple[SharedWeight, ...] = ()
    fixed_bytes: Floats | None = None  # memory per atom besides trainable state: frozen weights, buffers
    heavier: Floats | None = None

    @property
    def atoms(self) -> int:
        return len(self.forward_flops)

    def check(self) -> None:
        """Raises InputError naming the field, the atom and the value that is impossible."""
        n = self.atoms
        if n == 0:
            raise InputError(f"workload {self.name} has no atoms; capture the model first")
        for name in ("backward_flops", "forward_bytes", "parameters", "stash_bytes", "kernels"):
            self._check_array(name, n)
        self._check_array("forward_flops", n)
        self._check_array("cut_bytes", n + 1)
        for name in ("fixed_bytes", "heavier"):
            if getattr(self, name) is not None:
                self._check_array(name, n)
        for first, last in self.together:
            if not 0 <= first <= last < n:
                raise InputError(f"workload {self.name}: group of atoms {first}..{last} lies outside 0..{n - 1}")

    def _check_array(self, name: str, length: int) -> None:
        a: Floats = getattr(self, name)
        if len(a) != length:
            raise InputError(f"workload {self.name}: {name} has {len(a)} entries, expected {length}")
        bad = np.flatnonzero(~np.isfinite(a) | (a < 0))
        if len(bad):
            raise InputError(
                f"workload {self.name}: {name}[{bad[0]}] is {a[bad[0]]}; it must be finite and not negative"
            )

    def typical_cut_bytes(self) -> float:
        """Median dense bytes across an inner position; 1 if there is none."""
        inner = self.cut_bytes[1:-1]
        return float(np.median(inner)) if len(inner) else 1.0

    def cut_allowed(self) -> npt.NDArray[np.bool_]:
        """Boolean (n+1,): whether a stage may begin at each position; inner positions of tied groups may not."""
        ok = np.ones(self.atoms + 1, dtype=bool)
        for first, last in self.together:
            ok[first + 1 : last + 1] = False
        return ok

    def atom_bytes(self) -> tuple[Floats, Floats]:
        """(what stays in memory, what a snapshot copies) of each atom, in bytes."""
        fixed = 0.0 if self.fixed_bytes is None else self.fixed_bytes
        return (
            self.state_bytes_per_parameter * self.parameters + fixed,
            self.snapshot_bytes_per_parameter * self.parameters + fixed,
        )

    def frame_bytes(self, window: int) -> Floats:
        """Per position 0..n: most that frames across it take of one host, dense: of each micro-batch in flight one is
        under way, in an outbox or not yet taken."""
        out = np.minimum(window * self.cut_bytes, 2.0 * UNDER_WAY_MOST_BYTES)
        out[[0, -1]] = 0.0
        return out

    def stage_bytes(self, start: int, stop: int, window: int, log_bytes: float = 0.0) -> MemoryParts:
        """Memory of a stage of atoms start..stop-1 with `window` micro-batches in flight, by part, in bytes.

        `log_bytes`: frames kept for a replay.
        """
        state, snapshot = (float(a[start:stop].sum()) for a in self.atom_bytes())
        state += 2 * sum(w.size_bytes for w in self.shared if w.first < start <= w.last < stop)  # and its gradient
        stash = float(self.stash_bytes[start:stop].sum())
        held = window * float(self.cut_bytes[start]) + stash if self.recompute else window * stash
        frames = self.frame_bytes(window)
        return MemoryParts(
            state=state,
            activations=held,
            workspace=float(self.stash_bytes[start:stop].max(initial=0.0)),
            outbox=float(frames[start] + frames[stop]) + log_bytes,
            snapshot=snapshot,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one stage in memory, by use."""

    state: float  # weights, gradients, optimizer state
    activations: float  # held for the in-flight window
    workspace: float  # largest kernel's scratch, taken as the largest single stash
    outbox: float  # frames under way at both ends, and those kept for a replay
    snapshot: float  # the copy taken at a mark

    @property
    def total(self) -> float:
        return self.state + self.activations + self.workspace + self.outbox + self.snapshot


def workload(
    name: str,
    columns: Mapping[str, Sequence[float]],
    *,
    recompute: bool = False,
    wire_bytes_per_element: float = 4.0,
    samples: int = 1,
    together: tuple[tuple[int, int], ...] = (),
) -> Workload:
    """A Workload from plain sequences named as its array fields; checked."""
    a = {k: np.asarray(v, dtype=np.float64) for k, v in columns.items()}
    w = Workload(
        name=name,
        forward_flops=a["forward_flops"],
        backward_flops=a["backward_flops"],
        forward_bytes=a["forward_bytes"],
        parameters=a["parameters"],
        stash_bytes=a["stash_bytes"],
        kernels=a["kernels"],
        cut_bytes=a["cut_bytes"],
        recompute=recompute,
        wire_bytes_per_element=wire_bytes_per_element,
        samples=samples,
        together=together,
    )
    w.check()
    return w


class AtomFigures(Protocol):
    """What `fusion_p2p.workload.atoms` says of an atom; see there for units."""

    @property
    def weights(self) -> tuple[str, ...]: ...
    @property
    def owned(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def forward_flops(self) -> int: ...
    @property
    def backward_flops(self) -> int: ...
    @property
    def forward_bytes(self) -> int: ...
    @property
    def stash_bytes(self) -> int: ...
    @property
    def kernels(self) -> int: ...
    @property
    def cut_bytes(self) -> int: ...
    @property
    def cut_weight_bytes(self) -> int: ...
    @property
    def heavier(self) -> float: ...


def from_atoms(
    name: str,
    atoms: Sequence[AtomFigures],
    *,
    samples: int,
    recompute: bool = False,
    state: StateBytes = ADAMW_BYTES,
    together: tuple[tuple[int, int], ...] = (),
) -> Workload:
    """The workload of a captured model, from its atoms at one micro-batch of `samples`; frames are fp32.

    `together` empty: the loops that were unrolled are not cut.
    """

    def column(f: Callable[[AtomFigures], float]) -> Floats:
        return np.array([f(a) for a in atoms], dtype=np.float64)

    w = Workload(
        name=name,
        forward_flops=column(lambda a: a.forward_flops),
        backward_flops=column(lambda a: a.backward_flops),
        forward_bytes=column(lambda a: a.forward_bytes),
        parameters=column(lambda a: a.parameters),
        stash_bytes=column(lambda a: a.stash_bytes),
        kernels=column(lambda a: a.kernels),
        cut_bytes=np.append(column(lambda a: a.cut_bytes), 0.0),
        recompute=recompute,
        samples=samples,
        state_bytes_per_parameter=state.resident,
        snapshot_bytes_per_parameter=state.snapshot,
        together=together or _loops(atoms),
        shared=_shared(atoms),
        fixed_bytes=column(lambda a: max(0, a.weight_bytes - 4 * a.parameters)),
        heavier=column(lambda a: a.heavier) if any(a.heavier != 1.0 for a in atoms) else None,
    )
    w.check()
    return w


def _loops(atoms: Sequence[AtomFigures]) -> tuple[tuple[int, int], ...]:
    """(first, last) atom of each loop that was unrolled: wherever it were cut, all its weights would travel.

    A loop's weights have three readers or more, and no atom between the first and the last reads only others (as the
    layers between the uses of a tied embedding do).
    """
    readers = _readers(atoms)
    again = {w for w, at in readers.items() if len(at) > 2}
    spans = [
        (readers[w][0], readers[w][-1])
        for w in again
        if all(not a.weights or again.intersection(a.weights) for a in atoms[readers[w][0] : readers[w][-1] + 1])
    ]
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _readers(atoms: Sequence[AtomFigures]) -> dict[str, list[int]]:
    """Weight -> the atoms that read it, ascending."""
    readers: dict[str, list[int]] = {}
    for k, a in enumerate(atoms):
        for w in a.weights:
            readers.setdefault(w, []).append(k)
    return readers


def _shared(atoms: Sequence[AtomFigures]) -> tuple[SharedWeight, ...]:
    """Weights read by several atoms, from the owner to the last reader.

    `cut_weight_bytes` gives the sum over all weights across a position; those that begin at one atom share its rise.
    """
    readers = _readers(atoms)
    spans = [(v[0], v[-1]) for v in readers.values() if v[-1] > v[0]]
    across = [float(a.cut_weight_bytes) for a in atoms]
    size: dict[tuple[int, int], float] = {}
    out = []
    for first, last in sorted(spans):
        peers = [s for s in spans if s[0] == first]
        ended = sum(size.get(s, 0.0) for s in set(spans) if s[0] < first + 1 == s[1] + 1)
        rise = across[first + 1] - across[first] + ended if first + 1 < len(across) else 0.0
        size[first, last] = max(0.0, rise) / len(peers)
        out.append(SharedWeight(first, last, size[first, last]))
    return tuple(out)

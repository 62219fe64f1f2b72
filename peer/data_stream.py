"""Sources from what users have already: iterables with `state_dict`, and any other iterable (spooled to disk).

The iterable yields batches of any size; samples are regrouped into the sizes that the run asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import safetensors
import safetensors.torch
import torch

from fusion_p2p.errors import InputError
from peer.data import Batch, Source, State, join_rows, rows, slice_rows, tensor_batch
from peer.data_state import from_plain, to_plain


@runtime_checkable
class _Stateful(Protocol):
    """A Hugging Face streaming data set, torchdata's StatefulDataLoader, or alike."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


def as_source(data: object, spool: Path) -> Source:
    """`data` as a Source. `spool` is the folder for what a plain iterable has yielded."""
    if isinstance(data, Source):
        return data
    if isinstance(data, _Stateful) and not _loses_samples(data):
        return StatefulSource(data)
    if hasattr(data, "__iter__"):
        return SpooledSource(cast(Any, data), spool)
    raise InputError(f"data is {type(data).__name__}; give an iterable of batches")


def _loses_samples(data: object) -> bool:
    """Whether `data` (or what it loads from) is a Hugging Face stream with a shuffle buffer. Its state leaves out what
    the buffer holds, so that a run that resumes would miss those samples."""
    part = getattr(getattr(data, "dataset", data), "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable" and part.buffer_size > 1:
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def in_parts(data: Any, samples: int) -> Iterator[Batch]:
    """Every sample of `data` once, in order, in batches of at most `samples`: what is larger is cut.

    `data`: batches, or a source of ours with `once`.
    """
    once = getattr(data, "once", None)
    for element in data if once is None else once(samples):
        batch = tensor_batch(element)
        for start in range(0, rows(batch), samples):
            yield slice_rows(batch, start, min(start + samples, rows(batch)))


class _Restarting:
    """Elements of an iterable, started again at each end; `epoch` counts the starts."""

    def __init__(self, data: Any, epoch: int = 0) -> None:
        self._data, self.epoch = data, epoch
        self._iterator = self._start()

    def _start(self) -> Iterator[Any]:
        """Objects that order an epoch by its number are told it. (A Hugging Face dataset also goes back to a loaded
        state as often as it is started in that state's epoch.)"""
        for told in (self._data, getattr(self._data, "dataset", None)):
            set_epoch = getattr(told, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        return iter(self._data)

    def __next__(self) -> Batch:
        try:
            return tensor_batch(next(self._iterator))
        except StopIteration:
            self.epoch += 1
            self._iterator = self._start()
        try:
            return tensor_batch(next(self._iterator))
        except StopIteration:
            raise InputError(
                "the data ended and cannot be started again; give a list, a DataLoader or an object with __iter__, "
                "or fewer steps"
            ) from None


class _Regrouped:
    """Regroups elements; a subclass says how to pull one. At most one element is partly used at a time."""

    def __init__(self) -> None:
        self._element: Batch | None = None
        self._offset = 0

    def pull(self) -> Batch:
        raise NotImplementedError

    def next_batch(self, samples: int) -> Batch:
        parts: list[Batch] = []
        while samples:
            if self._element is None:
                self._element, self._offset = self.pull(), 0
            stop = min(self._offset + samples, rows(self._element))
            parts.append(slice_rows(self._element, self._offset, stop))
            samples -= stop - self._offset
            self._offset = stop
            if stop == rows(self._element):
                self._element, self._offset = None, 0
        return join_rows(parts)

    def _resume_inside(self, offset: int) -> None:
        self._element, self._offset = None, 0
        if offset:
            self._element, self._offset = self.pull(), offset
            if offset >= rows(self._element):
                raise InputError(f"saved data position {offset} lies outside a batch of {rows(self._element)}")


class StatefulSource(_Regrouped):
    """State is the iterable's own before the element in use, and the samples of it already given."""

    def __init__(self, data: _Stateful) -> None:
        super().__init__()
        self._data = data
        self._elements = _Restarting(data)
        self._before = self._inner()

    def _inner(self) -> State:
        return {"inner": to_plain(self._data.state_dict()), "epoch": self._elements.epoch}

    def pull(self) -> Batch:
        self._before = self._inner()
        return next(self._elements)

    def state_dict(self) -> State:
        return {**(self._before if self._element is not None else self._inner()), "offset": self._offset}

    def load_state_dict(self, state: State) -> None:
        self._data.load_state_dict(from_plain(state["inner"]))
        self._elements = _Restarting(self._data, int(state["epoch"]))
        self._resume_inside(int(state["offset"]))


class SpooledSource(_Regrouped):
    """Writes each element to `folder` before giving it out, so that it can be given again after a fault.

    In a new process the iterable is started again and what the folder already holds is passed over.
    """

    def __init__(self, data: Any, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._next = folder, 0
        self._spooled = max((int(p.stem) + 1 for p in folder.glob("*.safetensors")), default=0)
        self._to_skip = self._spooled
        self._elements = _Restarting(data)

    def pull(self) -> Batch:
        index, self._next = self._next, self._next + 1
        if index < self._spooled:
            return _read_element(self._path(index))
        for _ in range(self._to_skip):
            next(self._elements)
        self._to_skip = 0
        element = next(self._elements)
        _write_element(self._path(index), element)
        self._spooled = index + 1
        return element

    def state_dict(self) -> State:
        return {"element": self._next - (self._element is not None), "offset": self._offset}

    def load_state_dict(self, state: State) -> None:
        element = int(state["element"])
        if not 0 <= element <= self._spooled:
            raise InputError(f"{self._folder} holds {self._spooled} batches, {element} were saved; restore it")
        self._next = element
        self._resume_inside(int(state["offset"]))

    def forget_before(self, state: State) -> None:
        """Delete what no kept checkpoint needs; `state` is the oldest one's."""
        for path in self._folder.glob("*.safetensors"):
            if int(path.stem) < min(int(state["element"]), self._spooled - 1):
                path.unlink()

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:08d}.safetensors"


def _write_element(path: Path, element: Batch) -> None:
    named = element if isinstance(element, dict) else {str(i): t for i, t in enumerate(element)}
    kind = "dict" if isinstance(element, dict) else "tuple"
    # safetensors sorts members; their order is the order of the model's arguments
    data = safetensors.torch.save(
        {f"{i}:{k}": v.contiguous().clone() for i, (k, v) in enumerate(named.items())}, metadata={"kind": kind}
    )
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def _read_element(path: Path) -> Batch:
    try:
        with safetensors.safe_open(str(path), framework="pt") as f:
            kind = (f.metadata() or {}).get("kind")
            names = sorted(f.keys(), key=lambda k: int(k.partition(":")[0]))
            members: list[tuple[str, torch.Tensor]] = [(k.partition(":")[2], f.get_tensor(k)) for k in names]
    except (OSError, safetensors.SafetensorError) as e:
        raise InputError(f"cannot read the spooled batch {path}: {e}; restore it or start a new run") from e
    return dict(members) if kind == "dict" else tuple(t for _, t in members)

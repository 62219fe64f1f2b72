"""The data side of a run: global batches in order, each counted once, with a position that can be stored.

`data` is an iterable of batches (dict, tuple or tensor; the first dimension counts samples). It is re-batched to the
global batch; the last batch of an epoch may be smaller. Three kinds of source, by what they can do:

    state_dict/load_state_dict   HF streaming sets, StatefulDataLoader, fusion-p2p's own: resumed through it
    sequences (len, [index])     resumed by index
    any other iterable           each batch is spooled to the run folder before it is released, and read back on
                                 resume; after the spool an iterable that starts afresh is skipped to its place,
                                 an iterator goes on from where the caller has it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fusion_p2p.errors import InputError

Flat: TypeAlias = dict[str, torch.Tensor]


@runtime_checkable
class Seekable(Protocol):
    """A source that stores and restores its position itself."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def flatten(batch: object, prefix: str = "") -> Flat:
    """A batch's tensors by their path: {"x": {"mask": t}} -> {"x.mask": t}; (a, b) -> {"0": a, "1": b}."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return {prefix or "0": torch.as_tensor(batch)}
    if isinstance(batch, Mapping):
        parts: Iterable[tuple[str, object]] = ((str(k), v) for k, v in batch.items())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = ((str(i), v) for i, v in enumerate(batch))
    else:
        where = f" at {prefix!r}" if prefix else ""
        raise InputError(f"a batch holds tensors in dicts and tuples; found {type(batch).__name__}{where}")
    flat: Flat = {}
    for name, value in parts:
        if value is not None:
            flat.update(flatten(value, f"{prefix}.{name}" if prefix else name))
    return flat


def samples_of(flat: Flat) -> int:
    sizes = {name: t.shape[0] if t.dim() else 0 for name, t in flat.items()}
    if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InputError(f"the tensors of a batch must share their first dimension (samples), found {sizes}")
    return next(iter(sizes.values()))


def micro_batches(flat: Flat, size: int) -> list[Flat]:
    """Cut a global batch into micro-batches of `size` samples, the last one possibly smaller."""
    total = samples_of(flat)
    return [{n: t[a : a + size] for n, t in flat.items()} for a in range(0, total, size)]


class _State(msgspec.Struct, frozen=True, kw_only=True):
    number: int  # global batches given so far
    epoch: int
    index: int  # source items taken in this epoch
    source: bytes = b""  # the source's own state_dict, encoded
    leftover: bytes = b""  # samples taken from the source and not yet given


class BatchFeed:
    """Iterates over global batches of `samples` samples. Not thread-safe; ends where a one-pass source ends."""

    def __init__(self, data: Iterable[object], samples: int, spool: Path | None = None) -> None:
        self._data = data
        self._samples = samples
        self._spool = spool
        self._number = self._epoch = self._index = 0
        self._left: Flat | None = None
        self._items: Iterator[object] | None = None
        self._seekable = isinstance(data, Seekable)
        self._sequence = not self._seekable and isinstance(data, Sequence)
        self._one_pass = not self._sequence and not self._seekable and isinstance(data, Iterator)

    @property
    def spooled(self) -> bool:
        return not self._seekable and not self._sequence

    def __iter__(self) -> Iterator[Flat]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> Flat | None:
        """The next global batch; None when the source has no more."""
        file = self._spool_file(self._number)
        if file is not None and file.exists():
            batch, left = _read_spooled(file)
            if self._one_pass:
                self._left = left  # the iterator itself stands behind the spool already
            else:
                self._gather()
        else:
            batch = self._gather()
            if batch is not None and file is not None:
                _write_spooled(file, batch, self._left)
        self._number += batch is not None
        return batch

    def state(self) -> bytes:
        """Where the next batch comes from."""
        own = pack_tree(self._data.state_dict()) if isinstance(self._data, Seekable) else b""
        left = pack_tree(self._left) if self._left is not None else b""
        return msgspec.msgpack.encode(
            _State(number=self._number, epoch=self._epoch, index=self._index, source=own, leftover=left)
        )

    def load(self, state: bytes) -> None:
        """Go to a position given by `state`; the source must be the one it was taken from."""
        try:
            at = msgspec.msgpack.decode(state, type=_State)
            left = unpack_tree(at.leftover) if at.leftover else None
            own = unpack_tree(at.source) if at.source else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise InputError(f"the stored data position is damaged: {error}") from None
        self._number, self._epoch, self._index, self._left, self._items = at.number, at.epoch, at.index, left, None
        if isinstance(self._data, Seekable):
            if own is not None:
                self._data.load_state_dict(own)
                self._items = iter(self._data)
        elif not self._one_pass:
            self._items = self._from(at.index)

    def forget_before(self, number: int) -> None:
        """Delete spooled batches that no kept set needs."""
        if self._spool is not None and self.spooled and self._spool.exists():
            for file in self._spool.glob("*.safetensors"):
                if int(file.stem) < number:
                    file.unlink()

    @staticmethod
    def number_in(state: bytes) -> int:
        """The number of the batch that a stored position stands before."""
        return msgspec.msgpack.decode(state, type=_State).number

    def _from(self, index: int) -> Iterator[object]:
        if self._sequence:
            assert isinstance(self._data, Sequence)
            return (self._data[i] for i in range(index, len(self._data)))
        items = iter(self._data)
        for _ in range(index):
            if next(items, None) is None:
                raise InputError(
                    f"the data ended at item {index}, which the run had already used: is it the same data?"
                )
        return items

    def _gather(self) -> Flat | None:
        parts = [self._left] if self._left is not None else []
        have = samples_of(parts[0]) if parts else 0
        self._left = None
        fresh_epochs = 0
        while have < self._samples:
            if self._items is None:
                self._items = self._from(0)
            item = next(self._items, _END)
            if item is _END:
                if parts or self._one_pass:
                    if not self._one_pass:
                        self._next_epoch()
                    break
                self._next_epoch()
                fresh_epochs += 1
                if fresh_epochs > 1:
                    break  # an empty source
                continue
            self._index += 1
            flat = flatten(item)
            have += samples_of(flat)
            parts.append(flat)
        if not parts:
            return None
        whole = parts[0] if len(parts) == 1 else {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
        if have > self._samples:
            self._left = {n: t[self._samples :] for n, t in whole.items()}
            whole = {n: t[: self._samples] for n, t in whole.items()}
        return whole

    def _next_epoch(self) -> None:
        self._epoch, self._index, self._items = self._epoch + 1, 0, None

    def _spool_file(self, number: int) -> Path | None:
        if self._spool is None or not self.spooled:
            return None
        return self._spool / f"{number:09d}.safetensors"


_END = object()


def _write_spooled(file: Path, batch: Flat, left: Flat | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    tensors = {f"b:{n}": t.contiguous() for n, t in batch.items()}
    save_file(tensors | {f"l:{n}": t.contiguous() for n, t in (left or {}).items()}, part)
    part.replace(file)


def _read_spooled(file: Path) -> tuple[Flat | None, Flat | None]:
    tensors = load_file(file)
    batch, left = ({n[2:]: t for n, t in tensors.items() if n.startswith(p)} for p in ("b:", "l:"))
    return batch, left or None


def pack_tree(tree: object) -> bytes:
    """Dicts, lists, tuples, numbers, text, bytes, arrays and tensors as msgpack; InputError on anything else."""
    return msgspec.msgpack.encode(_packable(tree))


def _packable(tree: object) -> object:
    if isinstance(tree, int) and not -(2**63) <= tree < 2**64:
        return {"i": [str(tree)]}  # numpy's generators hold 128-bit integers
    if tree is None or isinstance(tree, bool | int | float | str | bytes):
        return tree
    if isinstance(tree, torch.Tensor):
        array = tree.detach().cpu().contiguous()
        raw = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"t": [str(tree.dtype).removeprefix("torch."), list(tree.shape), raw]}
    if isinstance(tree, np.ndarray | np.generic) and not tree.dtype.hasobject:
        array_ = np.ascontiguousarray(tree)
        return {"a": [array_.dtype.str, list(np.shape(tree)), array_.tobytes()]}
    if isinstance(tree, Mapping):
        return {"d": [[_packable(k), _packable(v)] for k, v in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"l" if isinstance(tree, list) else "u": [_packable(v) for v in tree]}
    raise InputError(f"the data source's state_dict holds a {type(tree).__name__}, which cannot be stored")


def unpack_tree(data: bytes) -> Any:
    """The inverse of `pack_tree`; ValueError on bytes that it did not make."""
    return _unpacked(msgspec.msgpack.decode(data))


def _unpacked(tree: object) -> Any:
    if not isinstance(tree, dict):
        return tree
    (kind, body), *rest = tree.items()
    if rest or not isinstance(body, list):
        raise ValueError("not a stored tree")
    if kind == "i":
        return int(body[0])
    if kind == "t":
        dtype = getattr(torch, body[0], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {body[0]!r}")
        return (
            torch.frombuffer(bytearray(body[2]), dtype=dtype).reshape(body[1])
            if body[2]
            else torch.empty(body[1], dtype=dtype)
        )
    if kind == "a":
        return np.frombuffer(bytearray(body[2]), dtype=np.dtype(body[0])).reshape(body[1])
    if kind == "d":
        return {_unpacked(k): _unpacked(v) for k, v in body}
    if kind in ("l", "u"):
        items = [_unpacked(v) for v in body]
        return items if kind == "l" else tuple(items)
    raise ValueError(f"not a stored tree: {kind!r}")

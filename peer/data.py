"""Where a run's samples come from: seekable sources whose state is (epoch, position, seed).

A *batch* is a dict (for `model(**batch)`) or a tuple (for `model(*batch)`) of tensors that share their first
dimension, the samples. `peer.data_open` builds sources from a configuration, `peer.data_stream` from any iterable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from fusion_p2p.errors import InputError

Batch: TypeAlias = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
State: TypeAlias = dict[str, Any]  # plain JSON: numbers, strings, lists, dicts


@runtime_checkable
class Source(Protocol):
    """An endless stream of samples that can go back to any state it had."""

    def next_batch(self, samples: int) -> Batch:
        """The next `samples` samples. A batch may span the end of an epoch, so that it is always full."""
        ...

    def state_dict(self) -> State:
        """Where the next batch starts, as plain JSON."""
        ...

    def load_state_dict(self, state: State) -> None: ...


def rows(batch: Batch) -> int:
    """Samples in a batch."""
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return int(tensors[0].shape[0])


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Samples start..stop-1, as views."""
    if isinstance(batch, dict):
        return {k: v[start:stop] for k, v in batch.items()}
    return tuple(v[start:stop] for v in batch)


def join_rows(parts: list[Batch]) -> Batch:
    """Batches of one structure, end to end."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, dict):
        return {k: torch.cat([p[k] for p in parts if isinstance(p, dict)]) for k in first}
    return tuple(torch.cat([p[i] for p in parts if isinstance(p, tuple)]) for i in range(len(first)))


def epoch_order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """A permutation of range(samples), a pure function of its arguments.

    It sorts raw Philox words: numpy promises the bits of its generators, not of `Generator.permutation`.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(samples)
    return np.argsort(words, kind="stable").astype(np.int64)


class ArraySource:
    """Base of the seekable sources: `samples` samples that can be taken by index."""

    def __init__(self, samples: int, *, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._position = 0, 0
        self._order_of: tuple[int, npt.NDArray[np.int64]] | None = None

    def take(self, indices: npt.NDArray[np.int64], epoch: int) -> Batch:
        """The samples with these indices, as they are in that epoch."""
        raise NotImplementedError

    def next_batch(self, samples: int) -> Batch:
        parts: list[Batch] = []
        while samples:
            indices = self._order(self._epoch)[self._position : self._position + samples]
            parts.append(self.take(indices, self._epoch))
            samples -= len(indices)
            self._position += len(indices)
            if self._position == self.samples:
                self._epoch, self._position = self._epoch + 1, 0
        return join_rows(parts)

    def once(self, batch_samples: int, limit: int = 0) -> Iterator[Batch]:
        """Every sample (or the first `limit`) once, in order; the last batch may be smaller. Moves no state."""
        stop = min(limit, self.samples) if limit else self.samples
        for start in range(0, stop, batch_samples):
            yield self.take(np.arange(start, min(start + batch_samples, stop)), 0)

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "samples": self.samples}

    def load_state_dict(self, state: State) -> None:
        if state.get("samples") != self.samples:
            raise InputError(
                f"the data changed: {self.samples} samples now, {state.get('samples')} when the run was saved; "
                "restore the old data, or fork the run"
            )
        if not 0 <= state["position"] < self.samples:
            raise InputError(f"saved data position {state['position']} lies outside {self.samples} samples")
        self._epoch, self._position, self._seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self._order_of = None

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order_of is None or self._order_of[0] != epoch:
            order = epoch_order(self._seed, epoch, self.samples) if self._shuffle else np.arange(self.samples)
            self._order_of = (epoch, order)
        return self._order_of[1]


class TokenSource(ArraySource):
    """Windows of `context` tokens. Neighbours share one token, so each token is predicted once an epoch.

    Batches are {"input_ids", "labels"}, both int64 [samples, context]; the model shifts the labels itself, as
    transformers' causal models do. `bytes_per_token` is the mean over the text, 0.0 where no text is known.
    A shuffled source starts each epoch at another offset, so that windows are not cut alike twice.
    """

    def __init__(
        self, tokens: npt.NDArray[Any], context: int, *, seed: int, shuffle: bool, bytes_per_token: float = 0.0
    ) -> None:
        # one window is given up to make room for the offset
        windows = (len(tokens) - 1) // (context - 1) - shuffle
        if windows < 1:
            raise InputError(f"{len(tokens)} tokens are too few for one sequence of {context}; give more text")
        super().__init__(windows, seed=seed, shuffle=shuffle)
        self._tokens, self._context = tokens, context
        self.bytes_per_token = bytes_per_token

    def take(self, indices: npt.NDArray[np.int64], epoch: int) -> Batch:
        offset = 0
        if self._shuffle:
            words = np.random.Philox(key=np.array([self._seed + 1, epoch], dtype=np.uint64)).random_raw(1)
            offset = int(words[0] % (self._context - 1))
        starts = offset + indices * (self._context - 1)
        ids = torch.from_numpy(np.stack([self._tokens[s : s + self._context] for s in starts]).astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class ImageSource(ArraySource):
    """{"pixel_values": uint8 [samples, channels, height, width], "labels": int64 [samples]}.

    Pixels travel as bytes; the model normalises them (`peer.models.ImageClassifier`).
    """

    def __init__(
        self, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], *, seed: int, shuffle: bool
    ) -> None:
        if len(pixels) != len(labels) or not len(pixels):
            raise InputError(f"{len(pixels)} images and {len(labels)} labels do not pair up")
        super().__init__(len(pixels), seed=seed, shuffle=shuffle)
        self.pixels, self.labels = pixels, labels

    def take(self, indices: npt.NDArray[np.int64], epoch: int) -> Batch:
        return {
            "pixel_values": torch.from_numpy(self.pixels[indices]),
            "labels": torch.from_numpy(self.labels[indices]),
        }


def tensor_batch(element: object) -> Batch:
    """What an iterable yields, as a batch. Raises InputError unless its members share their first dimension."""
    members: list[tuple[str, object]]
    if isinstance(element, Mapping):
        members = [(str(k), v) for k, v in element.items()]
    elif isinstance(element, tuple | list):
        members = [(str(i), v) for i, v in enumerate(element)]
    else:
        raise InputError(f"data yields {type(element).__name__}; yield dicts or tuples of tensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in members:
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as e:
            raise InputError(f"data member {name!r} is no tensor: {e}") from e
    sizes = {name: t.shape[0] if t.dim() else None for name, t in tensors.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values() or 0 in sizes.values():
        raise InputError(f"the members of a batch must share their first dimension, got {sizes}")
    return tensors if isinstance(element, Mapping) else tuple(tensors.values())

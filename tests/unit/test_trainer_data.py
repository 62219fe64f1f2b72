"""The data side: global batches in order, each sample once, wherever a stop falls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from peer.trainer_data import BatchFeed, Flat, flatten, micro_batches, pack_tree, unpack_tree


def items(*sizes: int) -> list[dict[str, torch.Tensor]]:
    """Batches of these sizes whose samples are numbered through."""
    whole = torch.arange(sum(sizes))
    return [{"x": part} for part in torch.split(whole, list(sizes))]


def take(feed: BatchFeed, count: int) -> list[list[int]]:
    return [[] if (b := feed.next()) is None else b["x"].tolist() for _ in range(count)]


class Stateful:
    """A source that restores itself, as StatefulDataLoader does."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._items, self._at = items(*sizes), 0

    def __iter__(self) -> Iterator[Any]:
        while self._at < len(self._items):
            self._at += 1
            yield self._items[self._at - 1]
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict["at"]


class Fresh:
    """A re-iterable without length or state, as a plain DataLoader is."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        return iter(items(*self._sizes))


SOURCES: dict[str, Callable[[tuple[int, ...]], Iterable[object]]] = {
    "sequence": lambda sizes: items(*sizes),
    "stateful": Stateful,
    "fresh": Fresh,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rebatched_with_a_smaller_last_batch(kind: str) -> None:
    feed = BatchFeed(SOURCES[kind]((3, 4, 2)), 4)
    assert take(feed, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [0, 1, 2, 3]]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    samples=st.integers(1, 6),
    stop=st.integers(0, 9),
    released=st.integers(0, 3),
    kind=st.sampled_from(sorted(SOURCES)),
)
def test_a_stop_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], samples: int, stop: int, released: int, kind: str
) -> None:
    """State taken after `stop` batches; `released` more were given before the stop; then a new feed, a new source."""
    make = SOURCES[kind]
    undisturbed = take(BatchFeed(make(tuple(sizes)), samples), stop + 8)
    spool = tmp_path_factory.mktemp("spool")
    first = BatchFeed(make(tuple(sizes)), samples, spool)
    take(first, stop)
    state = first.state()
    take(first, released)
    again = BatchFeed(make(tuple(sizes)), samples, spool)
    again.load(state)
    assert BatchFeed.number_in(state) == stop
    assert take(again, 8) == undisturbed[stop:]


def test_an_iterator_is_spooled_and_goes_on(tmp_path: Path) -> None:
    stream = iter(items(2, 2, 2, 2))
    feed = BatchFeed(stream, 2, tmp_path)
    take(feed, 1)
    state = feed.state()
    take(feed, 1)
    again = BatchFeed(stream, 2, tmp_path)
    again.load(state)
    assert take(again, 4) == [[2, 3], [4, 5], [6, 7], []]
    again.forget_before(3)
    assert [f.name for f in tmp_path.iterdir()] == ["000000003.safetensors"]


def test_flatten_names_paths() -> None:
    t = torch.zeros(2)
    assert set(flatten({"x": {"mask": t}, "y": [t, None, t]})) == {"x.mask", "y.0", "y.2"}
    assert set(flatten((t, t))) == {"0", "1"}
    assert set(flatten(t)) == {"0"}
    with pytest.raises(InputError, match="found str at 'x'"):
        flatten({"x": "text"})


def test_micro_batches_cut_in_order() -> None:
    flat: Flat = {"x": torch.arange(5), "y": torch.zeros(5, 3)}
    assert [m["x"].tolist() for m in micro_batches(flat, 2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(InputError, match="share their first dimension"):
        micro_batches({"x": torch.zeros(2), "y": torch.zeros(3)}, 2)


def test_trees_come_back_equal() -> None:
    tree = {"t": torch.arange(4.0).reshape(2, 2), "n": np.arange(3), "big": 2**100, 3: (1, [None, b"x", -2.5])}
    back = unpack_tree(pack_tree(tree))
    assert torch.equal(back["t"], tree["t"]) and np.array_equal(back["n"], tree["n"])  # type: ignore[arg-type]
    assert back["big"] == 2**100 and back[3] == (1, [None, b"x", -2.5])
    with pytest.raises(InputError, match="holds a set"):
        pack_tree({"x": {1, 2}})

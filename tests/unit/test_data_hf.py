"""Hugging Face's streaming datasets and torchdata's StatefulDataLoader, the real ones: resumed inside an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.data import Source, rows
from peer.data_stream import SpooledSource, StatefulSource, as_source

datasets = pytest.importorskip("datasets", reason="pip install 'fusion-p2p[data]'")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install 'fusion-p2p[data]'")

SAMPLES = 30


def examples(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for i in range(10):
            yield {"x": [10 * shard + i] * 4}


def stream() -> Any:
    return datasets.IterableDataset.from_generator(examples, gen_kwargs={"shards": [0, 1, 2]}).with_format("torch")


def streamed() -> Any:
    return stream().batch(4)


def streamed_in_shuffled_shards() -> Any:
    return stream().shuffle(seed=3, buffer_size=1).batch(4)


def loaded(**options: Any) -> Any:
    torch.manual_seed(5)  # the loader draws its order from torch's own generator
    table = datasets.Dataset.from_dict({"x": [[i] * 4 for i in range(SAMPLES)]}).with_format("torch")
    return stateful_dataloader.StatefulDataLoader(table, batch_size=4, **options)


def shuffled() -> Any:
    return loaded(shuffle=True)


def loaded_by_workers() -> Any:
    return loaded(shuffle=True, num_workers=1)


def stream_loaded() -> Any:
    return stateful_dataloader.StatefulDataLoader(stream(), batch_size=4)


def take(source: Source, samples: int) -> list[int]:
    batch = source.next_batch(samples)
    assert isinstance(batch, dict) and rows(batch) == samples and batch["x"].shape == (samples, 4)
    return [int(v) for v in batch["x"][:, 0]]


FEW, MANY = (3,), (0, 1, 3, 4, 6, 7)  # with workers each start takes seconds


@pytest.mark.parametrize(
    ("make", "points"),
    [
        (streamed, MANY),
        (streamed_in_shuffled_shards, MANY),
        (shuffled, MANY),
        (loaded_by_workers, FEW),
        (stream_loaded, MANY),
    ],
)
def test_a_state_saved_inside_an_epoch_gives_the_same_batches(make: Callable[[], Any], points: tuple[int]) -> None:
    """Batches of 5 samples from batches of 4, over the end of the first epoch: after each, a fresh object that is
    given the saved state goes on with the same samples."""
    source = as_source(make(), Path("unused"))
    assert isinstance(source, StatefulSource)
    given, states = [], [json.dumps(source.state_dict())]
    for _ in range(9):
        given.append(take(source, 5))
        states.append(json.dumps(source.state_dict()))
    assert sorted(x for batch in given[:6] for x in batch) == list(range(SAMPLES))
    for at in points:
        again = as_source(make(), Path("unused"))
        again.load_state_dict(json.loads(states[at]))
        assert [take(again, 5) for _ in given[at:]] == given[at:], at


@pytest.mark.parametrize("loader", [False, True])
def test_a_shuffle_buffer_which_its_own_state_forgets_is_spooled(tmp_path: Path, loader: bool) -> None:
    def make() -> Any:
        data = stream().shuffle(seed=3, buffer_size=8)
        return stateful_dataloader.StatefulDataLoader(data, batch_size=4) if loader else data.batch(4)

    source = as_source(make(), tmp_path)
    assert isinstance(source, SpooledSource)
    begun = [take(source, 5) for _ in range(3)]
    state = json.loads(json.dumps(source.state_dict()))
    rest = [take(source, 5) for _ in range(6)]
    assert sorted(x for batch in begun + rest[:3] for x in batch) == list(range(SAMPLES))
    resumed = as_source(make(), tmp_path)
    resumed.load_state_dict(state)
    assert [take(resumed, 5) for _ in rest] == rest
    further = take(source, 5)  # beyond what was spooled when the new process began
    assert take(resumed, 5) == further

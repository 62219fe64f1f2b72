"""Sources: each sample once an epoch, any state can be returned to, and what users bring resumes too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from peer import config
from peer.data import Source, TokenSource, epoch_order, join_rows, rows
from peer.data_open import open_data, package_text, read_idx
from peer.data_state import from_plain, to_plain
from peer.data_stream import SpooledSource, as_source, in_parts
from peer.tokenize_text import BytesTokenizer, open_tokenizer

TEXT = "".join(f"line {i} says that {i * i} is its square.\n" for i in range(400))


def configured(kind: str, path: Path | str, extra: str = "") -> config.Config:
    family = "resnet" if kind in ("idx", "mnist") else "gpt2"
    return config.parse(f'[model]\nfamily = "{family}"\n[data]\nkind = "{kind}"\npath = "{path}"\n{extra}')


def values(source: Source, samples: int, name: str = "x") -> list[int]:
    batch = source.next_batch(samples)
    assert isinstance(batch, dict) and rows(batch) == samples
    return [int(v) for v in batch[name]]


def test_an_epoch_is_the_same_permutation_on_every_machine() -> None:
    assert list(epoch_order(7, 3, 10)) == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]
    assert sorted(epoch_order(7, 4, 1000)) == list(range(1000))
    assert list(epoch_order(7, 4, 10)) != list(epoch_order(7, 3, 10)) != list(epoch_order(8, 3, 10))


def test_windows_predict_each_token_once() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    source = TokenSource(tokens, 64, seed=0, shuffle=False)
    predicted = [int(t) for batch in source.once(4) for row in batch["input_ids"] for t in row[1:]]
    assert predicted == list(range(1, 63 * source.samples + 1))
    limited = list(source.once(4, limit=6))
    assert [rows(b) for b in limited] == [4, 2]


def test_a_large_batch_passes_in_parts_and_no_sample_is_lost() -> None:
    sizes = (1, 37, 8, 16)
    batches = [{"x": torch.arange(size) + 100 * i} for i, size in enumerate(sizes)]
    parts = list(in_parts(batches, 8))
    assert [rows(p) for p in parts] == [1, 8, 8, 8, 8, 5, 8, 8, 8]
    whole, again = join_rows([*batches]), join_rows(parts)
    assert isinstance(whole, dict) and isinstance(again, dict) and torch.equal(whole["x"], again["x"])
    source = TokenSource(np.arange(100, dtype=np.uint16), 10, seed=0, shuffle=False)
    assert sum(rows(p) for p in in_parts(source, 4)) == source.samples


@given(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 2**31 - 1))
def test_a_state_gives_the_same_samples_again(windows: int, sizes: list[int], seed: int) -> None:
    tokens = np.arange(10 * (windows + 1) + 1, dtype=np.uint32)
    source = TokenSource(tokens, 11, seed=seed, shuffle=True)
    other = TokenSource(tokens, 11, seed=0, shuffle=True)
    for size in sizes:
        other.load_state_dict(json.loads(json.dumps(source.state_dict())))
        mine, theirs = source.next_batch(size), other.next_batch(size)
        assert torch.equal(mine["input_ids"], theirs["input_ids"])
        assert mine["input_ids"].shape == (size, 11)


def test_a_shuffled_epoch_gives_each_window_once() -> None:
    source = TokenSource(np.arange(501, dtype=np.uint32), 11, seed=5, shuffle=True)
    firsts = [int(r[0]) for r in source.next_batch(source.samples)["input_ids"]]
    offset = min(firsts)
    assert 0 <= offset < 10
    assert sorted(firsts) == [offset + 10 * i for i in range(source.samples)]
    assert source.state_dict() == {"epoch": 1, "position": 0, "seed": 5, "samples": source.samples}


def test_other_data_than_the_saved_is_refused() -> None:
    state = TokenSource(np.arange(100), 11, seed=0, shuffle=True).state_dict()
    with pytest.raises(InputError, match="the data changed: 19 samples now, 8 when"):
        TokenSource(np.arange(201), 11, seed=0, shuffle=True).load_state_dict(state)


def test_text_files_with_a_bpe_trained_once(tmp_path: Path) -> None:
    books, folder = tmp_path / "books", tmp_path / "run"
    books.mkdir()
    (books / "a.txt").write_text(TEXT[:9000])
    (books / "b.txt").write_text(TEXT[9000:])
    settings = configured("text", books, "vocab = 300")
    first = open_data(settings, folder, 32)
    assert first.vocab == 300 and first.tokenizer is not None
    trained = (folder / "tokenizer.json").read_bytes()
    again = open_data(settings, folder, 32)
    assert (folder / "tokenizer.json").read_bytes() == trained
    assert torch.equal(first.train.next_batch(5)["input_ids"], again.train.next_batch(5)["input_ids"])
    assert again.tokenizer is not None
    for tokenizer in (first.tokenizer, again.tokenizer, BytesTokenizer()):
        assert tokenizer.decode([int(i) for i in tokenizer.encode("naïve ☂\n\n x")]) == "naïve ☂\n\n x"
    held_out = first.held_out
    assert 1.0 < held_out.bytes_per_token < 8.0
    last = held_out.once(1)
    text = first.tokenizer.decode([int(t) for t in next(last)["input_ids"][0]])
    assert text in TEXT[int(len(TEXT) * 0.94) :]


def test_bytes_need_no_tokenizer_and_somebodys_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    raw = open_data(configured("text", tmp_path / "t.txt", 'tokenizer = "bytes"'), tmp_path, 32)
    assert raw.vocab == 256 and raw.held_out.bytes_per_token == 1.0
    open_tokenizer("bpe", 280, tmp_path / "x", TEXT)
    theirs = open_tokenizer(str(tmp_path / "x" / "tokenizer.json"), 1024, tmp_path / "y", "")
    assert theirs.vocab_size == 280 and (tmp_path / "y" / "tokenizer.json").exists()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"is no tokenizer\.json"):
        open_tokenizer(str(tmp_path / "bad.json"), 1024, tmp_path / "z", "")
    assert not (tmp_path / "z").exists()


def test_package_text_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strange_book"
    package.mkdir()
    monkeypatch.chdir(tmp_path)
    run = "import os; os.mkdir('ran')\n"
    (package / "__init__.py").write_text(run)
    (package / "text.py").write_text(run + 'numbers = [1, 2]\nsmall = "no"\nbook = """\nIn the beginning.\n"""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_text("strange_book.text") == "In the beginning."
    with pytest.raises(InputError, match=r"has no module 'strange_book\.other'"):
        package_text("strange_book.other")
    with pytest.raises(InputError, match="pip install not-there"):
        package_text("not_there.text")
    assert not (tmp_path / "ran").exists()


def test_token_files_as_nanogpt_writes_them(tmp_path: Path) -> None:
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    opened = open_data(configured("tokens", tmp_path, "vocab = 500\nshuffle = false"), tmp_path, 16)
    assert opened.train.next_batch(2)["input_ids"][1].tolist() == list(range(15, 31))
    assert opened.held_out.samples == 6 and opened.vocab == 500
    with pytest.raises(InputError, match=r"holds token 499, data\.vocab is 400"):
        open_data(configured("tokens", tmp_path, "vocab = 400"), tmp_path, 16)
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match="3 bytes, no multiple"):
        open_data(configured("tokens", tmp_path), tmp_path, 16)
    with pytest.raises(InputError, match=r"none/train\.bin does not exist"):
        open_data(configured("tokens", tmp_path / "none"), tmp_path, 16)


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def test_idx_folders_gzipped_or_not(tmp_path: Path) -> None:
    pixels, labels = np.arange(20 * 6 * 5).reshape(20, 6, 5) % 251, np.arange(20) % 3
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    opened = open_data(configured("idx", tmp_path, "held_out = 0.1"), tmp_path, 0)
    assert (opened.shape, opened.classes, opened.held_out.samples) == ((1, 6, 5), 3, 2)
    seen = [*opened.train.next_batch(18)["pixel_values"], *next(opened.held_out.once(2))["pixel_values"]]
    assert sorted(int(p[0, 0, 0]) for p in seen) == sorted(int(p[0, 0]) for p in pixels)
    batch = opened.train.next_batch(7)
    assert batch["pixel_values"].dtype == torch.uint8
    for image, label in zip(batch["pixel_values"], batch["labels"], strict=True):
        index = next(i for i in range(20) if (pixels[i] == image[0].numpy()).all())
        assert labels[index] == label


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no IDX file"),
        (b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", "no IDX file"),
        (b"\0\0\x08\x02\0\0", "declares the sizes"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "declares the sizes"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "is truncated: 3 bytes of 5"),
    ],
)
def test_a_damaged_idx_file_is_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "x-ubyte").write_bytes(data)
    with pytest.raises(InputError, match=said):
        read_idx(tmp_path / "x-ubyte")


def test_a_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    whole = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (40, 40))))
    for damaged in (b"no", whole[:-300], whole[:200] + bytes(200) + whole[400:]):
        (tmp_path / "x.gz").write_bytes(damaged)
        with pytest.raises(InputError, match="cannot read"):
            read_idx(tmp_path / "x.gz")


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    for kind in ("text", "idx"):
        with pytest.raises(InputError, match=r"data\.path: .*nowhere"):
            open_data(configured(kind, tmp_path / "nowhere"), tmp_path, 16)
    with pytest.raises(InputError, match="write it as module:function, importable"):
        open_data(configured("function", "no_such_module_here:data"), tmp_path, 16)


class Stateful:
    """As StatefulDataLoader does it: the state counts elements given."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes, self._given = sizes, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self._given < len(self._sizes):
            start = sum(self._sizes[: self._given])
            self._given += 1
            yield {"x": torch.arange(start, start + self._sizes[self._given - 1])}
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "random": (1, b"\0\xff", torch.tensor([1, 2]))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["random"][:2] == (1, b"\0\xff") and torch.equal(state["random"][2], torch.tensor([1, 2]))
        self._given = state["given"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_an_iterable_with_a_state_resumes_through_it(elements: list[int], sizes: list[int]) -> None:
    source = as_source(Stateful(elements), Path("unused"))
    expected = [i % sum(elements) for i in range(sum(sizes))]
    given_out: list[int] = []
    for size in sizes:
        state = json.loads(json.dumps(source.state_dict()))
        given_out += values(source, size)
        again = as_source(Stateful(elements), Path("unused"))
        again.load_state_dict(state)
        assert values(again, size) == given_out[-size:]
    assert given_out == expected


def test_any_other_iterable_is_spooled(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i in range(100):
            yield torch.arange(3 * i, 3 * i + 3), torch.full((3, 2), float(i))

    source = as_source(stream(), tmp_path)
    assert isinstance(source, SpooledSource)
    source.next_batch(4)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.next_batch(7)
    assert isinstance(expected, tuple)
    source.load_state_dict(state)
    for a, b in zip(expected, source.next_batch(7), strict=True):
        assert torch.equal(a, b)
    # a new process: the iterable starts again, what was spooled is read and not drawn twice
    resumed = as_source(stream(), tmp_path)
    resumed.load_state_dict(state)
    assert [int(v) for v in resumed.next_batch(20)[0]] == list(range(4, 24))
    resumed.forget_before(resumed.state_dict())
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["00000007"]
    with pytest.raises(InputError, match="holds 8 batches, 99 were saved"):
        resumed.load_state_dict({"element": 99, "offset": 0})


def test_data_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ended and cannot be started again"):
        as_source(iter([{"x": torch.arange(3)}]), tmp_path / "a").next_batch(4)
    endless = as_source([{"x": torch.arange(3)}], tmp_path / "b")
    assert values(endless, 7) == [0, 1, 2, 0, 1, 2, 0]
    for element, said in (
        ("text", "yields str"),
        ({"x": torch.tensor(1)}, "share their first"),
        ([object()], "no tensor"),
    ):
        with pytest.raises(InputError, match=said):
            as_source([element], tmp_path / "c").next_batch(1)
    with pytest.raises(InputError, match="give an iterable"):
        as_source(3, tmp_path / "d")


KEYS = st.text(max_size=6) | st.sampled_from(["tuple", "bytes", "map"]) | st.integers()
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["tuple", "bytes", "map"]) | st.integers(), inner, max_size=2
        )
    ),
    max_leaves=6,
)


@given(PLAIN)
def test_a_data_state_survives_json(state: Any) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(state)))) == state


def test_a_state_that_needs_pickle_is_refused() -> None:
    with pytest.raises(InputError, match="holds a set"):
        to_plain({"seen": {1, 2}})

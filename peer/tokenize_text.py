"""Text to token ids and back: raw bytes, a BPE trained on the spot, or somebody's tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from fusion_p2p.errors import InputError
from peer.plain import reason
from peer.trainer_state import write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

FILE = "tokenizer.json"
_CHUNK_CHARS = 1 << 20


class TextTokenizer(Protocol):
    """`encode` loses nothing: the ids' bytes, joined, are the text's."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> npt.NDArray[np.uint32]: ...

    def decode(self, ids: list[int]) -> str: ...


class BytesTokenizer:
    """UTF-8 bytes as ids 0..255."""

    vocab_size = 256

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer in the format of Hugging Face's `tokenizers`."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        encoded = self._tokenizer.encode_batch_fast(_chunks(text), add_special_tokens=False)
        return np.concatenate([np.asarray(e.ids, dtype=np.uint32) for e in encoded] or [np.zeros(0, np.uint32)])

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def open_tokenizer(choice: str, vocab: int, folder: Path, training_text: str) -> TextTokenizer:
    """`choice` is "bytes", "bpe" or a path. A BPE is trained once and kept as `folder`/tokenizer.json.

    Raises InputError if the file cannot be read or the `tokenizers` package is missing.
    """
    if choice == "bytes":
        return BytesTokenizer()
    kept = folder / FILE
    if kept.exists():
        return _parse(_read(kept), kept)
    text = _train(training_text, vocab) if choice == "bpe" else _read(Path(choice))
    tokenizer = _parse(text, Path(choice))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, text.encode("utf-8"))
    return tokenizer


def _library() -> type[HfTokenizer]:
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise InputError("no tokenizers package: pip install tokenizers, or set data.tokenizer = 'bytes'") from e
    found: type[HfTokenizer] = Tokenizer
    return found


def _train(text: str, vocab: int) -> str:
    """A byte-level BPE over `text`, as its tokenizer.json. The same text gives the same file."""
    tokenizer_type = _library()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizer_type(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_chunks(text), trainer)
    return str(tokenizer.to_str())


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"data.tokenizer: cannot read {path}: {reason(e)}; use bpe, bytes or a tokenizer.json") from e


def _parse(text: str, source: Path) -> FileTokenizer:
    tokenizer_type = _library()
    try:
        return FileTokenizer(tokenizer_type.from_str(text))
    except Exception as e:  # the library raises bare Exception for every kind of malformed file
        raise InputError(f"{source} is no tokenizer.json: {e}") from e


def _chunks(text: str) -> list[str]:
    """Pieces of about a megabyte that end after a line, so that no word is cut (a longer line stays whole)."""
    pieces, start = [], 0
    while start < len(text):
        cut = text.find("\n", start + _CHUNK_CHARS)
        end = len(text) if cut < 0 else cut + 1
        pieces.append(text[start:end])
        start = end
    return pieces

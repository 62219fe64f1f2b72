"""Coverage-guided fuzzing of the decoders: `python -m tests.adversarial.atheris_codecs CORPUS -max_total_time=60`.

Whatever bytes come, a decoder answers with a tensor of the edge's shape or a FrameError; anything else ends the fuzzer
with a crash file. The first byte of an input names the codec, the second the shape and direction.
"""

from __future__ import annotations

import pathlib
import sys

import atheris
import torch

with atheris.instrument_imports(include=["fusion_p2p.codec"]):
    from fusion_p2p.codec import parse
    from fusion_p2p.errors import FrameError

from tests.adversarial.codec_fuzz import KEY, NAMES, SHAPES, frames

CODECS = {name: parse(name) for name in NAMES}
AUX = {(name, shape): frames(name, shape, torch.float32, 1)[2] for name in NAMES for shape in SHAPES}


def write_corpus(folder: pathlib.Path) -> None:
    """A good frame of every codec, shape and direction."""
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(NAMES):
        for j, shape in enumerate(SHAPES):
            forward, backward, _ = frames(name, shape, torch.float32, 1)
            (folder / f"{i}-{j}-forward").write_bytes(bytes((i, j)) + forward)
            (folder / f"{i}-{j}-backward").write_bytes(bytes((i, j + len(SHAPES))) + backward)


def one_input(data: bytes) -> None:
    if len(data) < 2:
        return
    name, which = NAMES[data[0] % len(NAMES)], data[1] % (2 * len(SHAPES))
    shape, codec = SHAPES[which % len(SHAPES)], CODECS[name]
    try:
        if which < len(SHAPES):
            y, _ = codec.decode_forward(data[2:], shape, torch.float32, KEY)
        else:
            y = codec.decode_backward(data[2:], shape, torch.float32, AUX[name, shape], KEY)
    except FrameError as error:
        if "\n" in str(error) or len(str(error)) > 500:
            raise ValueError(f"not one short line: {error!r}") from error
        return
    if tuple(y.shape) != shape or y.dtype != torch.float32:
        raise ValueError(f"{name} decoded {tuple(y.shape)} {y.dtype}, the edge carries {shape}")


if __name__ == "__main__":
    write_corpus(pathlib.Path(sys.argv[1]))
    torch.set_num_threads(1)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()

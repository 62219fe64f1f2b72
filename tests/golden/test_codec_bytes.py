"""Payload bytes of wire version 1, kept: what a released build sent must decode for ever.

After a change of the wire version: `python -m tests.golden.test_codec_bytes` writes the file anew.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

from fusion_p2p.codec import FrameKey, parse, wire

FILE = Path(__file__).parent / "codec_bytes.json"
KEY = FrameKey(seed=7, step=3, micro_batch=0, value=5)
SHAPE = (48, 16)
EXACT = ("dense", "dense:bf16", "int8", "topk:0.1")  # no transform and no zstd: equal on every machine
NAMES = (*EXACT, "topk-masked:0.1", "topk-masked:0.002", "rotated:4/2", "rotated:2/1", "subspace:8/4", "transform:2/1")


def tensor() -> torch.Tensor:
    """Without a random generator: equal for ever."""
    i = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64)
    return (((i * 7919 % 10007) / 10007 - 0.5) ** 3 * 100 + i % 16 / 4).to(torch.float32).view(SHAPE)


def made(name: str) -> dict[str, str | float]:
    x = tensor()
    sender, receiver = parse(name), parse(name)
    forward, sent = sender.encode_forward(x, KEY)
    y, got = receiver.decode_forward(forward, SHAPE, x.dtype, KEY)
    backward = receiver.encode_backward(x, got, KEY)
    z = sender.decode_backward(backward, SHAPE, x.dtype, sent, KEY)
    return {
        "forward": base64.b64encode(forward).decode(),
        "backward": base64.b64encode(backward).decode(),
        "forward_error": float((y - x).norm() / x.norm()),
        "backward_error": float((z - x).norm() / x.norm()),
    }


@pytest.mark.parametrize("name", NAMES)
def test_kept_payloads_decode(name: str) -> None:
    kept, x = json.loads(FILE.read_text())[name], tensor()
    forward, backward = base64.b64decode(kept["forward"]), base64.b64decode(kept["backward"])
    assert forward[0] == backward[0] == wire.VERSION
    receiver = parse(name)
    y, got = receiver.decode_forward(forward, SHAPE, x.dtype, KEY)
    assert float((y - x).norm() / x.norm()) == pytest.approx(kept["forward_error"], abs=1e-4)
    # the sender's aux is the receiver's: both describe the frame that was sent
    z = receiver.decode_backward(backward, SHAPE, x.dtype, got, KEY) if name in EXACT else None
    if z is None:
        ends = parse(name)
        ends.encode_forward(x, KEY)
        z = ends.decode_backward(backward, SHAPE, x.dtype, got, KEY)
    assert float((z - x).norm() / x.norm()) == pytest.approx(kept["backward_error"], abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_todays_payloads_are_the_kept_ones(name: str) -> None:
    kept, now = json.loads(FILE.read_text())[name], made(name)
    for side in ("forward", "backward"):
        ours, theirs = base64.b64decode(str(now[side])), base64.b64decode(kept[side])
        if name in EXACT:
            assert ours == theirs
        else:  # eigenvectors, matrix products and zstd's choices differ between builds in the last bit
            assert ours[: wire.header_bytes(2)] == theirs[: wire.header_bytes(2)]
            assert len(ours) == pytest.approx(len(theirs), rel=0.05)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: made(name) for name in NAMES}, indent=1) + "\n")

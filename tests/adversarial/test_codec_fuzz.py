"""Malformed, truncated and lying payloads: typed errors only, no memory above the bound (short form of the soak)."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.codec import parse
from fusion_p2p.errors import FrameError
from tests.adversarial.codec_fuzz import KEY, NAMES, ROOM_BYTES, address_space, frames, fuzz, mutate
from tests.adversarial.coverage_fuzz import runs_of


def test_mutated_payloads_give_typed_errors_only() -> None:
    tally = fuzz(seed=7, count=15_000)
    assert tally.refused > 5_000
    assert tally.decoded > 500


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_mutations_give_typed_errors_only() -> None:
    assert fuzz(seed=0, count=1_000_000).refused > 300_000


def test_the_confinement_refuses_memory_beyond_its_room() -> None:
    with address_space(ROOM_BYTES):
        with pytest.raises(MemoryError):
            np.empty(4 * ROOM_BYTES, dtype=np.uint8)
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.empty(4 * ROOM_BYTES, dtype=torch.uint8)


GOOD = {(name, shape): frames(name, shape, torch.float32, 5) for name in NAMES for shape in ((50, 7), (64, 64))}


@settings(max_examples=300, deadline=None)
@given(
    edge=st.sampled_from(sorted(GOOD)),
    backward=st.booleans(),
    keep=st.integers(0, 120),
    body=st.binary(max_size=400),
    skip=st.integers(0, 400),
)
def test_any_bytes_behind_any_part_of_a_good_frame(
    edge: tuple[str, tuple[int, ...]], backward: bool, keep: int, body: bytes, skip: int
) -> None:
    """A good beginning, bytes of any kind, and what a good frame has `skip` bytes further on."""
    (name, shape), (forward, back, aux) = edge, GOOD[edge]
    good = back if backward else forward
    payload, codec = good[:keep] + body + good[keep + skip :], parse(name)
    try:
        if backward:
            y = codec.decode_backward(payload, shape, torch.float32, aux, KEY)
        else:
            y, _ = codec.decode_forward(payload, shape, torch.float32, KEY)
    except FrameError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        assert (tuple(y.shape), y.dtype) == (shape, torch.float32)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [8, pytest.param(120, marks=pytest.mark.soak)])
def test_fuzz_guided_by_coverage(tmp_path: Path, seconds: int) -> None:
    assert runs_of("atheris_codecs", tmp_path, seconds=seconds, max_bytes=9_000) > 10 * seconds


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_takes_no_more_memory_than_its_shape_warrants(name: str) -> None:
    shape, rng = (64, 64), random.Random(3)
    forward, _, _ = frames(name, shape, torch.float32, 1)
    codec = parse(name)
    codec.decode_forward(forward, shape, torch.float32, KEY)
    tracemalloc.start()
    try:
        for _ in range(300):
            try:
                codec.decode_forward(mutate(forward, rng, [forward]), shape, torch.float32, KEY)
            except FrameError:
                continue
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * 4 * 64 * 64 + 100_000  # a few int64 per element, and the interpreter's own


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(name: str) -> None:
    shape = (50, 7)
    forward, backward, aux = frames(name, shape, torch.float32, 2)
    for cut in range(0, len(forward), 3):
        with pytest.raises(FrameError):
            parse(name).decode_forward(forward[:cut], shape, torch.float32, KEY)
    for cut in range(0, len(backward), 3):
        with pytest.raises(FrameError):
            parse(name).decode_backward(backward[:cut], shape, torch.float32, aux, KEY)


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_for_another_edge_is_refused(name: str) -> None:
    forward, backward, aux = frames(name, (64, 64), torch.float32, 2)
    codec = parse(name)
    for shape, dtype in (((64, 65), torch.float32), ((4096,), torch.float32), ((64, 64), torch.bfloat16)):
        with pytest.raises(FrameError):
            codec.decode_forward(forward, shape, dtype, KEY)
    with pytest.raises(FrameError, match="expected a forward frame"):
        codec.decode_forward(backward, (64, 64), torch.float32, KEY)
    with pytest.raises(FrameError, match=r"expected a backward frame|over the bound"):
        codec.decode_backward(forward, (64, 64), torch.float32, aux, KEY)
    for other in NAMES:
        if other.split(":")[0] != name.split(":")[0]:
            with pytest.raises(FrameError):
                parse(other).decode_forward(forward, (64, 64), torch.float32, KEY)


def test_a_zstd_bomb_is_refused_before_it_is_expanded() -> None:
    import zstandard

    shape = (64, 64)
    forward, _, _ = frames("topk-masked:0.2", shape, torch.float32, 2)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    head = forward[: 5 + 4 * 2]
    payload = head + bytes(2 * 64) + bytes([1]) + len(bomb).to_bytes(4, "little") + bomb
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=r"zstd frame holds|over the bound"):
            parse("topk-masked:0.2").decode_forward(payload, shape, torch.float32, KEY)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

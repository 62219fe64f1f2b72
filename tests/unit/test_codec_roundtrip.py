"""What every codec owes: bounded, repeatable payloads that decode to the shape and type they were made of."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.errors import FrameError, InputError

LOSSY = (
    "dense:bf16",
    "int8",
    "topk:0.1",
    "topk-masked:0.1",
    "topk-masked:0.001",
    "topk-masked:0.05/2",
    "rotated:4/2",
    "rotated:3/1",
    "subspace:16/4",
    "subspace:8/3/1",
    "transform:2/1",
    "transform:4/0.5",
)
KEY = FrameKey(seed=3, step=5, micro_batch=0, value=11)
shapes = st.lists(st.integers(1, 13), min_size=1, max_size=4).map(tuple) | st.sampled_from(
    [(), (0, 4), (257,), (2, 150, 16), (40, 64), (4, 16, 9, 9), (1025, 3)]
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(("dense", *LOSSY)),
    shape=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]),
    seed=st.integers(0, 1000),
    power=st.sampled_from([1, 3]),
)
def test_round_trip(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, power: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g).pow(power).mul(3).clamp(-1e4, 1e4).to(dtype)
    sender, receiver = parse(name), parse(name)
    payload, sent = sender.encode_forward(x, KEY)
    assert len(payload) <= sender.bound(shape, dtype, "forward")
    y, got = receiver.decode_forward(payload, shape, dtype, KEY)
    assert (tuple(y.shape), y.dtype) == (shape, dtype)
    assert parse(name).encode_forward(x.clone(), KEY)[0] == payload
    if not dtype.is_floating_point or name == "dense" or x.numel() < 256:
        assert torch.equal(x, y)
    if dtype.is_floating_point:
        back = receiver.encode_backward(x, got, KEY)
        assert len(back) <= receiver.bound(shape, dtype, "backward")
        z = sender.decode_backward(back, shape, dtype, sent, KEY)
        assert (tuple(z.shape), z.dtype) == (shape, dtype)
        again = parse(name)
        _, kept = again.decode_forward(payload, shape, dtype, KEY)
        assert again.encode_backward(x, kept, KEY) == back


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("x", [torch.zeros(40, 16), torch.ones(40, 16), torch.full((40, 16), 1e-38)])
def test_constant_tensors_survive(name: str, x: torch.Tensor) -> None:
    sender, receiver = parse(name), parse(name)
    payload, sent = sender.encode_forward(x, KEY)
    y, got = receiver.decode_forward(payload, (40, 16), torch.float32, KEY)
    z = sender.decode_backward(receiver.encode_backward(x, got, KEY), (40, 16), torch.float32, sent, KEY)
    assert torch.isfinite(y).all() and torch.isfinite(z).all()
    if not bool(x.any()):
        assert not y.any() and not z.any()


@pytest.mark.parametrize("name", [n for n in LOSSY if n != "dense:bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_makes_all_nan(name: str, bad: float) -> None:
    x = torch.randn(64, 32)
    x[3, 4] = bad
    sender, receiver = parse(name), parse(name)
    payload, sent = sender.encode_forward(x, KEY)
    assert len(payload) < 32
    y, got = receiver.decode_forward(payload, (64, 32), torch.float32, KEY)
    assert torch.isnan(y).all()
    back = receiver.encode_backward(x, got, KEY)
    assert torch.isnan(sender.decode_backward(back, (64, 32), torch.float32, sent, KEY)).all()
    # and the next micro-batch is as if nothing had happened
    fine = torch.randn(64, 32)
    payload, _ = sender.encode_forward(fine, KEY)
    assert torch.isfinite(receiver.decode_forward(payload, (64, 32), torch.float32, KEY)[0]).all()


@pytest.mark.parametrize("name", [n for n in LOSSY if n != "dense:bf16"])
def test_the_gradient_of_a_non_finite_activation_is_not_finite_either(name: str) -> None:
    sender, receiver = parse(name), parse(name)
    payload, sent = sender.encode_forward(torch.full((64, 32), float("nan")), KEY)
    _, got = receiver.decode_forward(payload, (64, 32), torch.float32, KEY)
    back = receiver.encode_backward(torch.randn(64, 32), got, KEY)
    assert torch.isnan(sender.decode_backward(back, (64, 32), torch.float32, sent, KEY)).all()


def test_large_finite_values_are_not_taken_for_infinity() -> None:
    x = torch.full((64, 64), 3e38)
    x[::2] = -3e38
    payload, _ = parse("int8").encode_forward(x, KEY)
    y, _ = parse("int8").decode_forward(payload, (64, 64), torch.float32, KEY)
    torch.testing.assert_close(y, x, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LOSSY)
def test_decoded_tensors_own_their_storage(name: str) -> None:
    payload, _ = parse(name).encode_forward(torch.randn(64, 32), KEY)
    held = bytearray(payload)
    y, _ = parse(name).decode_forward(bytes(held), (64, 32), torch.float32, KEY)
    before = y.clone()
    held[:] = bytes(len(held))
    y.add_(0)  # writable
    assert torch.equal(y, before)
    assert y.data_ptr() % 16 == 0
    assert y.is_contiguous()


@pytest.mark.parametrize(
    "name",
    (
        *("", "zip", "dense:fp8", "int8:4", "topk", "topk:0", "topk:nan", "topk:-1", "rotated:4", "rotated:9/2"),
        *("rotated:4/2/1", "subspace:0/4", "subspace:64", "subspace:64/4/9", "topk-masked:0.1/0", "rotated:４/2"),
    ),
)
def test_an_unknown_name_says_what_to_write(name: str) -> None:
    with pytest.raises(InputError, match=r"use|write|takes no"):
        parse(name)


@pytest.mark.parametrize("name", ["dense", *LOSSY])
def test_a_codec_knows_its_name(name: str) -> None:
    assert parse(parse(name).name).name == parse(name).name == name


def test_foreign_state_is_refused() -> None:
    with pytest.raises(FrameError, match="keeps no state"):
        parse("rotated:4/2").load_state_dict({"basis": torch.zeros(2, 2)})
    with pytest.raises(FrameError, match="one bfloat16 matrix"):
        parse("subspace:8/4").load_state_dict({"other": torch.zeros(2, 2)})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_axes_that_cannot_encode_are_refused_by_name(direction: str) -> None:
    """A decoder's state holds no analysis; as an encoder's it is foreign."""
    x, sender, receiver = torch.randn(64, 32), parse("transform:2/1"), parse("transform:2/1")
    payload, _ = sender.encode_forward(x, KEY)
    _, got = receiver.decode_forward(payload, (64, 32), torch.float32, KEY)
    receiver.encode_backward(x, got, KEY)
    state = (sender if direction == "forward" else receiver).state_dict()
    del state[f"{direction}.analysis"]
    other = parse("transform:2/1")
    other.load_state_dict(state)
    later = msgspec.structs.replace(KEY, step=KEY.step + 1, micro_batch=1)
    with pytest.raises(FrameError, match=f"{direction} axes without their analysis"):
        other.encode_forward(x, later) if direction == "forward" else other.encode_backward(x, None, later)

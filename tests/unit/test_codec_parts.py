"""The pieces under the codecs: exact selection, index lists, entropy coder, rotation, bit allocation, axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.codec import FrameKey, channels, entropy, indices, parse, rates, rotation, symbols, transform, wire
from fusion_p2p.codec.selection import _select_torch, sampled_threshold, select
from fusion_p2p.codec.topk_masked import TopKMasked
from fusion_p2p.errors import EndsDiffer, FrameError

KEY = FrameKey(seed=3, step=5, micro_batch=0, value=11)


def reader(parts: list[wire.Buffer]) -> wire.Reader:
    return wire.Reader(memoryview(b"".join(parts)))


# --- selection


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000), st.floats(0.001, 1), st.integers(0, 99), st.sampled_from(["normal", "cubed", "ties", "zero"])
)
def test_selection_is_exact_and_ties_go_to_the_lower_index(n: int, density: float, seed: int, kind: str) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x = {"normal": x, "cubed": x**3, "ties": x.round(), "zero": x * 0}[kind]
    k = max(1, round(n * density))
    got = select(x, k).tolist()
    assert _select_torch(x, k).tolist() == got  # what other devices use
    want = sorted(sorted(range(n), key=lambda i: (-abs(float(x[i])), i))[:k])
    assert got == want


@pytest.mark.parametrize("width", [64, 61, 96, 128])
def test_selection_is_exact_where_strides_and_channels_conspire(width: int) -> None:
    n, k = width * 6000, width * 60
    x = torch.full((n,), 1e-3)
    x[::width] = torch.linspace(1, 2, n // width)  # one hot channel; a sample that misses it would see nothing
    x += torch.randn(n, generator=torch.Generator().manual_seed(1)) * 1e-4
    want = torch.topk(x.abs(), k).values.min()
    assert select(x, k).numel() == k
    assert bool((x[select(x, k)].abs() >= want).all())


def test_the_sampled_threshold_lies_below_the_kth_magnitude_but_not_far() -> None:
    x = np.random.default_rng(0).standard_normal(1 << 21).astype(np.float32)
    for k in (x.size // 10, x.size // 100):
        count = int((np.abs(x) >= sampled_threshold(x, k)).sum())
        assert k <= count < 1.4 * k


# --- index lists


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 20_000), st.floats(0.0005, 1), st.integers(0, 99), st.booleans())
def test_index_lists_round_trip_within_their_bound(n: int, density: float, seed: int, clustered: bool) -> None:
    rng, k = np.random.default_rng(seed), max(1, round(n * density))
    chosen = np.arange(n - k, n) if clustered else np.sort(rng.choice(n, k, replace=False))
    parts = indices.encode(chosen, n)
    assert sum(map(len, parts)) <= indices.bound(k, n)
    body = reader(parts)
    np.testing.assert_array_equal(indices.decode(body, k, n), chosen)
    body.done()


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_index_bytes_stay_within_a_twentieth_of_the_entropy(density: float) -> None:
    n = 1 << 20
    chosen = np.sort(np.random.default_rng(0).choice(n, round(n * density), replace=False))
    entropy_bytes = -n * (density * np.log2(density) + (1 - density) * np.log2(1 - density)) / 8
    assert sum(map(len, indices.encode(chosen, n))) < 1.05 * entropy_bytes


# --- entropy coder and symbols


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1, 2, 3, 7, 64, 127]), st.integers(0, 99), st.floats(0.1, 40))
def test_symbols_round_trip_within_their_bound(n: int, peak: int, seed: int, spread: float) -> None:
    x = np.random.default_rng(seed).standard_normal(n) * spread
    q = np.clip(np.round(x), -peak, peak).astype(np.int8)
    parts = entropy.encode(q, peak)
    assert sum(map(len, parts)) <= entropy.bound(n, peak)
    body = reader(parts)
    np.testing.assert_array_equal(entropy.decode(body, n, peak), q)
    body.done()


@pytest.mark.parametrize("step", [0.26, 0.52, 1.08, 1.61, 2.42])
def test_the_entropy_coder_stays_near_the_entropy(step: float) -> None:
    q = np.clip(np.round(np.random.default_rng(0).standard_normal(1 << 18) / step), -127, 127).astype(np.int8)
    peak = 1 if step > 1.8 else 2 if step > 1.2 else 7 if step > 0.6 else 127
    q = np.clip(q, -peak, peak)
    share = np.unique(q, return_counts=True)[1] / q.size
    assert sum(map(len, entropy.encode(q, peak))) * 8 / q.size < 1.05 * -(share * np.log2(share)).sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 99), st.floats(0.1, 3000))
def test_symbol_arrays_keep_even_wild_outliers(components: int, rows: int, seed: int, top: float) -> None:
    rng = np.random.default_rng(seed)
    spread = np.sort(rng.exponential(top, components))[::-1]
    q = np.clip(np.round(rng.standard_t(2, (components, rows)) * spread[:, None]), -symbols.LIMIT, symbols.LIMIT)
    q = q.astype(np.int16)
    body = reader(symbols.encode(q, spread))
    np.testing.assert_array_equal(symbols.decode(body, components, rows), q)
    body.done()


# --- rotation


@pytest.mark.parametrize("n", [1, 63, 64, 300, 1024, 1025, 5000, 300 * 1024])
def test_rotation_is_orthonormal_and_inverted(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    c = rotation.rotate(x, KEY, 0)
    assert sum(float(p.square().sum()) for p in c) == pytest.approx(float(x.square().sum()), rel=1e-4)
    torch.testing.assert_close(rotation.unrotate(c, n, KEY, 0), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["rotated:4/1", "rotated:4/2", "topk-masked:0.5/1", "transform:2/1", "transform:2/0.5"]
)
def test_gradients_are_unbiased_over_fresh_seeds(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(64, 32, generator=generator) * torch.rand(32, generator=generator).pow(3)
    x = torch.randn(64, 32, generator=generator)
    sender, receiver = parse(name), parse(name)
    total, rounds, squared = torch.zeros_like(g), 200, 0.0
    for m in range(rounds):
        key = FrameKey(seed=1, step=1, micro_batch=m, value=2)
        payload, sent = sender.encode_forward(x, key)
        _, got = receiver.decode_forward(payload, (64, 32), torch.float32, key)
        back = receiver.encode_backward(g, got, key)
        y = sender.decode_backward(back, (64, 32), torch.float32, sent, key)
        total += y
        if name.startswith("topk-masked"):
            mask = torch.zeros(64 * 32)
            mask[sent.indices] = 1
            want = masked_gradient(g, mask.view(64, 32))
        else:
            want = g
        squared += float((y - want).square().sum() / want.square().sum())
    left = float((total / rounds - want).square().sum() / want.square().sum())
    assert left < 2.5 * squared / rounds / rounds  # what is left is noise over `rounds`, no bias
    assert float((total * want).sum() / rounds / want.square().sum()) == pytest.approx(1, abs=0.03)


def test_seeds_differ_between_frames_and_repeat_for_one() -> None:
    keys = [KEY, FrameKey(4, 5, 0, 11), FrameKey(3, 6, 0, 11), FrameKey(3, 5, 1, 11), FrameKey(3, 5, 0, 12)]
    words = [tuple(rotation.random_words(k, 0, 4)) for k in keys] + [tuple(rotation.random_words(KEY, 1, 4))]
    assert len(set(words)) == len(words)
    assert tuple(rotation.random_words(KEY, 0, 4)) == words[0]


# --- bit allocation


@pytest.mark.parametrize("bits", [0.5, 1.0, 2.0, 4.0])
def test_steps_meet_the_rate(bits: float) -> None:
    spread = np.geomspace(10, 0.01, 128)
    one = rates.bits_at(np.log2(rates.one_step(spread, bits) / spread)).mean()
    each = rates.bits_at(np.log2(rates.unbiased_steps(spread, bits) / spread)).mean()
    assert one == pytest.approx(bits, rel=0.01)
    assert each == pytest.approx(bits, rel=0.05)


def test_steps_of_nothing_are_harmless() -> None:
    for spread in (np.zeros(4), np.array([np.inf]), np.array([1e-40])):
        assert np.isfinite(rates.one_step(spread, 2)) and np.isfinite(rates.unbiased_steps(spread, 2)).all()


def test_axes_invert_and_follow_the_metric() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 16, generator=generator) * torch.linspace(1, 3, 16)
    metric = torch.diag(torch.linspace(0.1, 5, 16).double())
    axes = transform.fit(rows, metric)
    assert axes.analysis is not None
    torch.testing.assert_close(axes.analysis @ axes.synthesis, torch.eye(16), rtol=0, atol=1e-4)
    # equal steps in y: the error of x under the metric is white
    error = axes.synthesis.double() @ metric @ axes.synthesis.double().T
    assert float((error - torch.eye(16).double()).abs().max()) < 0.05


def test_channels_of_images_are_the_second_dimension() -> None:
    x = torch.randn(2, 3, 4, 5)
    rows = channels.to_rows(x)
    assert rows.shape == (40, 3)
    assert torch.equal(channels.from_rows(rows, (2, 3, 4, 5)), x)


# --- masks and bases across frames


def masked_gradient(g: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of the network that sees an activation's channel means, and at the mask what differs from them."""
    x = torch.zeros_like(g, requires_grad=True)
    mean = x.mean(0)
    ((x - mean) * mask + mean).backward(g)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def test_a_masked_gradient_is_the_gradient_of_the_masked_network() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(64, 64), torch.randn(64, 64) + torch.linspace(-2, 2, 64)
    sender, receiver = parse("topk-masked:0.1/6"), parse("topk-masked:0.1/6")
    payload, sent = sender.encode_forward(x, KEY)
    y, got = receiver.decode_forward(payload, (64, 64), torch.float32, KEY)
    back = sender.decode_backward(receiver.encode_backward(g, got, KEY), (64, 64), torch.float32, sent, KEY)
    mean = x.mean(0)
    kept = torch.zeros(64 * 64, dtype=torch.bool)
    kept[got.indices] = True
    kept = kept.view(64, 64)
    assert int(kept.sum()) == 410
    assert float((x - mean).abs()[kept].min()) >= float((x - mean).abs()[~kept].max()) - 0.01
    torch.testing.assert_close(y, torch.where(kept, x, mean), rtol=0.2, atol=0.02)
    torch.testing.assert_close(back, masked_gradient(g, kept.float()), rtol=0, atol=0.1)
    torch.testing.assert_close(back.sum(0), g.sum(0), rtol=0.05, atol=1.0)  # as a bias before it sees it


def test_another_mask_is_named_and_its_indices_mend_it() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(64, 64), torch.randn(64, 64)
    sender, receiver, rebuilt = (parse("topk-masked:0.1") for _ in range(3))
    payload, _ = sender.encode_forward(x, KEY)
    _, got = receiver.decode_forward(payload, (64, 64), torch.float32, KEY)
    _, other = rebuilt.encode_forward(x + 0.05 * torch.randn(64, 64), KEY)
    with pytest.raises(EndsDiffer, match="not the one sent"):
        rebuilt.decode_backward(receiver.encode_backward(g, got, KEY), (64, 64), torch.float32, other, KEY)
    back = receiver.encode_backward(g, TopKMasked.include_indices(got), KEY)
    assert len(back) <= receiver.bound((64, 64), torch.float32, "backward")
    mended = rebuilt.decode_backward(back, (64, 64), torch.float32, other, KEY)
    mask = torch.zeros(64 * 64)
    mask[got.indices] = 1
    torch.testing.assert_close(mended, masked_gradient(g, mask.view(64, 64)), rtol=0, atol=0.6)  # at 4 bits


@pytest.mark.parametrize("name", ["subspace:16/4", "transform:2/1"])
def test_state_restores_both_ends_to_the_same_frames(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(64, 32, generator=generator) for _ in range(6)]

    def step(sender, receiver, s: int):  # type: ignore[no-untyped-def]
        out = []
        for m in range(2):
            key = FrameKey(seed=1, step=s, micro_batch=m, value=2)
            payload, sent = sender.encode_forward(xs[2 * (s % 3) + m], key)
            y, got = receiver.decode_forward(payload, (64, 32), torch.float32, key)
            back = receiver.encode_backward(xs[m], got, key)
            out += [payload, back, y, sender.decode_backward(back, (64, 32), torch.float32, sent, key)]
        return out

    sender, receiver = parse(name), parse(name)
    for s in range(2):
        step(sender, receiver, s)
    saved = [{k: v.clone() for k, v in c.state_dict().items()} for c in (sender, receiver)]
    # an evaluation pass in between changes nothing
    key = FrameKey(seed=1, step=32, micro_batch=0, value=2, training=False)
    receiver.decode_forward(sender.encode_forward(xs[5], key)[0], (64, 32), torch.float32, key)
    want = step(sender, receiver, 2)
    again = parse(name), parse(name)
    for codec, state in zip(again, saved, strict=True):
        codec.load_state_dict(state)
    for a, b in zip(want, step(*again, 2), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    fresh = parse(name)
    with pytest.raises(FrameError, match="does not hold"):
        fresh.decode_forward(want[0], (64, 32), torch.float32, FrameKey(1, 2, 0, 2))

"""AdaTopK's bench: one thread, a minute and a half (a few minutes more where the pretrained start is not cached yet).

Training rows (fine-tuning, 2,000 steps from scratch) are read from results/*.json and say from which day they are;
results of other code do not count. --train does what is not recorded (a minute of one core a run); --soak trains from
scratch now (three minutes more).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fusion_p2p.codec import FrameKey, indices, parse
from fusion_p2p.codec.selection import select
from tests.bench import adatopk_model as small
from tests.bench import adatopk_soak, adatopk_train
from tests.bench.rows import Row, arguments, at_least, at_most, report

KEY = FrameKey(seed=1, step=1, micro_batch=0, value=1)


def best(run: Callable[[], object], rounds: int = 9) -> float:
    """CPU seconds of this thread, of the fastest of some rounds: what others do on the machine counts little."""
    out = math.inf
    for _ in range(rounds):
        start = time.thread_time()
        run()
        out = min(out, time.thread_time() - start)
    return out


def real_activations(elements: int) -> torch.Tensor:
    """Activations of the pretrained model at its middle cut, as many as asked for."""
    model, data, rng = small.pretrained(), small.text()[1], np.random.default_rng(3)
    found: list[torch.Tensor] = []

    def keep(cut: int, x: torch.Tensor) -> torch.Tensor:
        if cut == 1:
            found.append(x.detach().reshape(-1))
        return x

    while sum(t.numel() for t in found) < elements:
        with torch.no_grad():
            model(small.batch(data, 32, rng)[0], keep)
    return torch.cat(found)[:elements].contiguous()


def tensors(elements: int, real: bool) -> Iterator[tuple[str, torch.Tensor]]:
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    yield "random", x
    yield "heavy-tailed", x**3
    if real:
        few = real_activations(min(elements, 1 << 20))
        yield "real", few.repeat(elements // few.numel())


def selection_rows(real: bool) -> Iterator[Row]:
    n = 1 << 24
    for what, x in tensors(n, real):
        k, flat = n // 100, x.numpy()
        read_s = best(flat.sum)
        exact_s = best(lambda x=x, k=k: select(x, k))  # type: ignore[misc]
        yield at_most(f"selection, 16M {what}, 1/100, exact, over one numpy sum", exact_s / read_s, 8)
        yield at_most(f"the same against the bound of a carried threshold, {what}", exact_s / read_s, 4)
        full_s = best(lambda x=x, k=k: torch.topk(x.abs(), k, sorted=False), 1)  # type: ignore[misc]
        yield at_least(f"torch.topk over it, {what}", full_s / exact_s, 10)


def count_rows(real: bool) -> Iterator[Row]:
    n = 1 << 20
    hot = torch.full((n,), 1e-3)
    hot[::128] = torch.linspace(1, 2, n // 128)
    for what, x in (*tensors(n, real), ("one hot channel of 128", hot)):
        for share in (10, 100):
            off = abs(select(x, n // share).numel() / (n // share) - 1)
            yield at_most(f"kept count off what was asked, {what}, 1/{share}", 100 * off, 5, "%")


def entropy_bytes(k: int, n: int) -> float:
    p = k / n
    return -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8


def byte_rows(real: bool) -> Iterator[Row]:
    n = 1 << 20
    for what, x in tensors(n, real):
        for share in (10, 100, 1000):
            k = n // share
            size = sum(map(len, indices.encode(select(x, k).numpy(), n)))
            if what == "heavy-tailed" or (what == "real" and share == 1000):
                continue
            bound = 1.0 if what == "real" else 1.05
            yield at_most(f"index bytes over the entropy bound, {what}, 1/{share}", size / entropy_bytes(k, n), bound)
        for share, bound in ((10, 1.15), (100, 1.6)):
            payload, _ = parse(f"topk-masked:{1 / share}").encode_forward(x, KEY)
            yield at_most(f"bytes per kept element, {what}, 1/{share}", len(payload) / round(n / share), bound)


def round_trip_s(name: str, x: torch.Tensor) -> tuple[float, int]:
    """(seconds to encode and decode an activation, its bytes), axes already exchanged."""
    sender, receiver, shape = parse(name), parse(name), tuple(x.shape)
    receiver.decode_forward(sender.encode_forward(x, KEY)[0], shape, x.dtype, KEY)
    key = FrameKey(1, 1, 1, 1)
    payload, _ = sender.encode_forward(x, key)
    encode_s = best(lambda: sender.encode_forward(x, key))
    return encode_s + best(lambda: receiver.decode_forward(payload, shape, x.dtype, key)), len(payload)


def speed_rows(real: bool) -> Iterator[Row]:
    shape = 8, 1024, 128
    for what, x in tensors(1 << 20, real):
        for density in (0.1, 0.01):
            spent_s, _ = round_trip_s(f"topk-masked:{density}", x.view(shape))
            yield at_most(f"encode + decode, 1M elements {what}, topk-masked:{density}", 1e3 * spent_s, 12, " ms")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    masked = {density: round_trip_s(f"topk-masked:{density}", x) for density in (0.1, 0.01)}
    for name in ("int8", "rotated:4/2", "transform:2/1", "transform:1/1", "subspace:64/4"):
        spent_s, size = round_trip_s(name, x)
        yield Row(f"encode + decode, 1M elements, {name}", f"{1e3 * spent_s:.1f} ms, {size} bytes", "reported", None)
    half_s, half_bytes = fp16_of_hivemind(x)
    for density, (codec_s, size) in masked.items():
        for mbps in (10, 100, 1000):
            ours, theirs = codec_s + size * 8 / mbps / 1e6, half_s + half_bytes * 8 / mbps / 1e6
            what = f"end to end over hivemind's fp16, topk-masked:{density}, {mbps} Mbps"
            yield at_most(what, ours / theirs, 1)


def fp16_of_hivemind(x: torch.Tensor) -> tuple[float, int]:
    from hivemind.compression import CompressionInfo, Float16Compression

    codec, info = Float16Compression(), CompressionInfo.from_tensor(x)
    packed = codec.compress(x, info)
    return best(lambda: codec.compress(x, info)) + best(lambda: codec.extract(packed)), packed.ByteSize()


def rows(quick: bool, soak: bool, train: bool) -> Iterator[Row]:
    real = not quick
    yield from selection_rows(real)
    yield from count_rows(real)
    yield from byte_rows(real)
    yield from speed_rows(real)
    if not quick:
        yield from adatopk_train.rows(train)
        yield from adatopk_soak.fresh_rows() if soak else adatopk_soak.scratch_rows()
        yield from adatopk_soak.fuzz_rows()


def main(argv: list[str]) -> int:
    parser = arguments(__doc__ or "", "no training results, no real activations, no mutations")
    parser.add_argument("--train", action="store_true", help="do the fine-tuning runs that are not recorded")
    parser.add_argument("--soak", action="store_true", help="train 2,000 steps from scratch now")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    return report(rows(args.quick, args.soak, args.train), args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

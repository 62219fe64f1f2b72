"""A seeded mutation loop over codec payloads: every decoder answers with a tensor or a FrameError, nothing else."""

from __future__ import annotations

import contextlib
import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.errors import FrameError

NAMES = (
    "dense",
    "dense:bf16",
    "int8",
    "topk:0.1",
    "topk:0.01",
    "topk-masked:0.2",
    "topk-masked:0.01",
    "topk-masked:0.001",
    "rotated:4/2",
    "rotated:3/1",
    "subspace:8/4",
    "transform:2/1",
)
SHAPES = ((3, 40, 16), (2, 8, 6, 6), (700,), (50, 7), (64, 64))
KEY = FrameKey(seed=1, step=0, micro_batch=0, value=9)

Case: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, bytes, object]  # codec, shape, type, payload, aux
ROOM_BYTES = 32 << 20  # what decoding may take; the interpreter's heap grows in pieces of a MiB or more


@dataclass
class Tally:
    refused: int = 0
    decoded: int = 0


def frames(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[bytes, bytes, object]:
    """(forward payload, backward payload, the sender's aux) of a random heavy-tailed tensor."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g).pow(3).to(dtype)
    sender, receiver = parse(name), parse(name)
    forward, sent = sender.encode_forward(x, KEY)
    _, got = receiver.decode_forward(forward, shape, dtype, KEY)
    return forward, receiver.encode_backward(x, got, KEY), sent


def mutate(payload: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    out = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind = rng.randrange(7)
        at = rng.randrange(len(out)) if out else 0
        if rng.random() < 0.6:
            at = min(at, rng.randrange(48))  # headers, counts and hashes lie in front
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.choice((0, 1, 127, 128, 254, 255))
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 5:
            out[at : at + 4] = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.getrandbits(32))).to_bytes(
                4, "little"
            )
        else:
            other = rng.choice(others)
            out[at:] = other[rng.randrange(len(other)) :]
    return bytes(out)


@contextlib.contextmanager
def address_space(room_bytes: int) -> Iterator[None]:
    """Memory beyond what the process has now and `room_bytes` is refused: an error of numpy or torch that is no
    FrameError, even if the memory would never have been touched. Without effect where there is no /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(seed: int, count: int, names: tuple[str, ...] = NAMES) -> Tally:
    """`count` mutations, without memory beyond ROOM_BYTES; lets through whatever a decoder raises but FrameError;
    AssertionError on a wrong tensor."""
    rng, pool = random.Random(seed), list[Case]()
    for i, (name, shape) in enumerate((n, s) for n in names for s in SHAPES):
        dtype = torch.bfloat16 if i % 3 == 2 else torch.float32
        forward, backward, aux = frames(name, shape, dtype, seed + i)
        pool += [(name, shape, dtype, forward, None), (name, shape, dtype, backward, aux)]
    _decode(pool, rng, 1_000)  # loads what is loaded late
    with address_space(ROOM_BYTES):
        return _decode(pool, rng, count)


def _decode(pool: list[Case], rng: random.Random, count: int) -> Tally:
    payloads, tally = [p[3] for p in pool], Tally()
    codecs = {name: parse(name) for name, *_ in pool}
    for _ in range(count):
        name, shape, dtype, payload, aux = rng.choice(pool)
        mutant = mutate(payload, rng, payloads)
        codec = codecs[name]
        try:
            if aux is None and payload[3] & 1 == 0:
                y, _ = codec.decode_forward(mutant, shape, dtype, KEY)
            else:
                y = codec.decode_backward(mutant, shape, dtype, aux, KEY)
        except FrameError:
            tally.refused += 1
            continue
        except BaseException:
            print(f"codec {name}, shape {shape}, {dtype}: {mutant[:64].hex()}... of {len(mutant)}", file=sys.stderr)
            raise
        tally.decoded += 1
        if tuple(y.shape) != shape or y.dtype != dtype:
            raise AssertionError(f"{name} decoded {tuple(y.shape)} {y.dtype}, the edge carries {shape} {dtype}")
    return tally


if __name__ == "__main__":  # make soak: python -m tests.adversarial.codec_fuzz 1000000
    torch.set_num_threads(1)
    print(fuzz(0, int(sys.argv[1])))

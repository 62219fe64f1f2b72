"""A seeded mutation loop over codec payloads: every decoder answers with a tensor or a FrameError, nothing else."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

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


def fuzz(seed: int, count: int, names: tuple[str, ...] = NAMES) -> Tally:
    """`count` mutations; lets through whatever a decoder raises but FrameError; AssertionError on a wrong tensor."""
    rng, tally = random.Random(seed), Tally()
    pool = []
    for i, (name, shape) in enumerate((n, s) for n in names for s in SHAPES):
        dtype = torch.bfloat16 if i % 3 == 2 else torch.float32
        forward, backward, aux = frames(name, shape, dtype, seed + i)
        pool += [(name, shape, dtype, forward, None), (name, shape, dtype, backward, aux)]
    payloads = [p[3] for p in pool]
    codecs = {name: parse(name) for name in names}
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
    print(fuzz(0, int(sys.argv[1])))

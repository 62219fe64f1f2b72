"""Tiny configurations of the transformers models in the survey, built from scratch (nothing is downloaded)."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 32


def _ids(*shape: int, high: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _tokens(length: int = 8) -> dict[str, torch.Tensor]:
    ids = _ids(2, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(attention: str, dropout: float) -> tuple[Any, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=8,
        vocab_size=VOCAB,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config), _tokens(), None


def _llama() -> tuple[Any, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder())), _tokens(), None


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "use_cache": False,
    }


def _mixtral() -> tuple[Any, Any, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_decoder(), num_local_experts=4, experts_implementation="batched_mm")
    return MixtralForCausalLM(config), _tokens(), None


def _bert() -> tuple[Any, Any, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    return BertForMaskedLM(config), _tokens() | {"attention_mask": mask}, None


def t5(dropout: float = 0.1) -> tuple[Any, Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _ids(2, 8), "labels": _ids(2, 6)}, None


def _images(side: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": _ids(2, high=4)}


def _vit() -> tuple[Any, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        num_labels=4,
    )
    return ViTForImageClassification(config), _images(), None


def _resnet(*depths: int) -> tuple[Any, Any, Any]:
    """Bottleneck blocks; narrow, so that only the depth costs time. The last one is 2x2: batch norm of a single
    sample's single value is refused by PyTorch itself, and of two values its gradient is all rounding."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [8 << k for k in range(len(depths))]
    config = ResNetConfig(embedding_size=4, hidden_sizes=widths, depths=list(depths), num_labels=4)
    side = 4 << len(depths)
    return ResNetForImageClassification(config), _images(side), None


CASES = (
    ("gpt2", "transformers GPT-2, sdpa attention, dropout on", lambda: _gpt2("sdpa", 0.1)),
    ("gpt2_eager", "transformers GPT-2, eager attention, dropout on", lambda: _gpt2("eager", 0.1)),
    ("gpt2_dry", "transformers GPT-2, dropout off", lambda: _gpt2("sdpa", 0.0)),
    ("llama", "transformers Llama with grouped-query attention", _llama),
    ("bert", "transformers BERT, padded batch", _bert),
    ("t5", "transformers T5, shared embeddings", t5),
    ("vit", "transformers ViT", _vit),
    ("resnet", "transformers ResNet, bottleneck blocks, batch norm", lambda: _resnet(1, 2)),
    ("mixtral", "transformers Mixtral, `batched_mm` experts", _mixtral),
)
DEEP = (
    ("resnet50", "transformers ResNet with the blocks of ResNet-50", lambda: _resnet(3, 4, 6, 3)),
    ("resnet101", "transformers ResNet with the blocks of ResNet-101", lambda: _resnet(3, 4, 23, 3)),
)

"""The trainer's model from a configuration. Volunteers never see this: they get an OP-DAG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_p2p.errors import InputError
from peer.config import Config, Gpt2Section, ResnetSection
from peer.data_open import OpenedData, call_function


class ImageClassifier(nn.Module):
    """`model` over `pixel_values` uint8 [samples, channels, height, width], normalised to mean 0.5 and std 0.5."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(pixel_values=pixel_values.to(torch.float32) / 127.5 - 1.0, labels=labels)


def context_of(config: Config) -> int:
    """Tokens per sequence that the model reads; 0 for a model that is not ours to know."""
    if config.model.family == "gpt2":
        return config.model.gpt2.context
    if config.model.hf:
        found = getattr(_hf_config(Path(config.model.hf)), "max_position_embeddings", 0)
        return int(found or 0)
    return 0


def build_model(config: Config, data: OpenedData) -> nn.Module:
    """The model in train mode, its weights a function of `run.seed` (or read from `model.hf`). Raises InputError."""
    m = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        if m.family == "gpt2":
            model = _gpt2(m.gpt2, data.vocab)
        elif m.family == "resnet":
            model = _resnet(m.resnet, data)
        elif m.hf:
            model = _hf(Path(m.hf))
        else:
            model = call_function(m.function, "model.function")
    if not isinstance(model, nn.Module):
        raise InputError(f"model.function = {m.function!r} returned {type(model).__name__}; return an nn.Module")
    return model.train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as e:
        raise InputError("this model needs a package: pip install 'fusion-p2p[transformers]'") from e
    transformers.logging.set_verbosity_error()
    return transformers


def _gpt2(g: Gpt2Section, vocab: int) -> nn.Module:
    t = _transformers()
    settings = t.GPT2Config(
        vocab_size=vocab,
        n_positions=g.context,
        n_embd=g.width,
        n_layer=g.layers,
        n_head=g.heads,
        resid_pdrop=g.dropout,
        embd_pdrop=g.dropout,
        attn_pdrop=g.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=g.attention,
    )
    model: nn.Module = t.GPT2LMHeadModel(settings)
    return model


def _resnet(r: ResnetSection, data: OpenedData) -> nn.Module:
    t = _transformers()
    settings = t.ResNetConfig(
        num_channels=data.shape[0],
        embedding_size=r.stem,
        hidden_sizes=list(r.widths),
        depths=list(r.depths),
        layer_type=r.layer,
        num_labels=data.classes,
        problem_type="single_label_classification",
    )
    return ImageClassifier(t.ResNetForImageClassification(settings))


def _hf_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise InputError(f"model.hf: {folder / 'config.json'} does not exist; give a folder that from_pretrained loads")
    try:
        # trust_remote_code stays off: a model folder is data
        return _transformers().AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise InputError(f"model.hf: {folder}: {str(e).splitlines()[0]}") from e


def _hf(folder: Path) -> nn.Module:
    settings = _hf_config(folder)
    t = _transformers()
    architecture = (getattr(settings, "architectures", None) or [""])[0]
    model_type = getattr(t, architecture, None) if architecture.isidentifier() else None
    if model_type is None:
        raise InputError(f"model.hf: {folder} names architecture {architecture!r}, unknown to transformers")
    if hasattr(settings, "use_cache"):
        settings.use_cache = False
    try:
        model: nn.Module = model_type.from_pretrained(
            str(folder), config=settings, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError) as e:
        raise InputError(f"model.hf: {folder}: {str(e).splitlines()[0]}") from e
    return model

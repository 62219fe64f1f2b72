"""A trained run as a folder that transformers' `from_pretrained` loads, and text sampled from it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from fusion_p2p.errors import InputError
from peer.models import ImageClassifier
from peer.plain import lines
from peer.tokenize_text import FILE as TOKENIZER_FILE
from peer.tokenize_text import TextTokenizer


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """`model.load_state_dict(strict=True)`, with one line naming what does not fit."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:300]
        raise InputError(f"{source} does not fit the configured model: {reason}") from e


def export(model: nn.Module, out: Path, tokenizer_folder: Path | None = None, *, adapter: bool = False) -> list[str]:
    """Write `model` to the new folder `out`; the names of its files. Raises InputError if `out` holds something.

    A transformers model gets config.json and model.safetensors, any other its weights alone. A peft model is written
    with its adapter merged into the base; `adapter` writes the adapter alone, as `PeftModel.from_pretrained` loads it.
    The tokenizer.json of `tokenizer_folder`, if there is one, goes along so that AutoTokenizer finds it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; give an empty or a new folder")
    inner = model.model if isinstance(model, ImageClassifier) else model
    if adapter and not _is_peft(inner):
        raise InputError(f"{type(inner).__name__} has no adapter: wrap it with peft.get_peft_model, or export it whole")
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if adapter:
        # "auto" would ask the hub whether the vocabulary grew
        _call(inner, "save_pretrained", str(partial), save_embedding_layers=False)
    else:
        _save_whole(_call(copy.deepcopy(inner), "merge_and_unload") if _is_peft(inner) else inner, partial)
    if tokenizer_folder is not None and (tokenizer_folder / TOKENIZER_FILE).exists():
        shutil.copyfile(tokenizer_folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return sorted(p.name for p in out.iterdir())


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def _call(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """A method that only some of transformers' and peft's classes have."""
    function: Any = getattr(model, method)
    return function(*args, **kwargs)


def _save_whole(model: nn.Module, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        _call(model, "save_pretrained", str(folder))
    else:
        safetensors.torch.save_model(model, str(folder / "model.safetensors"))


@torch.no_grad()
def sample_text(
    model: nn.Module,
    tokenizer: TextTokenizer,
    *,
    context: int,
    prompt: str = "\n",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """The prompt and `tokens` more, drawn among the `top_k` likeliest (0: all) at `temperature` (0: the likeliest).

    Of bytes a model makes terminal escapes as well: what does not print becomes U+FFFD, but for line ends and tabs.
    """
    ids = [int(i) for i in tokenizer.encode(prompt)] or [0]
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    for _ in range(tokens):
        output: Any = model(input_ids=torch.tensor([ids[-context:]]))
        logits = output.logits[0, -1].float()
        if temperature == 0:
            ids.append(int(logits.argmax()))
            continue
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
        odds = torch.softmax(logits / temperature, dim=0)
        ids.append(int(torch.multinomial(odds, 1, generator=generator)))
    model.train(was_training)
    return lines(tokenizer.decode(ids))

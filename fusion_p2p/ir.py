"""The OP-DAG: a model and its loss as a pure, SSA, pickle-free graph (FusionLLM section 3; DESIGN section 4).

Nothing here runs. `interp` runs it, `admit` checks one that came from a stranger, `split` cuts it.
One graph serves train and eval: the mode-aware ops (`fusion.dropout`, `fusion.batch_norm`, ...) look at
the `training` flag given to the interpreter. One graph serves every micro-batch size: integers that
depend on the number of samples are `BatchInt`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

IR_VERSION = 1


class BatchInt(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """An integer `scale * batch + offset`, batch being the samples of a micro-batch."""

    scale: int
    offset: int = 0

    def at(self, batch: int) -> int:
        return self.scale * batch + self.offset


class Ref(msgspec.Struct, frozen=True, tag="v", array_like=True):
    """The value with this id, as an argument."""

    id: int


class DTypeArg(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """A torch dtype by its short name ("float32"), as an argument."""

    name: str


class EnumArg(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """One of the few strings that a reviewed schema admits (gelu's "tanh"), as an argument."""

    name: str


class ListArg(msgspec.Struct, frozen=True, tag="l", array_like=True):
    """A list of arguments."""

    items: tuple[Arg, ...]


Arg: TypeAlias = bool | int | float | BatchInt | Ref | DTypeArg | EnumArg | ListArg | None
Dim: TypeAlias = int | BatchInt


class ValueSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape (dims may depend on the batch) and dtype short name of one value."""

    shape: tuple[Dim, ...]
    dtype: str

    def at(self, batch: int) -> tuple[int, ...]:
        return tuple(d.at(batch) if isinstance(d, BatchInt) else d for d in self.shape)


class Node(msgspec.Struct, frozen=True, array_like=True):
    """One operator call. `outs` are the value ids it defines (-1: an output nobody reads).

    `site` numbers the operator before any split; seeded operators draw from (run seed, step, micro-batch, site).
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outs: tuple[int, ...]
    site: int


class Input(msgspec.Struct, frozen=True):
    """A tensor of the batch. `name` is its flattened path in the user's batch ("input_ids", "0", "x.mask")."""

    name: str
    value: int
    vmin: int | None = None  # integer inputs: the range that indexing operators allow, checked before use
    vmax: int | None = None


class Param(msgspec.Struct, frozen=True):
    name: str
    value: int
    trainable: bool = True


class Buffer(msgspec.Struct, frozen=True):
    """`update` is the value to commit after the forward of a training micro-batch, None if read only."""

    name: str
    value: int
    update: int | None = None
    persistent: bool = True


class Const(msgspec.Struct, frozen=True):
    """A small tensor constant lifted by export; `data` is little-endian, contiguous."""

    value: int
    data: bytes


class OpDag(msgspec.Struct, frozen=True, kw_only=True):
    """`values[id]` describes value `id`; `nodes` are in topological order, ids are defined once.

    `loss` is the id of a scalar, the mean over the micro-batch's samples. `outputs` are further named values.
    `aliases` maps every other state-dict name of a tied parameter or buffer to the name that holds it.
    """

    version: int = IR_VERSION
    opset: str
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    consts: tuple[Const, ...]
    values: tuple[ValueSpec, ...]
    nodes: tuple[Node, ...]
    loss: int
    outputs: Mapping[str, int] = {}
    aliases: Mapping[str, str] = {}

    def to_bytes(self) -> bytes:
        """Canonical JSON, UTF-8; equal graphs give equal bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @property
    def hash(self) -> str:
        """BLAKE2b-256 of `to_bytes`, hex."""
        return hashlib.blake2b(self.to_bytes(), digest_size=32).hexdigest()


def refs(args: object) -> list[int]:
    """Every value id in an argument tree, in order, repeats kept."""
    if isinstance(args, Ref):
        return [args.id]
    if isinstance(args, ListArg):
        return [i for a in args.items for i in refs(a)]
    if isinstance(args, tuple | list):
        return [i for a in args for i in refs(a)]
    if isinstance(args, Mapping):
        return [i for k in args for i in refs(args[k])]
    return []

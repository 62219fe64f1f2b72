"""Whether bytes that somebody sent can be a stage's snapshot: bounded before they are taken, checked before they count.

Only the table is read here, so that a trainer can check a snapshot larger than its memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import torch

from fusion_p2p.codec import channels
from fusion_p2p.errors import InputError
from fusion_p2p.ir import OpDag
from fusion_p2p.opset import dtype_of
from fusion_p2p.optim import SLOTS
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import BUFFER, CODEC, OPTIM, PARAM, layout
from fusion_p2p.split import StageProgram

_ENTRY_BYTES = 256  # of the table, beside the name
_SLACK_BYTES = 64 << 10
Layout = tuple[torch.dtype, tuple[int, ...]]


class SnapshotCheck:
    """What the snapshot of `program` holds under these settings."""

    def __init__(self, program: StageProgram, dag: OpDag, numerics: Numerics, optimizer: OptimizerSpec) -> None:
        value_of = {p.name: p.value for p in dag.params} | {b.name: b.value for b in dag.buffers}
        specs = {name: dag.values[value] for name, value in value_of.items()}
        self._stage = program.stage
        self._wanted: dict[str, Layout] = {
            prefix + name: (dtype_of(specs[name].dtype), specs[name].at(1))
            for prefix, names in ((PARAM, program.params), (BUFFER, program.buffers))
            for name in names
        }
        self._optim = {
            f"{OPTIM}{slot}/{name}": None if slot == "step" else self._wanted[PARAM + name]
            for name in program.params
            for slot in SLOTS[optimizer.kind]
        }
        coded = {(c.src, c.dst) for c in numerics.codecs}
        self._codecs = {
            f"{CODEC}{e.value}/{e.src}/{e.dst}/": _codec_bytes(dag.values[e.value].at(numerics.micro_batch_size))
            for e in (*program.edges_in, *program.edges_out)
            if (e.src, e.dst) in coded
        }

    @property
    def most_bytes(self) -> int:
        """No snapshot of the stage has more."""
        entries = [*self._wanted.items(), *self._optim.items()]
        table = sum(len(key.encode()) * 6 + _ENTRY_BYTES for key, _ in entries)  # JSON may escape each byte
        tensors = sum(_size(shown) if shown is not None else 8 for _, shown in entries)
        return table + tensors + sum(self._codecs.values()) + _SLACK_BYTES

    def check(self, file: BinaryIO, size: int) -> None:
        """InputError, naming the entry, unless the table of this snapshot of `size` bytes is the stage's."""
        self.check_entries({key: (dtype, shape) for key, (dtype, shape, _) in layout(file, size)[1].items()})

    def check_entries(self, found: Mapping[str, Layout]) -> None:
        for key in self._wanted.keys() - found.keys():
            raise InputError(f"the snapshot of stage {self._stage} lacks {key}")
        codec_bytes = dict.fromkeys(self._codecs, 0)
        for key, shown in found.items():
            if key in self._wanted or key in self._optim:
                wanted = self._wanted[key] if key in self._wanted else self._optim[key]
                fits = shown == wanted if wanted is not None else math.prod(shown[1]) == 1
                if not fits:
                    raise InputError(f"{key} of stage {self._stage} is {shown}, expected {wanted or 'one number'}")
                continue
            edge = key[: key.rfind("/") + 1]
            if edge not in codec_bytes:
                raise InputError(f"the snapshot of stage {self._stage} holds {key[:80]!r}, which is not the stage's")
            codec_bytes[edge] += _size(shown)
            if codec_bytes[edge] > self._codecs[edge]:
                raise InputError(f"{edge} of stage {self._stage} takes more than {self._codecs[edge]} bytes")


def codec_digests(file: BinaryIO, size: int) -> dict[str, bytes]:
    """BLAKE2b-128 of every entry of a checked snapshot that a codec keeps."""
    start, table = layout(file, size)
    out, at = {}, start
    for key, (_, _, stop) in table.items():
        if key.startswith(CODEC):
            file.seek(at)
            out[key] = hashlib.blake2b(file.read(start + stop - at), digest_size=16).digest()
        at = start + stop
    return out


def parted(stages: Sequence[Mapping[str, bytes]]) -> str:
    """Of a set's `codec_digests` the first entry of which the two ends of an edge hold different ones; "" if none."""
    known: dict[str, bytes] = {}
    for digests in stages:
        for key, digest in digests.items():
            if known.setdefault(key, digest) != digest:
                return key
    return ""


def _size(shown: Layout) -> int:
    return math.prod(shown[1]) * shown[0].itemsize


def _codec_bytes(shape: tuple[int, ...]) -> int:
    """Most that a codec keeps of an edge: per direction two float32 matrices over the channels, and their powers."""
    if not math.prod(shape):
        return 0
    width = channels.split(shape or (1,))[1]
    return 2 * 4 * (2 * width * width + width) + 64

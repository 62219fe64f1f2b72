"""What a stage needs to go on from a tick boundary, as named tensors and as bytes (DESIGN section 2, "Snapshots").

Keys say what a tensor is: param/NAME, buffer/NAME, optim/SLOT/NAME, codec/VALUE/SRC/DST/NAME. So a new cut is a
redistribution of named tensors. Bytes are the safetensors layout; the reader here checks before it allocates.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import msgspec
import torch

from fusion_p2p.codec import wire
from fusion_p2p.errors import FrameError, InputError
from fusion_p2p.opset import NAMES
from fusion_p2p.split import StageProgram

PARAM, BUFFER, OPTIM, CODEC = "param/", "buffer/", "optim/", "codec/"
_MAX_HEADER = 64 << 20
_CHUNK_BYTES = 4 << 20
_ST_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_ST_NAMES = {dtype: name for name, dtype in _ST_DTYPES.items()}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def initial_state(state: Mapping[str, torch.Tensor], program: StageProgram) -> dict[str, torch.Tensor]:
    """The first snapshot of a stage, from a model's parameters and buffers by name. InputError if one is missing."""
    out = {}
    for prefix, names in ((PARAM, program.params), (BUFFER, program.buffers)):
        for name in names:
            if name not in state:
                raise InputError(f"the model's state lacks {name!r}, which the graph has; capture the model again")
            out[prefix + name] = state[name]
    return out


def redistribute(snapshots: Iterable[Mapping[str, torch.Tensor]], program: StageProgram) -> dict[str, torch.Tensor]:
    """The snapshot of one stage of a new cut, from all snapshots of the old. Codec state starts anew."""
    merged = {k: v for s in snapshots for k, v in s.items() if not k.startswith(CODEC)}
    out = initial_state(weights([merged]), program)
    owned = set(program.params)
    out.update((k, v) for k, v in merged.items() if k.startswith(OPTIM) and k.split("/", 2)[2] in owned)
    return out


def weights(snapshots: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of all stages together, by plain name."""
    return {k.split("/", 1)[1]: v for s in snapshots for k, v in s.items() if k.startswith((PARAM, BUFFER))}


def weights_blake2b(state: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b-256 hex over (name, dtype, shape, bytes) of every tensor, sorted by name; lengths keep parts apart."""
    h = hashlib.blake2b(digest_size=32)
    for name in sorted(state):
        t = state[name]
        head = f"{name}\0{NAMES[t.dtype]}\0{','.join(map(str, t.shape))}\0".encode()
        h.update(len(head).to_bytes(8, "little") + head)
        h.update(wire.tensor_bytes(t))
    return h.hexdigest()


def to_bytes(snapshot: Mapping[str, torch.Tensor]) -> bytes:
    """The snapshot in the safetensors layout; equal snapshots give equal bytes."""
    return b"".join(chunks(snapshot))


def chunks(snapshot: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The same, piece by piece: no second copy of the tensors is made."""
    table: dict[str, _Entry] = {}
    parts: list[memoryview] = []
    at = 0
    for key in sorted(snapshot):
        t = snapshot[key]
        parts.append(wire.tensor_bytes(t))
        table[key] = _Entry(_ST_NAMES[t.dtype], tuple(t.shape), (at, at := at + len(parts[-1])))
    head = msgspec.json.encode(table)
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):
            yield part[start : start + _CHUNK_BYTES]


def digest(data: bytes) -> str:
    """BLAKE2b-256 hex, by which blobs are named."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def from_bytes(data: bytes, *, expected_hash: str | None = None) -> dict[str, torch.Tensor]:
    """Read `to_bytes`. InputError on a wrong hash, a truncated or overlapping layout, or an unknown key or type."""
    if expected_hash is not None and digest(data) != expected_hash:
        raise InputError(f"snapshot of {len(data)} bytes does not have the hash {expected_hash}; fetch it again")
    start, table = layout(io.BytesIO(data), len(data))
    body, at = memoryview(data)[start:], 0
    out = {}
    for key, (dtype, shape, stop) in table.items():
        try:
            out[key] = wire.dense_tensor(body[at:stop], shape, dtype)
        except FrameError as error:
            raise InputError(f"snapshot entry {key[:80]!r}: {error}") from None
        at = stop
    return out


def layout(file: BinaryIO, total: int) -> tuple[int, dict[str, tuple[torch.dtype, tuple[int, ...], int]]]:
    """(where tensors begin, key -> dtype, shape and end, in order) of a snapshot of `total` bytes; InputError as above.

    The tensors are not read.
    """
    head = file.read(8)
    if len(head) < 8 or (size := int.from_bytes(head, "little")) > min(_MAX_HEADER, total - 8):
        raise InputError(f"snapshot of {total} bytes is truncated; fetch it again")
    try:
        table = msgspec.json.decode(file.read(size).rstrip(b" "), type=dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"snapshot's table is malformed: {error}") from None
    length, at = total - 8 - size, 0
    out = {}
    for key, e in sorted(table.items(), key=lambda item: item[1].data_offsets):
        if not key.startswith((PARAM, BUFFER, OPTIM, CODEC)) or e.dtype not in _ST_DTYPES:
            raise InputError(f"snapshot holds {key[:80]!r} of type {e.dtype[:20]!r}, which no stage has")
        start, stop = e.data_offsets
        dtype = _ST_DTYPES[e.dtype]
        if start != at or any(d < 0 for d in e.shape) or stop - start != math.prod(e.shape) * dtype.itemsize:
            raise InputError(f"snapshot entry {key[:80]!r} of shape {e.shape} does not fit bytes {start}..{stop}")
        if stop > length:
            raise InputError(f"snapshot is truncated: {key[:80]!r} ends at byte {stop} of {length}")
        out[key] = dtype, e.shape, stop
        at = stop
    if at != length:
        raise InputError(f"snapshot has {length - at} bytes too many")
    return 8 + size, out

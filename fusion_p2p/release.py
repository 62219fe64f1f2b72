"""The trainer's side of a tick: a global batch cut into micro-batches, and the frames that release it (DESIGN 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.errors import InputError
from fusion_p2p.frame import TRAINER, Frame, Kind, StepHeader
from fusion_p2p.ir import BatchInt, OpDag, Ref
from fusion_p2p.split import StageProgram

Parts = Sequence[Mapping[int, torch.Tensor]]


def cut_batch(
    dag: OpDag, feed: Mapping[int, torch.Tensor], micro_batch_size: int, *, training: bool
) -> tuple[tuple[int, ...], Parts]:
    """(samples of each micro-batch, its tensors by value id); the last micro-batch may be smaller.

    `feed` is value id -> tensor (`Captured.feed`). A tensor whose first dimension is not the samples goes whole to
    every micro-batch. InputError if the tensors disagree on the number of samples, a shape is not the captured one, or
    in training a micro-batch is too small for batch norm.
    """
    total = None
    for i in dag.inputs:
        shape = dag.values[i.value].shape
        if shape and isinstance(shape[0], BatchInt):
            x = feed[i.value]
            have = (x.shape[0] - shape[0].offset) // shape[0].scale if x.dim() else 0
            total = have if total is None else total
            want = dag.values[i.value].at(total)
            if total < 1 or tuple(x.shape) != want:
                raise InputError(
                    f"batch tensor {i.name!r} has shape {tuple(x.shape)}, expected {want}; see the example batch"
                )
    total = 1 if total is None else total
    starts = range(0, total, micro_batch_size)
    sizes = tuple(min(micro_batch_size, total - s) for s in starts)
    if training and 1 in sizes and (where := _single_value_norm(dag)):
        raise InputError(
            f"{total} samples in micro-batches of {micro_batch_size} leave one of a single sample, of which "
            f"{where} has one value a channel and no variance; leave that sample out, or change the batch's size"
        )
    return sizes, [_part(dag, feed, start, size) for start, size in zip(starts, sizes, strict=True)]


def _single_value_norm(dag: OpDag) -> str:
    """A batch norm that sees one value a channel of a single sample, which PyTorch refuses in training; "" if none."""
    for node in dag.nodes:
        if node.op in ("fusion.batch_norm", "fusion.batch_norm_local"):
            shape = dag.values[next(o for o in node.outs if o >= 0)].at(1)
            if math.prod(shape[:1] + shape[2:]) == 1:
                names = {p.value: p.name for p in dag.params}
                held = [names[a.id] for a in node.args if isinstance(a, Ref) and a.id in names]
                return f"the batch norm of {held[0]!r}" if held else "a batch norm"
    return ""


def _part(dag: OpDag, feed: Mapping[int, torch.Tensor], start: int, size: int) -> dict[int, torch.Tensor]:
    out = {}
    for i in dag.inputs:
        shape, x = dag.values[i.value].shape, feed[i.value]
        if shape and isinstance(shape[0], BatchInt):
            x = x[shape[0].scale * start : shape[0].scale * start + shape[0].at(size)]
        out[i.value] = x
    return out


def release(
    dag: OpDag, programs: Sequence[StageProgram], tick: int, header: StepHeader, parts: Parts
) -> Iterator[Frame]:
    """STEP to every stage, then DATA to the stages that read each tensor, micro-batch by micro-batch."""
    step = msgspec.msgpack.encode(header)
    for p in programs:
        yield Frame(Kind.STEP, TRAINER, p.stage, 0, tick, 0, step)
    codec = parse("dense")
    for m, part in enumerate(parts):
        for i in dag.inputs:
            readers = [p.stage for p in programs if i.value in p.inputs]
            if readers:
                payload, _ = codec.encode_forward(part[i.value], FrameKey(0, 0, m, i.value))
                for stage in readers:
                    yield Frame(Kind.DATA, TRAINER, stage, i.value, tick, m, payload)

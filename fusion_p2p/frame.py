"""What travels between stages: numbered frames (DESIGN section 2). The envelope is `peer`'s, the payload ours.

A *tick* is one unit of the streams: a training step or one evaluation pass. Every (src, dst) pair is one channel;
a stage's frames on a channel come in one order that does not depend on timing, so (tick, index) numbers them.
"""

from __future__ import annotations

import enum

import msgspec

TRAINER = -1  # the endpoint number of the run's trainer


class Kind(enum.IntEnum):
    """What a frame carries, from whom to whom; the numbers are on the wire."""

    STEP = 1  # trainer -> every stage: StepHeader; opens a tick (the release of DESIGN section 2)
    DATA = 2  # trainer -> stages that read a batch tensor
    ACT = 3  # activation, producer -> consumer
    GRAD = 4  # gradient of an activation, consumer -> producer
    WEIGHT = 5  # a tied weight, owner -> user, once a tick
    WGRAD = 6  # the running sum of its gradient, each user -> the next lower one, down to the owner, once a tick
    NORM = 7  # per-parameter squared norms (fp64) and finite flags, stage -> stage 0, once a tick
    VERDICT = 8  # stage 0 -> every stage: Verdict; a stage updates when it holds it
    LOSS = 9  # stage with the loss -> trainer, per micro-batch (fp32)
    DONE = 10  # stage -> trainer, after its update: TickReport


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One numbered message between stages (-1: the trainer). `payload`: bytes as `Payloads` made them for this kind."""

    kind: Kind
    src: int
    dst: int
    value: int  # OP-DAG value id; 0 where the kind needs none
    tick: int
    micro_batch: int
    payload: bytes


class StepHeader(msgspec.Struct, frozen=True):
    """`step` is the optimizer step (0-based) of a training tick, `sizes` the samples of each micro-batch."""

    training: bool
    step: int
    sizes: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """`norm` is the global gradient norm, `scale` multiplies every gradient (clipping), `apply` False skips."""

    norm: float
    apply: bool
    scale: float


class CutReport(msgspec.Struct, frozen=True, array_like=True):
    """One end's view of what stages `src` and `dst` exchanged in a training tick, all values between them together.

    `sent_bytes`, `elements`: payloads this end sent, and the dense numbers in them; `codec_s`: seconds it spent to
    encode and decode. `rms`, said by `src`: the largest root mean square of an activation before it was compressed.
    `bias`, said by `dst`: <g, decoded> / <g, g> - 1 of the first micro-batch's gradient; 0 where it travels exactly.
    """

    src: int
    dst: int
    sent_bytes: int
    elements: int
    codec_s: float
    rms: float
    bias: float


class TickReport(msgspec.Struct, frozen=True):
    """Seconds that the stage spent in a tick; `update_s` is all that is neither forward, backward nor waiting.

    `cuts`: of a training tick, every pair that the stage is an end of. `sent`: see `sent.SentHash`.
    """

    forward_s: float
    backward_s: float
    update_s: float
    wait_s: float
    cuts: tuple[CutReport, ...] = ()
    sent: bytes = b""

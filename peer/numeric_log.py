"""A numeric log read back: what a run replays, and what a resumed run must still do (DESIGN section 2).

Cuts and codecs change bits, so a log says from which step on which numerics hold. A run that is given another run's
log changes at the same steps and ends with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fusion_p2p.codec import parse
from fusion_p2p.errors import InputError
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import NumericLogEntry, Numerics
from fusion_p2p.split import split
from peer.errors import SignatureError
from peer.plain import one_line
from peer.protocol import Signed
from peer.signing import open_signed

MAX_BYTES = 64 << 20
REPLAY = "replay_log.jsonl"  # in a run folder: the log that the run was given
_FREE = ("cuts", "codecs")  # what may differ from entry to entry, and from the configuration


def read(path: Path) -> tuple[NumericLogEntry, ...]:
    """The entries of a numeric_log.jsonl, each signature checked. InputError naming the file and the line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give a run's numeric_log.jsonl") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path} has more than {MAX_BYTES} bytes, the most of a numeric log")
    entries: list[NumericLogEntry] = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            signed = msgspec.json.decode(line, type=Signed)
            entry = open_signed(signed, NumericLogEntry, signed.key)
        except (msgspec.MsgspecError, RecursionError, SignatureError) as error:
            raise InputError(f"{path} line {number} is damaged: {error}") from None
        if entry.first_step < (entries[-1].first_step if entries else 0):
            raise InputError(f"{path} line {number}: step {entry.first_step} comes after {entries[-1].first_step}")
        entries.append(msgspec.structs.replace(entry, reason=one_line(entry.reason)))  # it is printed; anybody signs
    if not entries or entries[0].first_step != 0:
        raise InputError(f"{path} does not say with which numerics the run begins; give a run's numeric_log.jsonl")
    return tuple(entries)


def check_fits(entries: Sequence[NumericLogEntry], wanted: Numerics) -> None:
    """InputError unless the log is of such a run: only cuts and codecs may be the log's own.

    The device class that is still open ("auto") is the log's too.
    """
    for entry in entries:
        for field in msgspec.structs.fields(Numerics):
            name, theirs = field.name, getattr(entry.numerics, field.name)
            ours = getattr(wanted, name)
            if name not in _FREE and theirs != ours and (name, ours) != ("device_class", "auto"):
                raise InputError(
                    f"the numeric log was made with {name} = {theirs!r} (step {entry.first_step}), this run has "
                    f"{ours!r}; set it to {theirs!r} to replay the log"
                )


def check_builds(entries: Sequence[NumericLogEntry], dag: OpDag) -> None:
    """InputError if this model cannot be cut or compressed as an entry says: else a run would end in its middle."""
    seen: set[Numerics] = set()
    for entry in entries:
        numerics, at = entry.numerics, f"the numeric log, step {entry.first_step}"
        if numerics in seen:
            continue
        seen.add(numerics)
        try:
            split(dag, numerics.cuts)
            for link in numerics.codecs:
                parse(link.codec)
        except InputError as error:
            raise InputError(f"{at}: {error}") from None
        for link in numerics.codecs:
            if not 0 <= link.src < link.dst < numerics.stages:
                raise InputError(f"{at}: a codec for stages {link.src}-{link.dst} of {numerics.stages}")


def ahead(entries: Sequence[NumericLogEntry], step: int, numerics: Numerics) -> list[NumericLogEntry]:
    """What the log still has in store for a run that stands before step `step` under `numerics`; of several entries
    of one step the last counts."""
    by_step = {e.first_step: e for e in entries}
    return [
        e for at, e in sorted(by_step.items()) if at > step or (at == step and e.numerics != numerics)
    ]  # fmt: skip


def in_force(entries: Sequence[NumericLogEntry], step: int) -> Numerics | None:
    """What holds at `step`."""
    past = [e for e in entries if e.first_step <= step]
    return past[-1].numerics if past else None

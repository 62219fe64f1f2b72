"""Numeric logs read back: what is damaged or of another run is refused; what is still ahead of a resumed run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.plan import LinkCodec, NumericLogEntry, Numerics
from peer.numeric_log import ahead, check_builds, check_fits, in_force, read
from peer.signing import new_session_key, sign
from tests.unit.stage_models import skip_net

BASE = Numerics(cuts=(2,), micro_batches=4, micro_batch_size=2)


def entry(step: int, *cuts: int) -> NumericLogEntry:
    return NumericLogEntry(step, msgspec.structs.replace(BASE, cuts=cuts), "why")


LOG = [entry(0, 2), entry(5, 3), entry(5, 4), entry(9, 1, 2)]


def written(path: Path, entries: list[NumericLogEntry]) -> Path:
    key = new_session_key()
    path.write_bytes(b"".join(msgspec.json.encode(sign(e, key)) + b"\n" for e in entries))
    return path


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert list(read(written(tmp_path / "log", LOG))) == LOG


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"body":"', b'"body":"A', 1), *lines[2:]], "line 2 is damaged"),
        (lambda lines: [*lines[:2], b"{", *lines[2:]], "line 3 is damaged"),
        (lambda lines: lines[1:], "with which numerics the run begins"),
        (lambda lines: [], "with which numerics the run begins"),
        (lambda lines: [lines[0], lines[3], lines[1]], "line 3: step 5 comes after 9"),
    ],
)
def test_a_damaged_log_is_refused_by_line(tmp_path: Path, damage: object, said: str) -> None:
    path = written(tmp_path / "log", LOG)
    assert callable(damage)
    path.write_bytes(b"\n".join(damage(path.read_bytes().splitlines())))
    with pytest.raises(InputError, match=said):
        read(path)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "nowhere")
    with pytest.raises(InputError, match="/dev/zero has more than"):
        read(Path("/dev/zero"))


def test_a_log_that_anybody_signed_says_nothing_to_the_terminal(tmp_path: Path) -> None:
    path = written(tmp_path / "log", [msgspec.structs.replace(LOG[0], reason="\x1b[2J\nowned" + "x" * 10_000)])
    (read_back,) = read(path)
    assert read_back.reason.isprintable() and len(read_back.reason) <= 500
    path.write_bytes(b'{"zz":' + b"[" * 100_000)
    with pytest.raises(InputError, match="line 1 is damaged"):
        read(path)


@pytest.mark.parametrize(
    ("cuts", "codecs", "said"),
    [
        ((9, 2), (), r"step 7: cuts \(9, 2\) must ascend"),
        ((10**12,), (), "must ascend within"),
        ((2,), (LinkCodec(0, 1, "gzip"),), "step 7: codec 'gzip' is unknown"),
        ((2,), (LinkCodec(0, 9, "int8"),), "step 7: a codec for stages 0-9 of 2"),
        ((2,), (LinkCodec(1, 0, "int8"),), "a codec for stages 1-0 of 2"),
    ],
)
def test_what_this_model_cannot_be_is_refused_before_the_first_step(
    cuts: tuple[int, ...], codecs: tuple[LinkCodec, ...], said: str
) -> None:
    dag = skip_net().captured.opdag
    bad = NumericLogEntry(7, msgspec.structs.replace(BASE, cuts=cuts, codecs=codecs))
    check_builds([entry(0, 2), entry(5, 1)], dag)
    with pytest.raises(InputError, match=said):
        check_builds([entry(0, 2), bad], dag)


def test_a_log_of_another_configuration_names_the_setting() -> None:
    check_fits(LOG, msgspec.structs.replace(BASE, cuts=(), device_class="auto"))
    with pytest.raises(InputError, match=r"micro_batches = 4 \(step 0\), this run has 8; set it to 4"):
        check_fits(LOG, msgspec.structs.replace(BASE, micro_batches=8))


def test_what_is_ahead_and_what_holds() -> None:
    assert ahead(LOG, 0, LOG[0].numerics) == [LOG[2], LOG[3]]  # of two entries of one step the last counts
    assert ahead(LOG, 5, LOG[0].numerics) == [LOG[2], LOG[3]]  # the change at this step has not come yet
    assert ahead(LOG, 5, LOG[2].numerics) == [LOG[3]]
    assert ahead(LOG, 9, LOG[3].numerics) == [] == ahead([], 3, BASE)
    assert in_force(LOG, 4) == LOG[0].numerics and in_force(LOG, 7) == LOG[2].numerics and in_force([], 1) is None

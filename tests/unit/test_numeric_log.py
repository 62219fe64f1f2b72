"""Numeric logs read back: what is damaged or of another run is refused; what is still ahead of a resumed run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fusion_p2p.errors import InputError
from fusion_p2p.plan import NumericLogEntry, Numerics
from peer.numeric_log import ahead, check_fits, in_force, read
from peer.signing import new_session_key, sign

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

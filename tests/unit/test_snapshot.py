"""Snapshots as bytes: the safetensors layout, exact, hashed; nothing malformed is taken."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.snapshot import digest, from_bytes, to_bytes, weights, weights_blake2b

STATE = {
    "param/a.weight": torch.arange(6.0).reshape(2, 3).t(),
    "param/b": torch.zeros(0, 4),
    "buffer/steps": torch.tensor(7),
    "buffer/mask": torch.tensor([True, False]),
    "optim/exp_avg/a.weight": torch.full((3, 2), 0.1, dtype=torch.float64),
    "codec/3/0/1/basis": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def test_round_trip_is_exact() -> None:
    raw = to_bytes(STATE)
    back = from_bytes(raw, expected_hash=digest(raw))
    assert back.keys() == STATE.keys()
    for name, t in STATE.items():
        assert back[name].dtype == t.dtype
        assert torch.equal(back[name], t)
    assert to_bytes(dict(reversed(back.items()))) == raw


def test_others_can_read_it() -> None:
    for name, t in safetensors.torch.load(to_bytes(STATE)).items():
        assert torch.equal(t, STATE[name])
    assert from_bytes(safetensors.torch.save({"param/x": torch.ones(3)}))["param/x"].sum() == 3


def test_a_wrong_hash_is_refused() -> None:
    with pytest.raises(InputError, match="does not have the hash"):
        from_bytes(to_bytes(STATE), expected_hash=digest(b""))


@given(st.data())
def test_damage_is_refused_or_changes_only_numbers(data: st.DataObject) -> None:
    """Whatever byte is hit, reading gives the declared layout or an InputError, nothing else."""
    raw = bytearray(to_bytes(STATE))
    kind = data.draw(st.sampled_from(["cut", "flip", "append"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "append":
        raw += b"\0"
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = from_bytes(bytes(raw))
    except InputError:
        return
    assert kind == "flip"
    assert sum(t.numel() * t.element_size() for t in back.values()) <= len(raw)


def test_a_bool_that_is_neither_is_refused() -> None:
    raw = to_bytes({"buffer/mask": torch.tensor([True])})
    with pytest.raises(InputError, match="neither 0 nor 1"):
        from_bytes(raw[:-1] + b"\2")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"param/a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}', "does not fit bytes 0..4"),
        (b'{"param/a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "does not fit"),
        (b'{"evil":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "no stage has"),
        (b'{"param/a":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}', "no stage has"),
        (b'{"param/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"param/b":{"dtype":"F32","shape":[1],'
         b'"data_offsets":[0,4]}}', "does not fit"),
        (b'{"param/a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "truncated"),
        (b"{}", "4 bytes too many"),
        (b"[]", "malformed"),
    ],
)  # fmt: skip
def test_a_lying_table_is_refused(header: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_hash_of_weights_sees_name_type_shape_and_bytes() -> None:
    base = {"a": torch.arange(4.0)}
    others = [
        {"b": torch.arange(4.0)},
        {"a": torch.arange(4.0).double()},
        {"a": torch.arange(4.0).reshape(2, 2)},
        {"a": torch.tensor([0.0, 1.0, 2.0, 4.0])},
        {"a": torch.arange(4.0), "b": torch.zeros(0)},
    ]
    hashes = {weights_blake2b(s) for s in (base, *others)}
    assert len(hashes) == 6
    assert weights_blake2b({"a": torch.arange(4.0).reshape(2, 2).t().t().reshape(4)}) == weights_blake2b(base)


def test_weights_leave_out_what_is_not_the_model() -> None:
    assert weights([STATE]).keys() == {"a.weight", "b", "steps", "mask"}

"""Forged, replayed, oversized, mistyped and far-future records are refused, and the store stays as it was."""

from __future__ import annotations

import logging
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht import records
from dht._hivemind import node_parts
from dht.clock import SwarmClock
from dht.errors import RecordError
from dht.identity import Identity
from dht.records import TTL_S, Delegation, PeerRecord, RunEvents, Signer
from dht.validator import RecordRules
from tests.dht_samples import NOW, peer_record, run_record, session_signer

ALICE, MALLORY, OWNER = Identity.generate(), Identity.generate(), Identity.generate()
EXPIRES = NOW + TTL_S


def opened(record: Any, value: bytes, expiration: float = EXPIRES, *, now: float = NOW) -> Any:
    key, subkey = records.place(record)
    return records.unseal(records.key_id(key), subkey, value, expiration, now=now)


def sign_raw(identity: Identity, record_at: Any, body: bytes, *, major: int = 1, expiration: float = EXPIRES) -> bytes:
    """What a hostile peer can make: any body, correctly signed by its own key, filed at `record_at`'s place."""
    key, subkey = records.place(record_at)
    signed = bytes((major, 0)) + body
    head = b"fusion-p2p/record\0" + records.key_id(key) + struct.pack(">Hd", len(subkey), expiration) + subkey
    return signed + identity.sign(head + signed)


def test_an_honest_record_is_believed() -> None:
    record = peer_record(ALICE)
    assert opened(record, records.seal(record, Signer(ALICE), expiration=EXPIRES)) == record
    run = run_record(OWNER, ALICE.peer_id)
    assert opened(run, records.seal(run, Signer(OWNER), expiration=EXPIRES)) == run
    delegated = records.seal(run, session_signer(OWNER, run.run, NOW + 3600), expiration=EXPIRES)
    assert opened(run, delegated) == run


def test_forged_by_another_key() -> None:
    record = peer_record(ALICE)
    with pytest.raises(RecordError, match="not its subject's"):
        records.seal(record, Signer(MALLORY), expiration=EXPIRES)
    body = msgspec.msgpack.encode(record)
    with pytest.raises(RecordError, match="not its subject's"):
        opened(record, sign_raw(MALLORY, record, body))


def test_in_another_subjects_place() -> None:
    own = peer_record(MALLORY)
    value = records.seal(own, Signer(MALLORY), expiration=EXPIRES)
    with pytest.raises(RecordError, match="another subject's place"):
        opened(peer_record(ALICE), value)
    key, subkey = records.place(own)
    for wrong in (records.fence_keys("1")[0], "runs/0", "elsewhere"):
        with pytest.raises(RecordError, match="another subject's place"):
            records.unseal(records.key_id(wrong), subkey, value, EXPIRES, now=NOW)
    with pytest.raises(RecordError):
        records.unseal(records.key_id(key), subkey + b"x", value, EXPIRES, now=NOW)


@pytest.mark.parametrize("later", [1e-6, 1.0, 20.0])
def test_replayed_with_a_later_expiry(later: float) -> None:
    record = peer_record(ALICE)
    value = records.seal(record, Signer(ALICE), expiration=EXPIRES)
    with pytest.raises(RecordError, match="not its subject's"):
        opened(record, value, EXPIRES + later)
    with pytest.raises(RecordError, match="expired"):
        opened(record, value, EXPIRES, now=EXPIRES + 0.1)


@pytest.mark.parametrize("expiration", [math.inf, -math.inf, math.nan, 1e18, NOW + 3600.0, 2**70, "soon", None])
def test_far_future_and_no_times(expiration: Any) -> None:
    record = peer_record(ALICE)
    value = records.seal(record, Signer(ALICE), expiration=EXPIRES)
    with pytest.raises(RecordError):
        opened(record, value, expiration)
    assert not rules().check(*packed(record, value), expiration)


def test_oversized() -> None:
    with pytest.raises(RecordError, match="bytes"):
        big = peer_record(ALICE, addresses=tuple("/ip4/1.2.3.4/tcp/1/" + "é" * 180 for _ in range(8)))
        records.seal(big, Signer(ALICE), expiration=EXPIRES)
    record = peer_record(ALICE)
    value = sign_raw(ALICE, record, msgspec.msgpack.encode(record) + b"\0" * 3000)
    with pytest.raises(RecordError, match="at most 2048"):
        opened(record, value)
    assert not rules().check(*packed(record, b"\0" * (4 << 20)), EXPIRES)


MISTYPED: list[dict[str, Any]] = [
    {"devices": "cpu"},
    {"devices": (("cpu", "x", -1.0, 1.0, 1, 1),)},
    {"devices": (("cpu", "x", math.nan, 1.0, 1, 1),)},
    {"devices": (("cpu", "x", math.inf, 1.0, 1, 1),)},
    {"devices": (("cpu", "x", 1.0, 1.0, 1 << 62, 1),)},
    {"devices": tuple(("cpu", "x", 1.0, 1.0, 1, 1) for _ in range(17))},
    {"state": "root"},
    {"version": "v" * 65},
    {"version": 3},
    {"work": (("zz", 1),)},
    {"work": (("ab" * 16, 1 << 40),)},
    {"fence": ""},
    {"published": math.nan},
    {"published": -1.0},
    {"hours": None},
]


@pytest.mark.parametrize("change", MISTYPED)
def test_mistyped_though_signed(change: dict[str, Any]) -> None:
    record = peer_record(ALICE)
    fields = {name: getattr(record, name) for name in PeerRecord.__struct_fields__} | change
    value = sign_raw(ALICE, record, msgspec.msgpack.encode(("peer", *fields.values())))
    with pytest.raises(RecordError):
        opened(record, value)


def test_a_run_id_belongs_to_its_owner() -> None:
    honest = run_record(OWNER, ALICE.peer_id)
    stolen = msgspec.structs.replace(honest, owner=MALLORY.public_key)
    with pytest.raises(RecordError, match="not of the owner"):
        records.seal(stolen, Signer(MALLORY), expiration=EXPIRES)


def test_session_keys_are_bound() -> None:
    run = run_record(OWNER, ALICE.peer_id)
    other = run_record(OWNER, ALICE.peer_id, name="other")
    session = Identity.generate()
    cases = {
        "outlives": Delegation.sign(OWNER, run.run, session.public_key, EXPIRES - 1),
        "not signed by the run's owner": Delegation.sign(OWNER, other.run, session.public_key, NOW + 3600),
    }
    for reason, delegation in cases.items():
        with pytest.raises(RecordError, match=reason):
            records.seal(run, Signer(session, delegation), expiration=EXPIRES)
    with pytest.raises(RecordError, match="not signed by the run's owner"):
        forged = Delegation.sign(MALLORY, run.run, session.public_key, NOW + 3600)
        records.seal(run, Signer(session, forged), expiration=EXPIRES)
    with pytest.raises(RecordError, match="outlives"):
        never = Delegation.sign(OWNER, run.run, session.public_key, math.nan)
        records.seal(run, Signer(session, never), expiration=EXPIRES)
    with pytest.raises(RecordError, match="nobody may"):
        lent = Delegation.sign(ALICE, run.run, session.public_key, NOW + 3600)
        records.seal(peer_record(ALICE), Signer(session, lent), expiration=EXPIRES)


def test_unknown_additive_fields_pass_and_other_majors_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    record = peer_record(ALICE)
    fields = [getattr(record, name) for name in PeerRecord.__struct_fields__]
    newer = sign_raw(ALICE, record, msgspec.msgpack.encode(("peer", *fields, "a field of tomorrow", 7)))
    assert opened(record, newer) == record
    check = rules()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not check.check(*packed(record, sign_raw(ALICE, record, b"", major=2)), EXPIRES)
    assert len(caplog.records) == 1
    assert "major version 2" in caplog.text


@given(st.binary(max_size=400), st.sampled_from([peer_record(ALICE), run_record(OWNER, ALICE.peer_id)]))
def test_any_bytes_are_refused_cleanly(raw: bytes, at: Any) -> None:
    for value in (raw, sign_raw(ALICE, at, raw)):
        with pytest.raises(RecordError):
            opened(at, value)
    rules().check(raw[:20], raw[20:60], raw[60:], EXPIRES)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_one_flipped_bit_is_refused(at: int, bit: int) -> None:
    record = run_record(OWNER, ALICE.peer_id, reason="waiting for peers", loss=1.25)
    value = bytearray(records.seal(record, session_signer(OWNER, record.run, NOW + 3600), expiration=EXPIRES))
    value[at % len(value)] ^= 1 << bit
    with pytest.raises(RecordError):
        opened(record, bytes(value))


def test_deep_nesting_is_refused() -> None:
    record = peer_record(ALICE)
    with pytest.raises(RecordError):
        opened(record, sign_raw(ALICE, record, b"\x91" * 1900))


# --- the same through hivemind's store


class FixedClock(SwarmClock):
    def now(self) -> float:
        return NOW


def rules() -> RecordRules:
    return RecordRules(FixedClock())


def packed(record: Any, value: bytes) -> tuple[bytes, bytes, bytes]:
    key, subkey = records.place(record)
    return records.key_id(key), msgspec.msgpack.encode(subkey), msgspec.msgpack.encode(value)


def test_the_key_hash_is_hiveminds() -> None:
    assert node_parts().DHTID.generate("fence/0/1").to_bytes() == records.key_id("fence/0/1")


def test_a_validated_record_is_checked_again_for_expiry() -> None:
    clock = SwarmClock()
    check = RecordRules(clock)
    clock.offset_s = NOW - (SwarmClock().now())  # swarm time is NOW, and moves on
    record = peer_record(ALICE)
    expiration = NOW + TTL_S
    value = records.seal(record, Signer(ALICE), expiration=expiration)
    assert check.check(*packed(record, value), expiration)
    assert check.check(*packed(record, value), expiration)
    clock.offset_s += TTL_S + 5
    assert not check.check(*packed(record, value), expiration)


def test_events_that_steer_terminals_are_data_only() -> None:
    run = run_record(OWNER, ALICE.peer_id)
    event = records.Event(NOW, "\x1b[2J\u202eevil<script>")
    part = RunEvents(run=run.run, owner=run.owner, part=0, events=(event,))
    assert opened(part, records.seal(part, Signer(OWNER), expiration=EXPIRES)) == part

"""A volunteer's policy, leases and fences; signatures that they rest on."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics
from fusion_p2p.settings import OptimizerSpec
from peer import policy, signing
from peer.errors import RefusedError, SignatureError
from peer.policy import Fences, Leases, Policy
from peer.protocol import (
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_STAGES,
    Assignment,
    BlobRef,
    Connect,
    Endpoint,
    RunSpec,
    SessionCert,
    Signed,
    bounded,
)

OWNER = signing.new_session_key()
SPEC, SIGNED_SPEC = signing.make_run_spec(
    OWNER, name="books", opdag_hash="ab" * 32, seed=7, optimizer=OptimizerSpec(kind="sgd", lr=0.1), created=100.0
)


def cert(key: object = None, epoch: int = 1, trainer: str = "trainer", expires: float = 1000.0) -> SessionCert:
    key = key or signing.new_session_key()
    return SessionCert(
        run=SPEC.run,
        session_key=signing.public_bytes(key),
        trainer_peer=trainer,
        epoch=epoch,
        expires=expires,  # type: ignore[arg-type]
    )


def assignment(**changes: object) -> Assignment:
    base = Assignment(
        run=SPEC.run, epoch=1, plan=1, stage=2, replica=0, incarnation=0, opdag_hash=SPEC.opdag_hash,
        target_peer="me", device="cpu", expires=1000.0,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


# --- policy


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("09:30-17:00", ["09:30", "16:59"], ["09:29", "17:00", "00:00"]),
        ("", ["00:00", "12:00"], []),
    ],
)
def test_hours(hours: str, inside: list[str], outside: list[str]) -> None:
    def minute(text: str) -> int:
        return 60 * int(text[:2]) + int(text[3:])

    assert all(policy.within_hours(hours, minute(t)) for t in inside)
    assert not any(policy.within_hours(hours, minute(t)) for t in outside)


@pytest.mark.parametrize("text", ["22-7", "24:00-07:00", "22:00", "22:60-07:00", "x"])
def test_bad_hours_are_named(text: str) -> None:
    with pytest.raises(InputError, match="22:00-07:00"):
        policy.check_hours(text)


@pytest.mark.parametrize("text", ["abc", "G" * 64, "ab" * 33, "../x"])
def test_bad_owners_are_named(text: str) -> None:
    with pytest.raises(InputError, match="hex digits"):
        policy.check_owner(text)


@pytest.mark.parametrize(
    ("rules", "minute", "why"),
    [
        (Policy(), 0, ""),
        (Policy(owners=(SPEC.owner.hex(),)), 0, ""),
        (Policy(owners=("00112233", SPEC.owner.hex()[:8])), 0, ""),
        (Policy(owners=("0011223344",)), 0, "named owners"),
        (Policy(paused=True), 0, "paused"),
        (Policy(hours="22:00-07:00"), 720, "22:00-07:00 only"),
    ],
)
def test_whose_runs_and_when(rules: Policy, minute: int, why: str) -> None:
    if not why:
        return policy.check_run(rules, SPEC, minute)
    with pytest.raises(RefusedError, match=why) as caught:
        policy.check_run(rules, SPEC, minute)
    assert caught.value.code == "policy"


def test_offers_that_cannot_be_hosted_are_refused_with_figures() -> None:
    rules = Policy(memory_bytes=1 << 30)
    policy.check_offer(rules, assignment(), devices=("cpu",), stages=0, state_bytes=1 << 20)
    with pytest.raises(RefusedError) as caught:
        policy.check_offer(rules, assignment(), devices=("cpu",), stages=0, state_bytes=1 << 30)
    assert (caught.value.code, caught.value.needed, caught.value.cap) == ("memory", 2 << 30, 1 << 30)
    assert str(caught.value) == "stage 2 needs 2.00 GiB at least, cap 1.00 GiB"
    with pytest.raises(RefusedError, match=r"here are cuda:0"):
        policy.check_offer(rules, assignment(), devices=("cuda:0",), stages=0, state_bytes=1)
    with pytest.raises(RefusedError, match="at most 16"):
        policy.check_offer(rules, assignment(), devices=("cpu",), stages=16, state_bytes=1)


@pytest.mark.parametrize(
    ("numerics", "window", "name"),
    [
        (Numerics(micro_batches=0, micro_batch_size=1, cuts=()), 1, "micro_batches"),
        (Numerics(micro_batches=1, micro_batch_size=1 << 40, cuts=()), 1, "micro_batch_size"),
        (Numerics(micro_batches=1, micro_batch_size=1, cuts=(), threads=-1), 1, "threads"),
        (Numerics(micro_batches=1, micro_batch_size=1, cuts=()), 0, "window"),
        (Numerics(micro_batches=1, micro_batch_size=1, cuts=tuple(range(5000))), 1, "stages"),
    ],
)
def test_unreasonable_numbers_are_refused(numerics: Numerics, window: int, name: str) -> None:
    policy.check_numerics(Numerics(micro_batches=4, micro_batch_size=8, cuts=(1, 2)), 4)
    with pytest.raises(RefusedError, match=name):
        policy.check_numerics(numerics, window)


# --- leases and fences


def test_a_second_trainer_is_refused_by_name_unless_it_takes_over() -> None:
    leases, first, second = Leases(), cert(trainer="A"), cert(trainer="B")
    assert leases.take(first, 0.0) is False
    assert leases.take(first, 5.0) is False  # the same session comes again
    with pytest.raises(RefusedError, match=r"led here by trainer A \(epoch 1, heard 2 s ago\)") as caught:
        leases.take(second, 7.0)
    assert caught.value.code == "lease"
    higher = cert(trainer="B", epoch=2)
    assert leases.take(higher, 8.0) is True
    assert not leases.renew(first, 9.0)
    assert leases.renew(higher, 9.0)
    assert leases.silent_s(SPEC.run, 12.0) == 3.0
    leases.end(SPEC.run)
    assert leases.silent_s(SPEC.run, 12.0) == float("inf")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_fences_let_only_what_is_not_older_pass(seen: list[tuple[int, int]]) -> None:
    fences, highest = Fences(), (0, 0)
    for epoch, incarnation in seen:
        a = assignment(epoch=epoch, incarnation=incarnation)
        if (epoch, incarnation) < highest:
            with pytest.raises(RefusedError):
                fences.check(a)
        else:
            fences.check(a)
            highest = (epoch, incarnation)
        fences = Fences(fences.to_dict())  # as after a restart
    fences.check(assignment(stage=9))


# --- signatures


def test_a_session_is_believed_only_with_the_owners_word(tmp_path: Path) -> None:
    good = cert()
    run, session = signing.check_session(SIGNED_SPEC, signing.sign(good, OWNER), remote_peer="trainer", now=5.0)
    assert (run, session) == (SPEC, good)
    thief = signing.new_session_key()
    bad: list[tuple[Signed, Signed, str, float, str]] = [
        (SIGNED_SPEC, signing.sign(good, thief), "trainer", 5.0, "expected"),
        (SIGNED_SPEC, signing.sign(good, OWNER), "another", 5.0, "names peer"),
        (SIGNED_SPEC, signing.sign(good, OWNER), "trainer", 1000.0, "expired"),
        (SIGNED_SPEC, signing.sign(cert(expires=float("nan")), OWNER), "trainer", 5.0, "expired"),
        (signing.sign(SPEC, thief), signing.sign(good, thief), "trainer", 5.0, "is signed by"),
        (
            signing.sign(msgspec.structs.replace(SPEC, seed=8), OWNER), signing.sign(good, OWNER), "trainer", 5.0,
            "not the hash",
        ),
        (
            SIGNED_SPEC, signing.sign(msgspec.structs.replace(good, run="00" * 16), OWNER), "trainer", 5.0,
            "for run",
        ),
    ]  # fmt: skip
    for spec, certificate, peer, now, why in bad:
        with pytest.raises(SignatureError, match=why):
            signing.check_session(spec, certificate, remote_peer=peer, now=now)


@pytest.mark.parametrize("field", ["run", "epoch", "opdag_hash", "target_peer"])
def test_an_assignment_is_bound(field: str) -> None:
    key = signing.new_session_key()
    session = cert(key)
    signed = signing.sign(assignment(), key)
    assert signing.check_assignment(signed, SPEC, session, target_peer="me", now=5.0) == assignment()
    other = signing.sign(assignment(**{field: 2 if field == "epoch" else "other"}), key)
    with pytest.raises(SignatureError, match=field):
        signing.check_assignment(other, SPEC, session, target_peer="me", now=5.0)
    with pytest.raises(SignatureError, match="expired"):
        signing.check_assignment(signed, SPEC, session, target_peer="me", now=1000.0)


def test_a_body_does_not_pass_for_another_type() -> None:
    signed = signing.sign(cert(), OWNER)
    with pytest.raises(SignatureError, match="does not verify"):
        signing.open_signed(signed, RunSpec, signing.public_bytes(OWNER))


@given(st.binary(max_size=200), st.binary(max_size=40), st.binary(max_size=80))
def test_random_bytes_are_no_signed_body(body: bytes, key: bytes, signature: bytes) -> None:
    with pytest.raises(SignatureError):
        signing.open_signed(Signed(body, key, signature), SessionCert, key)


def test_the_owner_key_is_private_from_birth(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "owner"
    old = os.umask(0)
    try:
        key = signing.load_or_create_key(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert signing.public_bytes(signing.load_or_create_key(path)) == signing.public_bytes(key)
    path.chmod(0o644)
    with pytest.raises(SignatureError, match="chmod 600"):
        signing.load_or_create_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(SignatureError, match="5 bytes"):
        signing.load_or_create_key(path)


@pytest.mark.parametrize("field", ["stage", "replica", "incarnation", "epoch", "plan"])
@pytest.mark.parametrize("value", [-1, 1 << 32, (1 << 64) - 1])
def test_numbers_of_an_assignment_that_fit_no_header_and_no_record(field: str, value: int) -> None:
    with pytest.raises(RefusedError, match=f"{field} = {value} of an assignment is outside"):
        policy.check_offer(Policy(), assignment(**{field: value}), devices=("cpu",), stages=0, state_bytes=1)


def test_only_the_owner_goes_on_with_a_run() -> None:
    assert signing.check_own(SIGNED_SPEC, OWNER) == SPEC
    thief = signing.new_session_key()
    for spec, key in (
        (SIGNED_SPEC, thief),
        (signing.sign(SPEC, thief), thief),
        (msgspec.structs.replace(SIGNED_SPEC, body=SIGNED_SPEC.body + b"\0"), OWNER),
    ):
        with pytest.raises(SignatureError):
            signing.check_own(spec, key)


HASH = "5a" * 32


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (BlobRef("../" + HASH, 1, ()), "no snapshot's hash"),
        (BlobRef(HASH, -1, ()), "of -1 bytes"),
        (BlobRef(HASH, 1, tuple(map(str, range(policy.MAX_HOLDERS + 1)))), "holders, at most"),
        (BlobRef(HASH, 1, ("a",), {"b": ("/ip4/192.0.2.1/tcp/1",)}), "addresses of 'b'"),
    ],
)
def test_a_state_that_nobody_honest_names_is_refused(state: BlobRef, words: str) -> None:
    policy.check_state(BlobRef(HASH, 1, ("a",), {"a": ("/ip4/192.0.2.1/tcp/1",)}))
    with pytest.raises(RefusedError, match=words):
        policy.check_state(state)


def test_what_is_said_of_where_peers_live_is_bounded_when_it_is_read() -> None:
    end = Endpoint(stage=0, peer="p", endpoint="e", incarnation=0)
    many = ("/ip4/192.0.2.1/tcp/1",) * (MAX_ADDRESSES + 1)
    for bad in (many, ("x" * (MAX_ADDRESS + 1),)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(end, addresses=bad)), type=Endpoint)
        fits = msgspec.structs.replace(end, addresses=bounded(bad))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(fits), type=Endpoint) == fits
    told = Connect(run="r", plan=1, stage=0, endpoints=(end,) * (MAX_STAGES + 2))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Connect)

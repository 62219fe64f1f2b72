"""Identity files, peer ids, addresses and the state folder."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht import addresses, home
from dht.errors import InputError
from dht.identity import Identity, load, load_or_create, peer_id_bytes, peer_id_of, peer_id_text, public_key_of, verify

# A fixed seed and what libp2p makes of it: the key file's bytes and the peer id are a wire format.
SEED = bytes(range(32))
FILE = (
    bytes.fromhex("08011240") + SEED + bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")
)
PEER = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def test_the_file_and_the_peer_id_are_libp2ps() -> None:
    identity = Identity.from_seed(SEED)
    assert identity.to_bytes() == FILE
    assert Identity.from_bytes(FILE) == identity
    assert public_key_of(identity.peer_id) == identity.public_key
    assert len(peer_id_bytes(identity.peer_id)) == 38
    assert identity.peer_id == PEER


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_round_trip(key: bytes) -> None:
    text = peer_id_of(key)
    assert public_key_of(text) == key
    assert peer_id_text(peer_id_bytes(text)) == text


@pytest.mark.parametrize("text", ["", "x", "12D3KooW", PEER[:-1], PEER + "1", "0" * 52, "Qm" + "a" * 44, "1" * 5000])
def test_what_is_not_a_peer_id_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="peer id"):
        peer_id_bytes(text)


def test_signatures() -> None:
    identity = Identity.generate()
    signature = identity.sign(b"m")
    assert verify(identity.public_key, signature, b"m")
    assert not verify(identity.public_key, signature, b"n")
    assert not verify(Identity.generate().public_key, signature, b"m")
    assert not verify(identity.public_key, signature[:-1], b"m")
    assert not verify(b"short", signature, b"m")
    assert identity.seed.hex() not in repr(identity)


def test_a_new_file_is_private_from_birth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    real = os.open

    def spying(path: object, flags: int, mode: int = 0o777, **kwargs: object) -> int:
        fd = real(path, flags, mode, **kwargs)  # type: ignore[arg-type]
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    monkeypatch.setattr(os, "open", spying)
    old = os.umask(0)
    try:
        identity = load_or_create(tmp_path / "deep" / "identity")
    finally:
        os.umask(old)
    assert modes == [0o600]
    assert load_or_create(tmp_path / "deep" / "identity") == identity
    assert os.listdir(tmp_path / "deep") == ["identity"]


def test_damaged_or_readable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        load(path)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        load(path)
    path.write_bytes(b"RSA")
    with pytest.raises(InputError, match="not an Ed25519 identity"):
        load_or_create(path)
    assert path.read_bytes() == b"RSA"  # nothing is lost


ADDRESS = f"/ip4/127.0.0.1/tcp/31330/p2p/{Identity.from_seed(SEED).peer_id}"


def test_swarm_addresses() -> None:
    parsed = addresses.parse_swarm_address(ADDRESS)
    assert (parsed.transport, parsed.peer_id) == ("/ip4/127.0.0.1/tcp/31330", Identity.from_seed(SEED).peer_id)
    assert str(parsed) == ADDRESS
    assert addresses.parse_swarm_addresses(f"{ADDRESS}, {ADDRESS}\n") == (ADDRESS, ADDRESS)
    assert addresses.tcp_port(ADDRESS) == 31330
    assert addresses.tcp_port("/ip4/1.2.3.4/udp/5/quic-v1") == 0
    assert addresses.with_tcp_port("/ip4/0.0.0.0/tcp/0", 7) == "/ip4/0.0.0.0/tcp/7"
    assert addresses.from_bytes(addresses.to_bytes("/ip6/::1/tcp/7")) == "/ip6/::1/tcp/7"


@pytest.mark.parametrize(
    "text",
    ["", "foo", "127.0.0.1:80", "/ip4/1.2.3/tcp/1", "/ip4/1.2.3.4/tcp/99999", "/ip4/1.2.3.4/tcp", "/nonsense/1", "/",
     "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/xxx", f"/p2p/{PEER}", "/ip4/1.2.3.4/tcp/1\n/p2p/x", "/" + "a" * 5000,
     "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
)  # fmt: skip
def test_malformed_addresses_get_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        addresses.parse_swarm_address(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert caught.value.exit_code == 2


@given(st.text(max_size=80), st.binary(max_size=80))
def test_any_text_and_bytes_are_parsed_or_refused(text: str, raw: bytes) -> None:
    for parse, value in ((addresses.parse_swarm_address, "/" + text), (addresses.from_bytes, raw)):
        with contextlib.suppress(InputError):
            parse(value)  # type: ignore[operator]


def test_the_last_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FUSION_SWARM", raising=False)
    assert home.last_swarm() == ()
    with pytest.raises(InputError, match="FUSION_SWARM"):
        home.resolve_swarm(None)
    home.remember_swarm((ADDRESS,))
    assert home.resolve_swarm(None) == (ADDRESS,)
    assert stat.S_IMODE(home.home().stat().st_mode) == 0o700
    other = ADDRESS.replace("31330", "31331")
    monkeypatch.setenv("FUSION_SWARM", other)
    assert home.resolve_swarm(None) == (other,)
    assert home.resolve_swarm(ADDRESS) == (ADDRESS,)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "file" / "x"))
    with pytest.raises(InputError, match="FUSION_HOME"):
        home.home()

"""The bytes of a record on the wire, version 1: a change here is a change of protocol (raise `records.MAJOR`)."""

from __future__ import annotations

import pytest

from dht import records
from dht.identity import Identity
from dht.records import Delegation, Event, RunEvents, Signer, Work
from tests.dht_samples import NOW, peer_record, run_record

PEER, OWNER, SESSION = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
RUN = run_record(OWNER, PEER.peer_id, step=5, total=9, loss=1.5)
CASES = {
    "peer": (peer_record(PEER, state="busy", work=(Work(RUN.run, 2),)), Signer(PEER)),
    "run": (RUN, Signer(OWNER)),
    "run by a session key": (RUN, Signer(SESSION, Delegation.sign(OWNER, RUN.run, SESSION.public_key, NOW + 60))),
    "events": (RunEvents(run=RUN.run, owner=RUN.owner, part=0, events=(Event(NOW, "x"),)), Signer(OWNER)),
}
GOLDEN = {
    "peer": (
        "01009aa470656572d934313244334b6f6f574b3939566f56784e4537587a79427758457a573778684b37477076383572"
        "394633563366794b53554b504835a5302e312e309196a3637075a474657374cb42274876e8000000cb4202a05f200000"
        "00cf0000000200000000cf000000010000000090a0a4627573799192d920313931333534623365366130636131616331"
        "323365323738346530643965623502a130cb0000000000000000d466623f82ec441250209d3542c958df2e27b41116e7"
        "1954b26aadf8dde0c3659d3299ba97852b6d3f1e7d7eabd346383b1437b4675910c598b68ba2ae364f00"
    ),
    "run": (
        "0100dc0013a372756ed9203139313335346233653661306361316163313233653237383465306439656235c420813977"
        "0ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394a464656d6fd940616261626162616261626162"
        "616261626162616261626162616261626162616261626162616261626162616261626162616261626162616261626162"
        "6162616207cb3ff8000000000000d934313244334b6f6f574b3939566f56784e4537587a79427758457a573778684b37"
        "477076383572394633563366794b53554b504835a8747261696e696e67a0cb000000000000000000000509cb3ff80000"
        "00000000c0c0cb00000000000000006e617450eca1609de27c00b0e1292945698cee1328093c7fe81064d469e7618220"
        "a7c50fdb501fadedabba646dd6d1462009c2fce5bae76326b58097d4d16608"
    ),
    "run by a session key": (
        "0101ed4928c628d1c2c6eae90338905995612959273a5c63f93636c14614ac8737d1412e84f800000000e797b06560e7"
        "547f74ddb062199cd0a422ac84327b9168e5c652d4f6b988933c40f13dd64774ffb6e7d193479fa135bb8eb941d9e7a8"
        "3e55fbc2eeeb7667a108dc0013a372756ed9203139313335346233653661306361316163313233653237383465306439"
        "656235c4208139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394a464656d6fd94061626162"
        "616261626162616261626162616261626162616261626162616261626162616261626162616261626162616261626162"
        "61626162616261626162616207cb3ff8000000000000d934313244334b6f6f574b3939566f56784e4537587a79427758"
        "457a573778684b37477076383572394633563366794b53554b504835a8747261696e696e67a0cb000000000000000000"
        "000509cb3ff8000000000000c0c0cb0000000000000000d743be076db5958dfc3391ae0852d040ad4c3f229289227858"
        "13946c03782c9a0f8dfda291f96e4f4b163b93906e5fdfbfcdeb8ccc04914ea3d7043d835ba807"
    ),
    "events": (
        "010095aa72756e2d6576656e7473d9203139313335346233653661306361316163313233653237383465306439656235"
        "c4208139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394009192cb412e848000000000a178"
        "98c85e8b98a48acb1d20ad074f6b08bcb51f9839c28c6271b0dac47b934a615e14adad4969bc5635db8690ae8dfa75fb"
        "82a8c862bf8cd9565441bc6f9617190b"
    ),
}
PLACES = {
    "peer": ("fence/0/1", "0024080112208a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"),
    "run": (
        "runs/1",
        "8139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394191354b3e6a0ca1ac123e2784e0d9eb5",
    ),
    "run by a session key": (
        "runs/1",
        "8139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394191354b3e6a0ca1ac123e2784e0d9eb5",
    ),
    "events": (
        "run/191354b3e6a0ca1ac123e2784e0d9eb5",
        "8139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394191354b3e6a0ca1ac123e2784e0d9eb56530",
    ),
}
RUN_ID = "191354b3e6a0ca1ac123e2784e0d9eb5"


@pytest.mark.parametrize("name", CASES)
def test_sealed_bytes(name: str) -> None:
    record, signer = CASES[name]
    value = records.seal(record, signer, expiration=NOW + 45)
    assert value.hex() == GOLDEN[name]
    key, subkey = records.place(record)
    assert records.unseal(records.key_id(key), subkey, bytes.fromhex(GOLDEN[name]), NOW + 45, now=NOW) == record


def test_places() -> None:
    assert {name: (records.place(r)[0], records.place(r)[1].hex()) for name, (r, _) in CASES.items()} == PLACES


def test_the_run_id() -> None:
    assert RUN.run == RUN_ID

"""Receipts: what a peer has accepted from its neighbours in a run, signed by the receiver, and what they add up to.

A peer's own word about its work counts for nothing. A receipt counts if its issuer hosts a stage of the same plan that
exchanges tensors with the subject's, is not the subject, not the run's trainer, and shares no address with either.
A run's owner who also controls several hosts at several addresses can still write what it likes: the leaderboard says
what strangers vouch for, no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_CREDITS = 24

PeerText = Annotated[str, Meta(min_length=46, max_length=64)]
Stage = Annotated[int, Meta(ge=0, le=1 << 20)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Accepted from `peer` as host of `stage` since the issuer took its own stage. `flops`: of the micro-batches that
    these frames finished, by the issuer's copy of the OP-DAG; 0 unknown."""

    peer: PeerText
    stage: Stage
    frames: Count
    bytes_accepted: Annotated[int, Meta(ge=0, le=1 << 60)]
    flops: Annotated[float, Meta(ge=0, le=1e30)] = 0.0


class Receipt(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="receipt"):
    """Signed by `peer`, who received."""

    peer: PeerText
    run: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    credits: Annotated[tuple[Credit, ...], Meta(max_length=MAX_CREDITS)]
    published: Annotated[float, Meta(ge=0, le=1e11)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHosts:
    """A run as receipts are judged by: its trainer, who hosts which stages, which stages exchange tensors.

    `hosts_of`: peer -> IP addresses it publishes; a peer without any shares them with nobody.
    """

    run: str
    trainer: str
    stages: Mapping[str, frozenset[int]]
    edges: frozenset[tuple[int, int]]
    hosts_of: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Counted:
    """One credit that counts."""

    run: str
    issuer: str
    peer: str
    stage: int
    frames: int
    bytes_accepted: int
    flops: float


def receipts_key(run: str) -> str:
    """The key that holds a run's receipts."""
    return f"receipts/{run}"


def counted(receipts: Iterable[Receipt], hosts: RunHosts) -> tuple[list[Counted], list[str]]:
    """(credits that count, why others do not)."""
    good, refused = [], []
    for receipt in receipts:
        for credit in receipt.credits:
            why = _flaw(receipt, credit, hosts)
            if why:
                refused.append(why)
                continue
            good.append(
                Counted(
                    receipt.run,
                    receipt.peer,
                    credit.peer,
                    credit.stage,
                    credit.frames,
                    credit.bytes_accepted,
                    credit.flops,
                )
            )
    return good, refused


def _flaw(receipt: Receipt, credit: Credit, hosts: RunHosts) -> str:
    if receipt.run != hosts.run:
        return "of another run"
    if receipt.peer == credit.peer:
        return "a peer vouches for itself"
    if receipt.peer == hosts.trainer:
        return "the run's own trainer vouches"
    if credit.stage not in hosts.stages.get(credit.peer, frozenset()):
        return "the subject does not host that stage"
    own = hosts.stages.get(receipt.peer, frozenset())
    if not any((s, credit.stage) in hosts.edges or (credit.stage, s) in hosts.edges for s in own):
        return "the issuer is no neighbour of that stage"
    issuer = hosts.hosts_of.get(receipt.peer, frozenset())
    if issuer & hosts.hosts_of.get(credit.peer, frozenset()):
        return "issuer and subject share an address"
    if issuer & hosts.hosts_of.get(hosts.trainer, frozenset()):
        return "issuer and trainer share an address"
    return ""

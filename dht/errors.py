"""Typed errors of the bulletin board's room. Each is one line that carries the offending value and names the fix."""

from __future__ import annotations


class DhtError(Exception):
    """Base of every error of this room that a user may see; `exit_code` is the process's."""

    exit_code = 1


class InputError(DhtError):
    """Bad input: an address, an identity file, a port. Exit code 2."""

    exit_code = 2


class SwarmUnreachable(DhtError):
    """No address of the swarm answered; names each address and why. Exit code 3."""

    exit_code = 3


class TransportError(DhtError):
    """A stream, a connection or p2pd itself failed; names the peer and the protocol."""


class P2pdGone(TransportError):
    """p2pd does not take connections now; it is being restarted, or its owner has ended."""


class PeerUnreachable(TransportError):
    """The peer cannot be dialled: unknown addresses, refused, or no answer before the deadline."""


class NoSuchProtocol(TransportError):
    """The peer is there but serves no such protocol (any more)."""


class RecordError(DhtError):
    """A record is refused: forged, mistyped, too large, too far in the future, or not a finite number."""

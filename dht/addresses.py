"""Multiaddr strings, parsed and checked: addresses cross every border of this project as text."""

from __future__ import annotations

from dataclasses import dataclass

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dht.errors import InputError
from dht.identity import peer_id_bytes

MAX_ADDRESS_CHARS = 256
CIRCUIT = "/p2p-circuit"
_EXAMPLE = "/ip4/203.0.113.5/tcp/31330/p2p/12D3KooW..."


@dataclass(frozen=True, slots=True)
class SwarmAddress:
    """Where a peer listens (`transport`, a multiaddr without the peer) and which peer must answer there."""

    transport: str
    peer_id: str

    def __str__(self) -> str:
        return f"{self.transport}/p2p/{self.peer_id}"


def check_address(text: str) -> str:
    """The normal form of a multiaddr; InputError in one line if malformed."""
    return str(_parse(text))


def check_swarm_address(text: str) -> str:
    """The normal form of a multiaddr that ends in /p2p/PEER; InputError in one line otherwise."""
    return str(parse_swarm_address(text))


def parse_swarm_address(text: str) -> SwarmAddress:
    """Splits /ip4/.../tcp/.../p2p/PEER; InputError names what is wrong with `text`."""
    normal = str(_parse(text))
    transport, found, peer_id = normal.rpartition("/p2p/")
    if not found or not transport or "/" in peer_id:
        raise InputError(f"{text!r} names no peer at its end; a swarm address looks like {_EXAMPLE}")
    peer_id_bytes(peer_id)
    return SwarmAddress(transport, peer_id)


def parse_swarm_addresses(text: str) -> tuple[str, ...]:
    """One or several swarm addresses, separated by commas or white space."""
    addresses = tuple(check_swarm_address(part) for part in text.replace(",", " ").split())
    if not addresses:
        raise InputError(f"no swarm address given; one looks like {_EXAMPLE}")
    return addresses


def tcp_port(text: str) -> int:
    """The TCP port of a multiaddr, 0 if it has none."""
    parts = check_address(text).split("/")
    return int(parts[parts.index("tcp") + 1]) if "tcp" in parts else 0


def ip_of(text: str) -> str:
    """The IP address of a multiaddr, "" if it begins with none."""
    parts = check_address(text).split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""


def with_tcp_port(text: str, port: int) -> str:
    """The same multiaddr with another TCP port."""
    parts = check_address(text).split("/")
    if "tcp" in parts:
        parts[parts.index("tcp") + 1] = str(port)
    return "/".join(parts)


def is_relayed(text: str) -> bool:
    """Whether an address leads by way of another peer."""
    return CIRCUIT in text


def to_bytes(text: str) -> bytes:
    """The binary form, for p2pd's control protocol."""
    return bytes(_parse(text).to_bytes())


def from_bytes(raw: bytes) -> str:
    """The text of a binary multiaddr that p2pd reports; InputError if malformed."""
    try:
        return str(Multiaddr(raw))
    except (MultiaddrError, ValueError, LookupError) as error:
        raise InputError(f"{raw[:40].hex()} is not a multiaddr") from error


def _parse(text: str) -> Multiaddr:
    if len(text) > MAX_ADDRESS_CHARS:
        raise InputError(f"the address {text[:60]!r}... is longer than {MAX_ADDRESS_CHARS} characters")
    if not text.startswith("/"):
        raise InputError(f"{text!r} is not a multiaddr; one looks like {_EXAMPLE}")
    try:
        return Multiaddr(text)
    except (MultiaddrError, ValueError, LookupError) as error:
        reason = str(error).partition(": ")[2].removesuffix(f" (string: {text})") or type(error).__name__
        reason = " ".join(reason.split())
        raise InputError(f"{text!r} is not a multiaddr ({reason}); one looks like {_EXAMPLE}") from error

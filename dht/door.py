"""Who is let in: members of this swarm, nobody who is banned, no one peer or address range beyond its share.

libp2p itself lets anybody connect (this p2pd takes no pre-shared key), so the door of a swarm with a key or a name
stands at every stream and at every call of the board: the opener proves that it knows both by a token bound to both
peer ids, which libp2p has authenticated, and to the purpose. A token is worth nothing to whoever receives it: turned
round it names another sender.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections import Counter
from pathlib import Path

from dht.errors import InputError
from dht.home import home
from dht.identity import peer_id_bytes

TOKEN_BYTES = 32
KEY_BYTES = 32
MAX_STREAMS_PER_PEER = 512
MAX_STREAMS_PER_RANGE = 1024  # a /24 of IPv4, a /48 of IPv6
MAX_STREAMS = 4096
OPEN_PER_S, OPEN_BURST = 64.0, 512.0  # streams a peer may open
_REMEMBERED = 4096


def parse_swarm_key(text: str) -> bytes:
    """64 hex digits, or a file that holds them and that nobody else may read. InputError otherwise."""
    found = text.strip()
    if "/" in found or found.startswith("~"):
        path = Path(found).expanduser()
        try:
            if path.stat().st_mode & 0o077:
                raise InputError(f"{path} may be read by others; run: chmod 600 {path}")
            found = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the swarm key {path} cannot be read: {error}; give a file of 64 hex digits") from error
    try:
        key = bytes.fromhex(found)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InputError("a swarm key is 64 hex digits or a file with them; make one with: openssl rand -hex 32")
    return key


def check_swarm_name(text: str) -> str:
    """1 to 32 of a-z, 0-9 and hyphens, as it stands in invitations. InputError otherwise."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", text):
        raise InputError(f"{text!r} is no name of a swarm: 1 to 32 of a-z, 0-9 and hyphens, such as home-lab")
    return text


def swarm_secret(name: str, key: bytes | None) -> bytes | None:
    """What a peer must know at the door: both the swarm's name and its key, where it has them. None: nothing.

    A name keeps swarms apart and is no secret; only a key makes one private.
    """
    if not name:
        return key
    return hashlib.blake2b(b"fusion-p2p/swarm/1\0" + name.encode(), digest_size=KEY_BYTES, key=key or b"").digest()


def env_swarm_secret() -> bytes | None:
    """Of $FUSION_SWARM_NAME and $FUSION_SWARM_KEY; None: the public swarm without a name."""
    name, text = (os.environ.get(v, "") for v in ("FUSION_SWARM_NAME", "FUSION_SWARM_KEY"))
    return swarm_secret(check_swarm_name(name) if name else "", parse_swarm_key(text) if text else None)


def read_bans() -> frozenset[str]:
    """$FUSION_HOME/banned: a peer id or an address range a line, # begins a comment. InputError names a bad line."""
    try:
        text = (home() / "banned").read_text("utf-8")
    except FileNotFoundError:
        return frozenset()
    return frozenset(check_ban(word) for line in text.splitlines() if (word := line.partition("#")[0].strip()))


def check_ban(text: str) -> str:
    """A peer id, an IP address or a range such as 203.0.113.0/24, in its normal form."""
    if text.startswith("12D3"):
        peer_id_bytes(text)
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise InputError(
            f"{text!r} is no peer id and no address range such as 203.0.113.0/24; correct it in banned"
        ) from None


def range_of(ip: str) -> str:
    """The /24 or /48 that an address counts towards; "" for none."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return ""
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


class Door:
    """`key`: the swarm's secret, None if it has none. Counting is per process; the caller's clock is passed in."""

    def __init__(self, own_peer: str, *, key: bytes | None = None, banned: frozenset[str] = frozenset()) -> None:
        self.own, self.key = own_peer, key
        self._banned_peers = {b for b in banned if b.startswith("12D3")}
        self._banned_ranges = [ipaddress.ip_network(b) for b in banned if not b.startswith("12D3")]
        self._per_peer: Counter[str] = Counter()
        self._per_range: Counter[str] = Counter()
        self._tokens: dict[str, tuple[float, float]] = {}

    # --- swarms with a secret

    def token(self, to: str, purpose: str) -> bytes:
        """What this peer shows to `to`; empty where the swarm has no secret."""
        return b"" if self.key is None else _token(self.key, self.own, to, purpose)

    def proves(self, remote: str, purpose: str, token: bytes) -> bool:
        """Whether `remote` showed that it knows the secret."""
        return self.key is None or hmac.compare_digest(_token(self.key, remote, self.own, purpose), token)

    # --- bans and shares

    def banned(self, peer: str, ip: str = "") -> bool:
        if peer in self._banned_peers:
            return True
        if not ip or not self._banned_ranges:
            return False
        address = ipaddress.ip_address(ip)
        return any(address in r for r in self._banned_ranges if r.version == address.version)

    def enter(self, peer: str, ip: str, now: float) -> str:
        """ "" if `peer` at `ip` ("" unknown) may have one more stream, which it then has; else why not."""
        if self.banned(peer, ip):
            return "it is banned here"
        if self._per_peer[peer] >= MAX_STREAMS_PER_PEER:
            return f"it has {MAX_STREAMS_PER_PEER} streams open"
        if ip and self._per_range[range_of(ip)] >= MAX_STREAMS_PER_RANGE:
            return f"{range_of(ip)} has {MAX_STREAMS_PER_RANGE} streams open"
        if self._per_peer.total() >= MAX_STREAMS:
            return f"{MAX_STREAMS} streams are open here"
        left, at = self._tokens.pop(peer, (OPEN_BURST, now))
        left = min(OPEN_BURST, left + (now - at) * OPEN_PER_S)
        self._tokens[peer] = (max(0.0, left - 1), now)
        if len(self._tokens) > _REMEMBERED:
            del self._tokens[next(iter(self._tokens))]
        if left < 1:
            return f"it opens more than {OPEN_PER_S:g} streams a second"
        self._per_peer[peer] += 1
        if ip:
            self._per_range[range_of(ip)] += 1
        return ""

    def leave(self, peer: str, ip: str) -> None:
        """A stream that entered has ended; `ip` as it was then."""
        for counter, name in ((self._per_peer, peer), (self._per_range, range_of(ip) if ip else "")):
            if name:
                counter[name] -= 1
                if counter[name] <= 0:
                    del counter[name]


def _token(key: bytes, sender: str, receiver: str, purpose: str) -> bytes:
    message = b"fusion-p2p/door/1\0" + peer_id_bytes(sender) + peer_id_bytes(receiver) + purpose.encode()
    return hashlib.blake2b(message, digest_size=TOKEN_BYTES, key=key).digest()

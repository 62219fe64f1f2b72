"""The state folder of this user: identities, and the swarm joined last."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dht.addresses import check_swarm_address, parse_swarm_addresses
from dht.errors import InputError


def home() -> Path:
    """$FUSION_HOME, else ~/.local/share/fusion-p2p; made (mode 0700) if it is not there."""
    text = os.environ.get("FUSION_HOME", "")
    path = Path(text).expanduser() if text else Path.home() / ".local" / "share" / "fusion-p2p"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"the state folder {path} cannot be made ({error.strerror}); set FUSION_HOME") from error
    return path


def last_swarm() -> tuple[str, ...]:
    """Addresses of the swarm joined last, () if none was. InputError if the file is damaged."""
    path = home() / "swarm"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return ()
    return tuple(check_swarm_address(line) for line in text.split())


def remember_swarm(addresses: tuple[str, ...]) -> None:
    """Write `addresses` as the swarm joined last, atomically."""
    text = "".join(f"{check_swarm_address(a)}\n" for a in addresses)
    draft = home() / f".swarm.{secrets.token_hex(8)}"
    draft.write_text(text, "utf-8")
    draft.replace(home() / "swarm")


def resolve_swarm(text: str | None) -> tuple[str, ...]:
    """The swarm to use: `text` if given, else $FUSION_SWARM, else the one joined last. InputError if there is none."""
    text = text or os.environ.get("FUSION_SWARM", "")
    found = parse_swarm_addresses(text) if text else last_swarm()
    if not found:
        raise InputError("no swarm is known here; pass --swarm /ip4/.../tcp/.../p2p/12D3KooW... or set FUSION_SWARM")
    return found

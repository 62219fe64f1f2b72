"""`Transport` over p2pd: authenticated byte streams between peers, by protocol name.

`start` is for the process that owns p2pd; `attach` for another process of the same user on the same host (an
executor), which opens and serves streams through the owner's p2pd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from dht import addresses
from dht.control import ANSWER_S, ControlClient, socket_path
from dht.door import KEY_BYTES, Door, env_swarm_secret, read_bans
from dht.errors import InputError
from dht.identity import load_or_create
from dht.p2p_transport import P2PTransport
from dht.p2pd import P2pdConfig, SocketFolder
from dht.pacing import Pacer

__all__ = ["ANY_ADDRESS", "LOOPBACK", "P2PTransport", "attach", "start"]

ANY_ADDRESS = ("/ip4/0.0.0.0/tcp/0",)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def start(
    identity_path: Path,
    *,
    host_addresses: tuple[str, ...] = ANY_ADDRESS,
    bootstrap: tuple[str, ...] = (),
    announce_addresses: tuple[str, ...] = (),
    client_only: bool = False,
    secret: bytes | None = None,
    download_bytes_per_s: tuple[float, float] | None = None,
    join: bool = True,
    timeout_s: float = 15.0,
) -> P2PTransport:
    """Starts p2pd with the identity at `identity_path` (made if missing) and connects to `bootstrap`.

    `host_addresses`: where to listen; port 0 takes a free one, kept over restarts; () does not listen.
    `client_only`: take no part in libp2p's routing (observers). `secret`: what this swarm asks for at its door
    (default: of $FUSION_SWARM_NAME and $FUSION_SWARM_KEY, else nothing). `download_bytes_per_s`: caps of this process,
    and of each that attaches. `join` False: the caller connects, with `join()`. Raises InputError (address, identity or
    port in use), SwarmUnreachable (all of `bootstrap` dead), TransportError.
    """
    bootstrap = tuple(addresses.check_swarm_address(a) for a in bootstrap)
    host_addresses = tuple(addresses.check_address(a) for a in host_addresses)
    identity = load_or_create(identity_path)
    door = Door(identity.peer_id, key=secret or env_swarm_secret(), banned=read_bans())
    _check_ports_free(host_addresses)
    lock = _lock_identity(identity_path)
    try:
        folder = SocketFolder.create()
    except BaseException:
        os.close(lock)
        raise
    pacer = None
    if door.key is not None:
        folder.leave("key", door.key)
    if download_bytes_per_s is not None:
        pacer = Pacer(download_bytes_per_s[0])
        folder.leave("download", repr(download_bytes_per_s[1]).encode())
    transport = P2PTransport(
        ControlClient(folder.control),
        identity.peer_id,
        identity=identity,
        bootstrap=bootstrap,
        door=door,
        pacer=pacer,
        folder=folder,
        identity_lock=lock,
    )
    config = P2pdConfig(
        identity_path=identity_path,
        host_addresses=host_addresses,
        announce_addresses=tuple(addresses.check_address(a) for a in announce_addresses),
        dht_server=not client_only,
        nat=any("/127." not in a and "/::1" not in a for a in host_addresses),
        relays=bootstrap,
    )
    try:
        await transport.begin(config, join=join, timeout_s=timeout_s)
    except BaseException:
        await transport.close()
        raise
    return transport


async def attach(control_address: str, *, timeout_s: float = ANSWER_S) -> P2PTransport:
    """A transport over the p2pd that another process of this host owns. Raises InputError, TransportError."""
    client = ControlClient(socket_path(control_address))
    peer_id, _ = await client.identify(timeout_s=timeout_s)
    pacer = None
    with contextlib.suppress(FileNotFoundError):
        pacer = Pacer(float(client.path.with_name("download").read_bytes()))
    door = Door(peer_id, key=_key_beside(client), banned=read_bans())
    transport = P2PTransport(client, peer_id, door=door, pacer=pacer)
    transport.watch()
    return transport


def _key_beside(client: ControlClient) -> bytes | None:
    """The swarm's secret, which the owner of p2pd left in its private folder."""
    try:
        key = client.path.with_name("key").read_bytes()
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _lock_identity(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise InputError(
            f"the identity {path} is in use by another running peer; give this one its own with FUSION_HOME=DIR"
        ) from error
    return fd


def _check_ports_free(host_addresses: tuple[str, ...]) -> None:
    """p2pd listens with SO_REUSEPORT and would silently share a port with another p2pd of the same user."""
    for text in host_addresses:
        parts = text.split("/")
        port = addresses.tcp_port(text)
        if not port or parts[1] not in ("ip4", "ip6"):
            continue
        family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((parts[2], port))
                probe.listen(1)
            except OSError as error:
                raise InputError(
                    f"cannot listen at {text}: {error.strerror}; choose another port, or 0 for any free one"
                ) from error

"""`fusion-monitor web`, put together: board, history, server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import sys
from pathlib import Path

from dht.addresses import parse_swarm_address
from dht.home import home
from dht.monitor_observer import Observer, reading_board
from dht.web.history import History
from dht.web.server import Hub, is_loopback, listen, serve


def history_path(text: str | None, swarm: tuple[str, ...]) -> Path | None:
    """The file of --history; one per set of bootstrap peers by default, None for "none"."""
    if text == "none":
        return None
    if text:
        return Path(text).expanduser()
    peers = sorted(parse_swarm_address(a).peer_id for a in swarm)
    return home() / f"history-{hashlib.blake2b(' '.join(peers).encode(), digest_size=4).hexdigest()}.sqlite"


async def serve_swarm(
    swarm: tuple[str, ...],
    *,
    every_s: float,
    host: str,
    port: int,
    history: str | None,
    max_age_s: float,
    max_bytes: int,
) -> int:
    """Until stopped. SwarmUnreachable, InputError."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    me = asyncio.current_task()
    if me is not None:  # until the server listens to signals itself
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    sock = listen(host, port)
    try:
        kept = History(history_path(history, swarm), max_age_s=max_age_s, max_bytes=max_bytes)
        try:
            async with reading_board(swarm) as board:
                bound = sock.getsockname()
                name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
                if not is_loopback(host):
                    print(
                        f"fusion-monitor: warning: {host} is not this machine alone: whoever reaches port {bound[1]} "
                        "sees the swarm; there is no password",
                        file=sys.stderr,
                    )
                print(f"fusion-monitor: http://{name}:{bound[1]}/", flush=True)
                hosts = ("localhost", "127.0.0.1", "[::1]", host) if is_loopback(host) else ("*",)
                await serve(Hub(Observer(board, every_s), board, kept), sock, hosts)
        finally:
            kept.close()
    finally:
        sock.close()
    return 0

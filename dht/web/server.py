"""`fusion-monitor web`: one page, a JSON API, server-sent events, /metrics. Starlette on uvicorn, read only.

Nothing here is believed or executed by the page: it gets JSON, and shows text as text. No address leaves the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dht.errors import DhtError, InputError
from dht.fence_records import LinksRecord
from dht.identity import peer_id_of
from dht.monitor_observer import Observer
from dht.monitor_views import EventInfo, PeerInfo, Picture
from dht.records import NO_FENCE
from dht.web.api import Delta, MeasuredLink, PeerPage, Problem, openapi
from dht.web.history import History
from dht.web.metrics import prometheus

log = logging.getLogger("dht.web")

STATIC = Path(__file__).parent / "static"
MAX_STREAMS = 64
PING_S = 15.0
LINKS_S = 20.0  # for the board to say what a peer measured
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class LinksReader(Protocol):
    """What a peer's page needs of a `Board`."""

    async def links(self, *, fence: str | None, timeout_s: float) -> tuple[LinksRecord, ...]: ...


@dataclass(slots=True)
class Hub:
    """The latest picture and those who wait for the next."""

    observer: Observer
    board: LinksReader
    history: History
    picture: Picture = field(default_factory=lambda: Picture(time=0.0, peers=(), fences=(), runs=()))
    events: list[EventInfo] = field(default_factory=list)
    number: int = 0
    streams: int = 0
    _at: float = 0.0
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self) -> None:
        """Looks and keeps for ever."""
        async for sight in self.observer.pictures():
            try:
                await asyncio.to_thread(self.history.keep, sight)
            except Exception:  # a full disk stops the history, not the page
                log.exception("the history was not written")
            async with self._news:
                self.picture, self.events = sight.picture, sight.events
                self.number += 1
                self._at = time.monotonic()
                self._news.notify_all()

    async def after(self, number: int, timeout_s: float) -> bool:
        """Whether a picture later than `number` is there within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: self.number > number)
        return self.number > number

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at if self.number else 0.0


def delta(before: Picture | None, after: Picture, events: list[EventInfo]) -> Delta:
    """What a page that shows `before` needs to show `after`."""
    old = {} if before is None else {p.peer: p for p in before.peers}
    changed, seen = [], {}
    for p in after.peers:
        was = old.pop(p.peer, None)
        if was is None or msgspec.structs.replace(was, published=p.published) != p:
            changed.append(p)
        elif was.published != p.published:
            seen[p.peer] = round(p.published, 1)
    return Delta(
        time=after.time, runs=after.runs, fences=after.fences, peers=changed, full=before is None, gone=list(old),
        seen=seen, events=events, refused=after.refused, error=after.error,
    )  # fmt: skip


# --- answers


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _number(request: Request, name: str, default: float | None = None) -> float:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e12:
        raise InputError(f"{name}={(text or '')[:40]!r} is not a time or number between 0 and 1e12")
    return value


class Pages:
    """The handlers; `hub` is all they share."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._openapi = hub, msgspec.json.encode(openapi())

    async def index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def picture(self, _: Request) -> Response:
        await self._hub.after(0, 10.0)
        return _json(self._hub.picture)

    async def api(self, _: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(prometheus(self._hub.picture, self._hub.age_s), media_type="text/plain; version=0.0.4")

    async def span(self, _: Request) -> Response:
        return _json(await asyncio.to_thread(self._hub.history.span))

    async def at(self, request: Request) -> Response:
        picture = await asyncio.to_thread(self._hub.history.at, _number(request, "t"))
        return _json(Problem("nobody looked then"), 404) if picture is None else _json(picture)

    async def curve(self, request: Request) -> Response:
        now = self._hub.picture.time
        first, last = _number(request, "first", max(0.0, now - 3600)), _number(request, "last", now)
        points = int(min(2000, max(2, _number(request, "points", 800))))
        run = request.path_params["run"][:64]
        return _json(await asyncio.to_thread(self._hub.history.curve, run, first, max(last, first + 1), points))

    async def events(self, request: Request) -> Response:
        run, peer = (request.query_params.get(name, "")[:64] for name in ("run", "peer"))
        before = _number(request, "before", 1e11)
        return _json(await asyncio.to_thread(lambda: self._hub.history.events(run=run, peer=peer, before=before)))

    async def leaderboard(self, _: Request) -> Response:
        return _json(await asyncio.to_thread(self._hub.history.leaderboard))

    async def peer(self, request: Request) -> Response:
        name = request.path_params["peer"]
        known: PeerInfo | None = next((p for p in self._hub.picture.peers if p.peer == name), None)
        if known is None:
            return _json(Problem(f"peer {name[:64]} is not in the picture"), 404)
        events = await asyncio.to_thread(lambda: self._hub.history.events(peer=name))
        board = await asyncio.to_thread(self._hub.history.leaderboard, 10000)
        measured = await self._hub.board.links(fence=known.fence or NO_FENCE, timeout_s=LINKS_S)
        links = [r for r in measured if r.peer == name]
        return _json(
            PeerPage(
                peer=name,
                links=[m for r in links for m in _measured(r)],
                coordinate_error=links[0].error if links and links[0].coordinate else None,
                events=events,
                contribution=next((c for c in board if c.peer == name), None),
            )
        )

    async def stream(self, request: Request) -> Response:
        if self._hub.streams >= MAX_STREAMS:
            return _json(Problem(f"{MAX_STREAMS} pages are connected already"), 503)
        return StreamingResponse(self._deltas(request), media_type="text/event-stream")

    async def _deltas(self, request: Request) -> AsyncIterator[bytes]:
        hub = self._hub
        hub.streams += 1
        try:
            shown, number = None, 0
            while True:
                if not await hub.after(number, PING_S):
                    yield b": still here\n\n"
                    continue
                picture, number = hub.picture, hub.number
                recent = hub.events
                if shown is None:
                    recent = (await asyncio.to_thread(hub.history.events, limit=60))[::-1]
                yield b"data: " + msgspec.json.encode(delta(shown, picture, recent)) + b"\n\n"
                shown = picture
        finally:
            hub.streams -= 1


def _measured(record: LinksRecord) -> list[MeasuredLink]:
    return [
        MeasuredLink(
            peer=peer_id_of(k.peer), rtt_s=k.rtt_us / 1e6 or None, up_bytes_per_s=k.up_kbps * 125.0 or None,
            down_bytes_per_s=k.down_kbps * 125.0 or None, age_s=float(k.age_s) if k.up_kbps or k.down_kbps else None,
            relayed=k.relayed,
        )
        for k in record.links
    ]  # fmt: skip


class SafeHeaders:
    """Every answer carries the security headers. Plain ASGI, so that streams stay streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *((n, v) for n, v in message["headers"] if n.decode() not in HEADERS),
                    *((n.encode(), v.encode()) for n, v in HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)


def make_app(hub: Hub, *, hosts: tuple[str, ...] = ("*",)) -> Starlette:
    """`hosts`: names by which the server may be asked; naming them stops DNS rebinding."""
    pages = Pages(hub)

    async def bad(_: Request, error: Exception) -> Response:
        return _json(Problem(str(error)), 400 if isinstance(error, InputError) else 503)

    def route(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handler, methods=["GET"])

    handlers: dict[Any, Any] = {DhtError: bad}
    return Starlette(
        routes=[
            route("/", pages.index), route("/metrics", pages.metrics), route("/api/openapi.json", pages.api),
            route("/api/picture", pages.picture), route("/api/stream", pages.stream),
            route("/api/history", pages.span), route("/api/history/at", pages.at),
            route("/api/runs/{run}/curve", pages.curve), route("/api/events", pages.events),
            route("/api/peers/{peer}", pages.peer), route("/api/leaderboard", pages.leaderboard),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SafeHeaders), Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers=handlers,
    )  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether `host` reaches this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; InputError names what is wrong. Port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host} port {port} ({error}); pass another --port or --host") from error
    sock.listen(128)
    return sock


async def serve(hub: Hub, sock: socket.socket, hosts: tuple[str, ...]) -> None:
    """Until cancelled or told to stop by SIGINT or SIGTERM; returns either way, so that the board is left in order."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """uvicorn's own would raise the signal again when it is done, and end the process before us."""
            yield

    config = uvicorn.Config(
        make_app(hub, hosts=hosts), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
    )
    looking = asyncio.create_task(hub.serve(), name="observer")
    web = Server(config)
    server = asyncio.create_task(web.serve(sockets=[sock]), name="web")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(web, "should_exit", True))
    try:
        done, _ = await asyncio.wait({looking, server}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (looking, server):
            task.cancel()
        await asyncio.gather(looking, server, return_exceptions=True)

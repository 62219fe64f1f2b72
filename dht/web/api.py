"""The JSON API: what each path answers, and its OpenAPI description, made from the same types."""

from __future__ import annotations

from typing import Any

import msgspec

from dht.monitor_views import EventInfo, Picture, RunInfo
from dht.web.history import Contribution, Curve, Span

VERSION = "1"


class MeasuredLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer measured towards another; null where it did not. `relayed`: through a third peer."""

    peer: str
    rtt_s: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    age_s: float | None
    relayed: bool


class PeerPage(msgspec.Struct, frozen=True, kw_only=True):
    """`coordinate_error`: relative error of its network coordinate; null unknown."""

    peer: str
    links: list[MeasuredLink]
    coordinate_error: float | None
    events: list[EventInfo]
    contribution: Contribution | None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A server-sent event. `full`: it replaces everything; else peers are merged and `gone` ones dropped.

    `seen`: swarm time of records refreshed since, by peer. Everything but peers is always complete.
    """

    time: float
    runs: tuple[RunInfo, ...]
    fences: tuple[Any, ...]
    peers: list[Any]
    full: bool = False
    gone: list[str] = []
    seen: dict[str, float] = {}
    events: list[EventInfo] = []
    refused: int = 0
    error: str | None = None


class Problem(msgspec.Struct, frozen=True):
    error: str


_TIME = {"name": "t", "in": "query", "required": True, "schema": {"type": "number"}, "description": "unix seconds"}
_RUN = {"name": "run", "in": "path", "required": True, "schema": {"type": "string"}, "description": "the run's id"}
_PEER = {"name": "peer", "in": "path", "required": True, "schema": {"type": "string"}, "description": "the peer's id"}


def _query(name: str, what: str, kind: str = "number") -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}, "description": what}


PATHS: dict[str, tuple[str, Any, list[dict[str, Any]]]] = {
    "/api/picture": ("The swarm now.", Picture, []),
    "/api/history": ("When the observer looked, with marks for the scrubber.", Span, []),
    "/api/history/at": ("The swarm at a past time; 404 where nobody looked.", Picture, [_TIME]),
    "/api/runs/{run}/curve": (
        "Loss, step time and speed over time; nulls are gaps.",
        Curve,
        [
            _RUN,
            _query("first", "unix seconds"),
            _query("last", "unix seconds"),
            _query("points", "at most; 2000 is most"),
        ],
    ),
    "/api/events": (
        "The latest events, newest first.",
        list[EventInfo],
        [
            _query("run", "only of this run", "string"),
            _query("peer", "only of this peer", "string"),
            _query("before", "unix seconds"),
        ],
    ),
    "/api/peers/{peer}": ("A peer's measured links, events and contribution.", PeerPage, [_PEER]),
    "/api/leaderboard": ("Who did most, counted by neighbours' receipts.", list[Contribution], []),
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [answer for _, answer, _ in PATHS.values()] + [Delta, Problem]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    problem = {"description": "one line", "content": {"application/json": {"schema": refs[-1]}}}
    paths: dict[str, Any] = {}
    for (path, (summary, _, parameters)), ref in zip(PATHS.items(), refs, strict=False):
        answers: dict[str, Any] = {"200": {"description": "done", "content": {"application/json": {"schema": ref}}}}
        answers |= {"400": problem, "404": problem} if parameters else {}
        paths[path] = {"get": {"summary": summary, "parameters": parameters, "responses": answers}}
    stream = {
        "description": "server-sent events, each a Delta; the first is full",
        "content": {"text/event-stream": {}},
    }
    paths["/api/stream"] = {"get": {"summary": "The swarm, live.", "responses": {"200": stream}}}
    metrics = {"description": "Prometheus text format", "content": {"text/plain": {}}}
    paths["/metrics"] = {"get": {"summary": "Figures for Prometheus.", "responses": {"200": metrics}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fusion-monitor",
            "version": VERSION,
            "description": "A fusion-p2p swarm as its bulletin board shows it. Units stand in the names; null is "
            "unknown. Fields may be added; a change of meaning changes the version.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }

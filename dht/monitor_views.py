"""What the monitor's faces show: plain views of peers, fences and runs, made from records that strangers wrote.

Text loses its control and bidirectional characters, figures beyond reason become unknown, and each such change is a
warning. No view holds an address. The web API's schema is generated from these types.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from dht.fence_records import FenceView
from dht.monitor import clean
from dht.monitor_why import Why, bottleneck
from dht.receipts import RunHosts
from dht.records import NO_FENCE, REFRESH_S, LinkBytes, PeerRecord, RunRecord, Work
from dht.runs import RunView

LATE_S = REFRESH_S + 8.0  # a refresh is missing
SILENT_S = 2 * REFRESH_S + 8.0  # two are: less than a TTL
MAX_FLOPS_PER_S = 1e17
MAX_MEMORY_BYTES = 1 << 44
MAX_LOSS = 1e6
MAX_STEPS = 10**10

PeerState: TypeAlias = Literal["free", "busy", "paused", "late", "silent", "left"]


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A device as its peer says; None: unknown, or too large to be true."""

    kind: str
    name: str
    flops_per_s: float | None
    memory_bytes: int | None
    free_bytes: int | None


class Hosting(msgspec.Struct, frozen=True):
    """`stage` -1: the run's trainer. `confirmed`: the run's owner says so too."""

    run: str
    name: str
    stage: int
    confirmed: bool


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: what it says, or "late" (a refresh is missing), "silent" (two are), "left" (it said so).

    Rates are those of its runs' links, by the run's owner; `compression`, out and in, is uncompressed bytes (an
    estimate) over bytes. `place` is in its owner's words.
    """

    peer: str
    version: str
    state: PeerState
    fence: str | None
    leads: bool
    hours: str | None
    place: str | None = None
    reach: Literal["direct", "relay", "none"] | None
    published: float
    devices: tuple[DeviceInfo, ...]
    hosts: tuple[Hosting, ...]
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    compression_out: float | None = None
    compression_in: float | None = None
    warnings: tuple[str, ...] = ()


class FenceOut(msgspec.Struct, frozen=True):
    fence: str
    bytes_per_s: float | None
    rtt_s: float | None


class FenceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_per_s`, `rtt_s`: medians over the members' measured pairs; `outside`: towards other fences."""

    fence: str
    leader: str
    term: int
    members: int
    bytes_per_s: float | None
    rtt_s: float | None
    pairs: int
    outside: tuple[FenceOut, ...]
    spares: int
    nominees: tuple[str, ...]
    published: float


class StageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the last step; None unknown. `send_s`: its sender was held up by a full link."""

    stage: int
    replica: int
    peer: str
    device: str
    compute_s: float | None = None
    send_s: float | None = None
    wait_s: float | None = None
    waiting_for: str | None = None


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Stage -1 is the trainer. `bytes_per_s` is the mean over a step. `compression` is an estimate by the codec's own
    figures; `why`: the plan's reason for the codec."""

    src: int
    dst: int
    src_peer: str | None
    dst_peer: str | None
    bytes_sent: int | None
    bytes_per_step: int | None
    bytes_per_s: float | None
    codec: str | None
    compression: float | None
    why: str | None = None


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: peer, fence, run, plan, fault, note. `source`: "observer" saw it, "owner": the run's owner says so."""

    time: float
    kind: str
    text: str
    source: Literal["observer", "owner"] = "observer"
    peer: str = ""
    run: str = ""
    fence: str = ""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its owner says; times in unix seconds of the swarm, None: unknown. 'silent': its record ran out."""

    run: str
    name: str
    owner: str
    trainer: str
    state: Literal["waiting", "training", "paused", "done", "failed", "silent"]
    reason: str | None
    since: float | None
    created: float
    published: float
    epoch: int
    plan: int
    step: int
    total: int | None
    loss: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    wanted_peers: int
    wanted_bytes: int | None
    stages: tuple[StageInfo, ...]
    links: tuple[LinkInfo, ...]
    events: tuple[EventInfo, ...]
    why: Why | None
    warnings: tuple[str, ...] = ()


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm at swarm time `time`. `refused`: records refused so far for a broken rule or signature."""

    time: float
    peers: tuple[PeerInfo, ...]
    fences: tuple[FenceInfo, ...]
    runs: tuple[RunInfo, ...]
    refused: int = 0
    error: str | None = None


class _Wary:
    """Cleans the fields of one record and remembers what it had to change."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def text(self, what: str, value: str, most: int = 240) -> str:
        out = clean(value)[:most]
        if out != value[:most]:
            self.warnings.append(f"{what} holds control or direction-changing characters")
        elif "<" in value and ">" in value:
            self.warnings.append(f"{what} holds markup")
        return out

    def figure(self, what: str, value: float | None, most: float) -> float | None:
        if value is None or abs(value) <= most:
            return value
        self.warnings.append(f"{what} is beyond reason and not shown")
        return None

    def count(self, what: str, value: int, most: int) -> int | None:
        return None if self.figure(what, value, most) is None else value


def peer_info(record: PeerRecord, now: float, runs: Mapping[str, RunView], leads: bool) -> PeerInfo:
    """One peer; traffic is filled in by `with_traffic`."""
    wary = _Wary()
    age_s = now - record.published
    state: PeerState = "silent" if age_s > SILENT_S else "late" if age_s > LATE_S else record.state
    devices = tuple(
        DeviceInfo(
            kind=wary.text("a device's kind", d.kind, 24),
            name=wary.text("a device's name", d.name, 64),
            flops_per_s=wary.figure("a device's speed", d.flops_per_s, MAX_FLOPS_PER_S) or None,
            memory_bytes=wary.count("a device's memory", d.memory_bytes, MAX_MEMORY_BYTES) or None,
            free_bytes=wary.count("a device's free memory", d.free_bytes, MAX_MEMORY_BYTES),
        )
        for d in record.devices
    )
    hosts = tuple(
        Hosting(w.run, clean(runs[w.run].run.name) if w.run in runs else "", w.stage, _confirmed(record.peer, w, runs))
        for w in record.work
    )
    return PeerInfo(
        peer=record.peer, version=wary.text("its version", record.version, 64), state=state,
        fence=None if record.fence == NO_FENCE else clean(record.fence), leads=leads,
        hours=wary.text("its hours", record.hours, 32) or None, place=wary.text("its place", record.place, 32) or None,
        reach=record.reach or None,
        published=record.published, devices=devices, hosts=hosts, warnings=tuple(dict.fromkeys(wary.warnings)),
    )  # fmt: skip


def _confirmed(peer: str, work: Work, runs: Mapping[str, RunView]) -> bool:
    view = runs.get(work.run)
    if view is None:
        return False
    if work.stage < 0:
        return view.run.trainer == peer
    return any(s.peer == peer and s.stage == work.stage for s in view.stages)


def fence_info(view: FenceView, now: float) -> FenceInfo:
    """A fence's record made presentable at swarm time `now`; figures that are 0 become unknown."""
    inside = view.summary
    return FenceInfo(
        fence=view.id, leader=view.leader, term=view.term, members=view.members,
        bytes_per_s=inside.kbps * 125.0 or None, rtt_s=inside.rtt_us / 1e6 or None, pairs=inside.pairs,
        outside=tuple(FenceOut(o.fence, o.out.kbps * 125.0 or None, o.out.rtt_us / 1e6 or None) for o in view.outside),
        spares=len(view.spares),
        nominees=tuple(f"..{n.spare[-8:]} for ..{n.dead[-8:]}" for n in view.nominees),
        published=now - view.age_s,
    )  # fmt: skip


def run_info(view: RunView, now: float, devices: Mapping[str, float]) -> RunInfo:
    """One run. `devices`: FLOP/s by peer, for the bottleneck's advice."""
    wary, run = _Wary(), view.run
    figures = {(f.stage, f.replica): f for f in view.figures}
    stages = []
    for s in view.stages:
        f = figures.get((s.stage, s.replica))
        stages.append(
            StageInfo(
                stage=s.stage, replica=s.replica, peer=s.peer, device=wary.text("a device", s.device, 16),
                compute_s=wary.figure("a stage's time", f.compute_s, 1e6) if f else None,
                send_s=wary.figure("a stage's time", f.send_s, 1e6) if f else None,
                wait_s=wary.figure("a stage's time", f.wait_s, 1e6) if f else None,
                waiting_for=(wary.text("a stage's wait", f.waiting_for, 48) or None) if f else None,
            )
        )  # fmt: skip
    step_s = wary.figure("its step time", run.step_time_s, 1e6)
    host = {s.stage: s.peer for s in reversed(view.stages)} | {-1: run.trainer}
    links = tuple(_link_info(k, host, step_s, wary) for k in view.links)
    silent = run.state in ("training", "waiting") and now - run.published > SILENT_S
    return RunInfo(
        run=run.run, name=wary.text("its name", run.name, 64), owner=run.owner.hex()[:16], trainer=run.trainer,
        state="silent" if silent else run.state, reason=wary.text("its reason", run.reason) or None,
        since=run.published if silent else _moment(run.since, now), created=run.created, published=run.published,
        epoch=run.epoch, plan=run.plan, step=wary.count("its step", run.step, MAX_STEPS) or 0,
        total=wary.count("its number of steps", run.total, MAX_STEPS) or None,
        loss=wary.figure("its loss", run.loss, MAX_LOSS), step_time_s=step_s,
        tokens_per_s=wary.figure("its speed", run.tokens_per_s, 1e12),
        wanted_peers=min(run.wanted_peers, 9999),
        wanted_bytes=wary.count("the memory it wants", run.wanted_bytes, MAX_MEMORY_BYTES) or None,
        stages=tuple(stages), links=links, events=_run_events(run, view, now, wary),
        why=bottleneck(stages, links, step_s, devices) if run.state == "training" and not silent else None,
        warnings=tuple(dict.fromkeys(wary.warnings)),
    )  # fmt: skip


def _link_info(k: LinkBytes, host: Mapping[int, str], step_s: float | None, wary: _Wary) -> LinkInfo:
    per_step = wary.count("a link's bytes", k.bytes_per_step, 1 << 44) or None
    dense = wary.count("a link's bytes", k.dense_bytes_per_step, 1 << 44) or None
    return LinkInfo(
        src=k.src, dst=k.dst, src_peer=host.get(k.src), dst_peer=host.get(k.dst),
        bytes_sent=wary.count("a link's bytes", k.bytes_sent, 1 << 56), bytes_per_step=per_step,
        bytes_per_s=per_step / step_s if per_step and step_s else None,
        codec=wary.text("a codec", k.codec, 32) or None,
        compression=round(dense / per_step, 2) if dense and per_step else None,
        why=wary.text("a codec's reason", k.why, 120) or None,
    )  # fmt: skip


def _run_events(run: RunRecord, view: RunView, now: float, wary: _Wary) -> tuple[EventInfo, ...]:
    out = []
    for e in view.events:
        kind = "fault" if "lost" in e.text or "died" in e.text else "plan" if "plan" in e.text else "note"
        text = wary.text("an event", e.text)
        out.append(EventInfo(time=min(e.time, now), kind=kind, text=text, source="owner", run=run.run))
    return tuple(out)


def _moment(since: float, now: float) -> float | None:
    return since if 0 < since <= now + 60 else None


def with_traffic(peers: Iterable[PeerInfo], runs: Iterable[RunInfo]) -> tuple[PeerInfo, ...]:
    """`peers` with the traffic that their runs' links say they have."""
    rates: dict[str, list[float]] = {}  # peer -> [up, down, up uncompressed, down uncompressed]
    for run in runs:
        for link in run.links if run.state == "training" else ():
            for peer, at in ((link.src_peer, 0), (link.dst_peer, 1)):
                if peer is not None and link.bytes_per_s is not None:
                    sums = rates.setdefault(peer, [0.0] * 4)
                    sums[at] += link.bytes_per_s
                    sums[2 + at] += link.bytes_per_s * (link.compression or float("nan"))
    out = []
    for p in peers:
        if p.peer in rates:
            up, down, dense_up, dense_down = rates[p.peer]
            p = msgspec.structs.replace(
                p, up_bytes_per_s=up, down_bytes_per_s=down, compression_out=_ratio(dense_up, up),
                compression_in=_ratio(dense_down, down),
            )  # fmt: skip
        out.append(p)
    return tuple(out)


def _ratio(dense: float, real: float) -> float | None:
    return round(dense / real, 2) if real > 0 and dense == dense else None


def run_hosts(run: RunInfo, peers: Mapping[str, PeerRecord]) -> RunHosts:
    """What receipts of this run are judged by."""
    stages: dict[str, set[int]] = {}
    for s in run.stages:
        stages.setdefault(s.peer, set()).add(s.stage)
    return RunHosts(
        run=run.run,
        trainer=run.trainer,
        stages={peer: frozenset(held) for peer, held in stages.items()},
        edges=frozenset((k.src, k.dst) for k in run.links),
        hosts_of={peer: _ip_addresses(record.addresses) for peer, record in peers.items()},
    )


def _ip_addresses(addresses: Iterable[str]) -> frozenset[str]:
    """The public addresses; those of private networks and loopback are the same in many places."""
    out = set()
    for text in addresses:
        parts = text.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
            try:
                ip = ipaddress.ip_address(parts[2])
            except ValueError:
                continue
            if ip.is_global:
                out.add(str(ip))
    return frozenset(out)

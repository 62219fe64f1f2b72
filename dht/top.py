"""`fusion-monitor top`: the swarm live in a terminal; plain lines of what changes elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from dht.monitor import UNKNOWN, count_text, short_peer, size_text
from dht.monitor_observer import Observer, Sight, reading_board
from dht.monitor_views import EventInfo, PeerInfo, Picture, RunInfo

EVENTS_KEPT = 200
_STYLES = {
    "free": "green", "busy": "cyan", "paused": "yellow", "late": "yellow", "silent": "bold red", "left": "dim",
    "training": "green", "waiting": "yellow", "done": "blue", "failed": "bold red",
}  # fmt: skip
_RANK = {"silent": 0, "late": 1, "busy": 2, "free": 3, "paused": 4, "left": 5}
_TICKS = "▁▂▃▄▅▆▇█"


async def watch(swarm: tuple[str, ...], *, every_s: float, console: Console | None = None) -> int:
    """Until interrupted. SwarmUnreachable, TransportError."""
    console = console or Console(highlight=False)
    me = asyncio.current_task()
    if me is not None:  # a terminal must be given back, and the board left, also on SIGTERM
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal too
            asyncio.get_running_loop().add_signal_handler(number, me.cancel)
    async with reading_board(swarm) as board:
        observer = Observer(board, every_s)
        if not console.is_terminal:
            async for sight in observer.pictures():
                for line in plain_lines(sight):
                    print(line, flush=True)
            return 0
        screen = Screen(board.clock.now)
        with Live(screen, console=console, screen=True, auto_refresh=False) as live:
            async for sight in observer.pictures():
                screen.take(sight)
                live.refresh()
    return 0


# --- plain lines


def plain_lines(sight: Sight) -> list[str]:
    """What a log wants: a line for the swarm, one for each run, one for each event. Pure ASCII but for names."""
    p = sight.picture
    at = _clock(p.time)
    if p.error is not None:
        return [f"{at} board: {p.error}"]
    counts = " ".join(f"{name}={count}" for name, count in _states(p.peers).items())
    lines = [f"{at} swarm: peers={len(p.peers)} {counts} fences={len(p.fences)} runs={len(p.runs)}".replace("  ", " ")]
    for r in p.runs:
        why = f' bound="{r.why.text}"' if r.why is not None and r.why.kind in ("stage", "link") else ""
        lines.append(
            f"{at} run {r.name} {r.run[:8]}: {r.state} step={r.step}{f'/{r.total}' if r.total else ''} "
            f"loss={_known(r.loss, '.4f')} step_time_s={_known(r.step_time_s, '.3g')}{why}"
        )
    return lines + [f"{_clock(e.time)} event {e.kind}: {e.text}" for e in sight.events]


# --- the screen


class Screen:
    """A rich renderable that fits any size: what does not fit is counted, never cut silently."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._picture: Picture | None = None
        self._events: deque[EventInfo] = deque(maxlen=EVENTS_KEPT)
        self._losses: dict[str, deque[float]] = {}

    def take(self, sight: Sight) -> None:
        self._picture = sight.picture
        known = {(e.run, e.text) for e in self._events}
        told = [e for r in sight.picture.runs for e in r.events if (e.run, e.text) not in known]
        self._events.extend(sorted([*sight.events, *told], key=lambda e: e.time))
        for r in sight.picture.runs:
            if r.loss is not None:
                self._losses.setdefault(r.run, deque(maxlen=60)).append(r.loss)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Sequence[RenderableType]:
        width, height = options.max_width, options.height or console.height
        p = self._picture
        if p is None:
            return [Text("looking ...")]
        head = _header(p, width)
        events_room = max(3, height // 5)
        rooms = height - 1 - events_room - 1
        runs = min(len(p.runs), max(1, rooms // 3)) if p.runs else 0
        blocks: list[RenderableType] = [head]
        if p.runs:
            blocks += self._runs(p, runs, width)
            rooms -= runs * 2 + 1
        if p.fences and height >= 35:
            shown = min(len(p.fences), 6)
            blocks.append(_fences(p, shown))
            rooms -= shown + 1
        blocks.append(_peers(p, max(1, rooms - 2), width, self._clock()))
        blocks.append(_rule("events", width))
        blocks += [_event(e, width) for e in list(self._events)[-events_room + 1 :]]
        lines = console.render_lines(Group(*blocks), options.update(height=None), pad=False)[:height]
        return [SegmentLines(lines, new_lines=True)]

    def _runs(self, p: Picture, count: int, width: int) -> list[RenderableType]:
        hidden = len(p.runs) - count
        out: list[RenderableType] = [_rule("runs" + (f" ({hidden} more)" if hidden else ""), width)]
        for r in p.runs[:count]:
            out += [_run_line(r, width), self._run_detail(r, p.time, width)]
        return out

    def _run_detail(self, r: RunInfo, now: float, width: int) -> Text:
        losses = list(self._losses.get(r.run, ()))
        text = Text("  ", no_wrap=True, overflow="ellipsis")
        if r.state in ("waiting", "silent", "paused", "failed"):
            since = f" for {_span(now - r.since)}" if r.since else ""
            text.append(f"{r.state}{since}: {r.reason or 'no reason given'}", style="yellow")
            if r.wanted_peers:
                each = f" with {size_text(r.wanted_bytes)} each" if r.wanted_bytes else ""
                text.append(f"  wants {count_text(r.wanted_peers, 'more peer')}{each}")
        elif r.why is not None and r.why.kind != "unknown":
            text.append(f"{r.why.text}", style="yellow" if r.why.kind in ("stage", "link") else "dim")
        if len(losses) > 2 and width >= 100:
            text.append(f"  {_spark(losses[-30:])}", style="cyan")
        text.truncate(width, overflow="ellipsis")
        return text


def _header(p: Picture, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(" fusion ", style="reverse bold")
    text.append(f" {_clock(p.time)}  {count_text(len(p.peers), 'peer')}")
    for name, count in _states(p.peers).items():
        text.append(f"  {count} {name}", style=_STYLES[name])
    text.append(f"  {count_text(len(p.fences), 'fence')}  {count_text(len(p.runs), 'run')}")
    if p.error is not None:
        text.append(f"  stale: {p.error}", style="bold red")
    text.truncate(width, overflow="ellipsis")
    return text


def _rule(title: str, width: int) -> Text:
    return Text(f"─ {title} " + "─" * max(0, width - len(title) - 3), style="dim", no_wrap=True)


def _run_line(r: RunInfo, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{r.name} ", style="bold")
    text.append(r.state, style=_STYLES.get(r.state, ""))
    share = f" {r.step / r.total:.0%}" if r.total else ""
    text.append(f"  step {r.step}{f'/{r.total}' if r.total else ''}{share}  loss {_known(r.loss, '.4f')}")
    text.append(f"  {_known(r.step_time_s, '.3g')} s/step  {_known(r.tokens_per_s, '.4g')} tokens/s")
    text.append(f"  plan {r.plan}, {len(r.stages)} stages", style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def _fences(p: Picture, count: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("FENCE", "LEADER", "MEMBERS", "INSIDE", "ROUND TRIP"):
        table.add_column(name, no_wrap=True)
    for f in p.fences[:count]:
        rtt = UNKNOWN if f.rtt_s is None else f"{f.rtt_s * 1e3:.3g} ms"
        table.add_row(f.fence[:8], short_peer(f.leader), str(f.members), _rate(f.bytes_per_s), rtt)
    return table


def _peers(p: Picture, room: int, width: int, now: float) -> Table:
    wide = width >= 120
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    names = ["PEER", "STATE", "DEVICE", "SPEED", "STAGE", "UP", "DOWN"]
    names += ["SQUEEZE~", "HOURS", "REACH", "FENCE", "VERSION"] if wide else []
    for name in [*names, "SEEN"]:
        table.add_column(name, no_wrap=True, justify="right" if name in ("SPEED", "UP", "DOWN", "SEEN") else "left")
    peers = sorted(p.peers, key=lambda x: (_RANK[x.state], x.peer))
    hidden = len(peers) - room
    for peer in peers[: room if hidden <= 0 else room - 1]:
        table.add_row(*_peer_cells(peer, now, wide))
    if hidden > 0:
        table.add_row(f"+{hidden + 1} more", style="dim")
    return table


def _peer_cells(p: PeerInfo, now: float, wide: bool) -> list[RenderableType]:
    first = p.devices[0] if p.devices else None
    device = UNKNOWN if first is None else (f"{first.kind} {first.name}"[: 28 if wide else 12] or first.kind)
    speed = UNKNOWN if first is None or first.flops_per_s is None else _flops(first.flops_per_s)
    stages = " ".join("T" if h.stage < 0 else f"{h.stage}" for h in p.hosts) or "-"
    cells: list[RenderableType] = [
        short_peer(p.peer) + ("*" if p.leads else ""), Text(p.state, style=_STYLES[p.state]), Text(device), speed,
        stages[:8], _rate(p.up_bytes_per_s, "-"), _rate(p.down_bytes_per_s, "-"),
    ]  # fmt: skip
    if wide:
        squeeze = f"{_known(p.compression_out, '.3g')}x {_known(p.compression_in, '.3g')}x"
        cells += [
            squeeze if p.compression_out or p.compression_in else "-", Text(p.hours or "always"), p.reach or UNKNOWN,
            (p.fence or "none")[:8], Text(p.version[:10]),
        ]  # fmt: skip
    return [*cells, f"{max(0.0, now - p.published):.0f} s"]


def _event(e: EventInfo, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{_clock(e.time)} ", style="dim")
    text.append(e.text, style="red" if e.kind == "fault" else "")
    text.truncate(width, overflow="ellipsis")
    return text


def _states(peers: Sequence[PeerInfo]) -> dict[str, int]:
    counts = {name: 0 for name in ("busy", "free", "paused", "late", "silent", "left")}
    for p in peers:
        counts[p.state] += 1
    return {name: count for name, count in counts.items() if count}


def _known(value: float | None, spec: str) -> str:
    return UNKNOWN if value is None else format(value, spec)


def _rate(bytes_per_s: float | None, unknown: str = UNKNOWN) -> str:
    if bytes_per_s is None:
        return unknown
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 1000:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Gbit/s"


def _flops(flops_per_s: float) -> str:
    value = flops_per_s / 1e6
    for unit in ("MF/s", "GF/s", "TF/s"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PF/s"


def _span(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _spark(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "".join(_TICKS[int((v - low) / (high - low or 1.0) * (len(_TICKS) - 1))] for v in values)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))

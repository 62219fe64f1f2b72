"""What the trainer's user sees while a run goes: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fusion_p2p.frame import TRAINER
from fusion_p2p.plan import Plan
from peer import plain
from peer.events import EvalResult, Happening, LinkBytes, PlanAdopted, RunEvent, StepResult
from peer.plot import spark

_EVENTS_SHOWN = 6
_LINKS_SHOWN = 8  # the busiest
_LINE_EVERY_S = 5.0
_RECENT = 20  # steps that rates are averaged over


class Picture:
    """What is known, updated by happenings; `live` draws it, `line` says it in one line."""

    def __init__(self, name: str, steps: int, deadline_s: float | None, bytes_per_token: float) -> None:
        """`deadline_s` on the clock of `time.monotonic`, None: no limit."""
        self.name, self.steps, self._deadline_s = name, steps, deadline_s
        self._bytes_per_token = bytes_per_token
        self.phase = "starting"
        self.plan: Plan | None = None
        self.last: StepResult | None = None
        self.evaluation: EvalResult | None = None
        self.links = LinkBytes({}, {})
        self.events: deque[RunEvent] = deque(maxlen=_EVENTS_SHOWN)
        self._losses: list[float] = []
        self._recent: deque[StepResult] = deque(maxlen=_RECENT)
        self._first_step = 0
        self._bytes_at_first = 0

    def take(self, happening: Happening) -> None:
        match happening:
            case StepResult():
                if self.last is None:
                    self._first_step, self._bytes_at_first = happening.step, sum(self.links.sent.values())
                self.phase, self.last = "training", happening
                self._losses.append(happening.loss)
                self._recent.append(happening)
            case EvalResult():
                self.evaluation = happening
            case RunEvent():
                if happening.kind == "phase":
                    self.phase = happening.text
                self.events.append(happening)
            case PlanAdopted(plan=plan):
                self.plan = plan
            case LinkBytes():
                self.links = happening

    def rate(self) -> str:
        seconds = sum(s.step_time_s for s in self._recent)
        if not seconds:
            return ""
        tokens = sum(s.tokens for s in self._recent)
        if tokens:
            return f"{tokens / seconds:,.0f} tokens/s"
        return f"{sum(s.samples for s in self._recent) / seconds:,.0f} samples/s"

    def to_the_end(self) -> tuple[float, float]:
        """Seconds and bytes left, as the recent steps go; (nan, nan) before the second step."""
        if self.last is None or len(self._recent) < 2:
            return float("nan"), float("nan")
        step_s = sum(s.step_time_s for s in self._recent) / len(self._recent)
        steps = self.steps - self.last.step - 1
        if self._deadline_s is not None and step_s > 0:
            steps = min(steps, int(max(0.0, self._deadline_s - time.monotonic()) / step_s))
        done = self.last.step - self._first_step
        per_step = (sum(self.links.sent.values()) - self._bytes_at_first) / done if done else 0.0
        return steps * step_s, steps * per_step

    def held_out(self) -> str:
        if self.evaluation is None:
            return ""
        text = f"held-out loss {self.evaluation.loss:.4f}"
        return text + (
            f" ({self.evaluation.loss / self._bytes_per_token:.3f} nats per byte)" if self._bytes_per_token else ""
        )

    def line(self) -> str:
        """Phase, step, loss, rate and the rest of the way, in one line."""
        if self.last is None:
            return self.phase
        parts = [f"step {self.last.step + 1}/{self.steps}", f"loss {self.last.loss:.4f}", self.rate()]
        seconds, left = self.to_the_end()
        if seconds == seconds:
            parts.append(f"{_duration(seconds)} to go" + (f", {_bytes(left)} to send" if left else ""))
        return "  ".join(p for p in parts if p)

    def panel(self) -> Panel:
        head = Text(f"{self.phase}: {self.line()}" if self.last else self.phase)
        rows: list[Any] = [head]
        if len(self._losses) > 1:
            rows.append(Text(f"loss {spark(self._losses, 60)}  {self.held_out()}", style="cyan"))
        if self.plan is not None:
            rows.append(self._stages(self.plan))
            rows.append(Text(self._pace(self.plan), style="dim"))
        if self.links.sent:
            busiest = sorted(self.links.sent.items(), key=lambda link: -link[1])[:_LINKS_SHOWN]
            total = _bytes(sum(self.links.sent.values()))
            codecs = self._codecs()
            rows.append(
                Text(f"sent {total}: " + "  ".join(f"{_link(k)}{codecs.get(k, '')} {_bytes(v)}" for k, v in busiest))
            )
        if self.plan is not None:
            rows += [Text(plain.one_line(r), style="dim") for r in why_codecs(self.plan)[:_LINKS_SHOWN]]
        rows += [Text(f"{_clock(e.time_s)}  {e.text}", style="dim") for e in self.events]
        return Panel(Group(*rows), title=f"run {self.name}", title_align="left")

    def _pace(self, plan: Plan) -> str:
        """The plan's prediction beside what steps take."""
        if plan.prediction is None:
            return ""
        took = [s.step_time_s for s in self._recent]
        measured = f"; the last {len(took)} took {sum(took) / len(took):.3g} s" if took else ""
        return f"{plan.prediction.explain()}{measured}"

    def _codecs(self) -> dict[str, str]:
        """What each direction of a link between stages is compressed with."""
        named = self.plan.numerics.codecs if self.plan is not None else ()
        return {f"{a}-{b}": f" {c.codec}" for c in named for a, b in ((c.src, c.dst), (c.dst, c.src))}

    def _stages(self, plan: Plan) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("stage", "peer", "device", "in flight", "waits for"):
            table.add_column(column)
        for p in plan.placement:
            waits = self.links.waiting.get(p.stage, "")
            table.add_row(*map(plain.one_line, (str(p.stage), p.peer[-8:], p.device, str(p.window), waits)))
        return table


class View:
    """A Sink and a context manager. Sinks may be called from any thread."""

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        deadline_s: float | None = None,
        bytes_per_token: float = 0.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._picture = Picture(name, steps, deadline_s, bytes_per_token)
        self._clock, self._next_line_s = clock, 0.0
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, happening: Happening) -> None:
        with self._lock:
            self._picture.take(happening)
            text = "" if self._live is not None else self._plain(happening)
        if text:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> Panel:
        with self._lock:
            return self._picture.panel()

    def _plain(self, happening: Happening) -> str:
        """The line for this happening; steps get one every few seconds and at the end."""
        match happening:
            case RunEvent():
                return f"{_clock(happening.time_s)}  {happening.text}"
            case PlanAdopted(plan=plan):
                return plain.lines(plan.explain())
            case EvalResult():
                return f"after step {happening.step}: {self._picture.held_out()}"
            case StepResult() if self._clock() >= self._next_line_s or happening.step + 1 == self._picture.steps:
                self._next_line_s = self._clock() + _LINE_EVERY_S
                return self._picture.line()
        return ""


def why_codecs(plan: Plan) -> list[str]:
    """The plan's reason for the codec of each compressed link, and for what changed."""
    return [r for r in plan.reasons if r.startswith(("link ", "from step "))]


def _link(key: str) -> str:
    ends = re.findall(r"(?:^|(?<=-))-?\d+", key)  # "-1-0" is from the trainer to stage 0
    return "→".join("trainer" if end == str(TRAINER) else end for end in ends)


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02} min" if hours else f"{m} min {s:02} s" if m else f"{s} s"


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"

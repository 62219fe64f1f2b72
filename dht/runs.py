"""A run as readers see it, and the records of 2 KB at most that carry it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dht import records
from dht.records import Record, RunEvents, RunFigures, RunLinks, RunRecord, RunStages

_LINKS = 8  # in a record: with their reasons they stay within 2 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything the board holds on one run. Parts not (yet) found are empty."""

    run: RunRecord
    stages: tuple[records.StageHost, ...] = ()
    links: tuple[records.LinkBytes, ...] = ()
    events: tuple[records.Event, ...] = ()
    figures: tuple[records.StageFigures, ...] = ()


def join_run(head: RunRecord, parts: list[records.RunPart]) -> RunView:
    """One view of a run from its head and parts; stages and links of older plans are left out."""
    plan = max((p.plan for p in parts if isinstance(p, RunStages)), default=head.plan)
    stages = [s for p in parts if isinstance(p, RunStages) and p.plan == plan for s in p.stages]
    links = [link for p in parts if isinstance(p, RunLinks) and p.plan == plan for link in p.links]
    events = [e for p in parts if isinstance(p, RunEvents) for e in p.events]
    figures = [f for p in parts if isinstance(p, RunFigures) and p.plan == plan for f in p.stages]
    return RunView(
        run=head,
        stages=tuple(sorted(stages, key=lambda s: (s.replica, s.stage))),
        links=tuple(sorted(links, key=lambda link: (link.src, link.dst))),
        events=tuple(sorted(events, key=lambda e: e.time)),
        figures=tuple(sorted(figures, key=lambda f: (f.replica, f.stage))),
    )


def split_run(view: RunView) -> tuple[Record, ...]:
    """The records that hold `view`, each within 2 KB; the oldest events are left out if they do not fit.

    Publish them all; the number of parts of one plan does not change, so none is left behind.
    """
    run, owner, plan = view.run.run, view.run.owner, view.run.plan
    out: list[Record] = [view.run]
    for part, at in enumerate(range(0, len(view.stages), 16)):
        out.append(RunStages(run=run, owner=owner, part=part, plan=plan, stages=view.stages[at : at + 16]))
    for part, at in enumerate(range(0, len(view.links), _LINKS)):
        out.append(RunLinks(run=run, owner=owner, part=part, plan=plan, links=view.links[at : at + _LINKS]))
    for part, at in enumerate(range(0, len(view.figures), 16)):
        out.append(RunFigures(run=run, owner=owner, part=part, plan=plan, stages=view.figures[at : at + 16]))
    if view.events:
        out.append(RunEvents(run=run, owner=owner, part=0, events=_that_fit(view.events)))
    return tuple(out)


def _that_fit(events: tuple[records.Event, ...]) -> tuple[records.Event, ...]:
    room, kept = 1600, []
    for event in reversed(events[-16:]):
        room -= len(msgspec.msgpack.encode(event))
        if room < 0:
            break
        kept.append(event)
    return tuple(reversed(kept))

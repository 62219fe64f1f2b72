"""A board made of memory, and pictures of it, for the monitor's tests."""

from __future__ import annotations

import msgspec

from dht.fence_records import FenceView, LinksRecord, LinkSummary
from dht.identity import Identity
from dht.monitor_observer import Observer, Sight
from dht.receipts import Receipt
from dht.records import LinkBytes, PeerRecord, RunRecord, StageFigures, StageHost, Work
from dht.runs import RunView
from tests.dht_samples import NOW, peer_record, run_record

PEERS = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 9)]
OWNER = Identity.from_seed(bytes([99]) * 32)
FENCE = "ab" * 8


class Clock:
    def __init__(self, now: float) -> None:
        self.at = now

    def now(self) -> float:
        return self.at


class MemoryBoard:
    """The reading half of `Board`, over what a test puts into it."""

    def __init__(self, now: float = NOW) -> None:
        self.clock = Clock(now)
        self.records: dict[str, PeerRecord] = {}
        self.found_runs: dict[str, RunView] = {}
        self.found_fences: list[FenceView] = []
        self.found_receipts: list[Receipt] = []
        self.refused = 0

    def refresh(self) -> None:
        """Every record was written again just now."""
        now = self.clock.now()
        self.records = {p: msgspec.structs.replace(r, published=now) for p, r in self.records.items()}
        for key, view in self.found_runs.items():
            head = msgspec.structs.replace(view.run, published=now)
            self.found_runs[key] = RunView(
                run=head, stages=view.stages, links=view.links, events=view.events, figures=view.figures
            )

    async def peers(self, *, timeout_s: float) -> tuple[PeerRecord, ...]:
        return tuple(sorted(self.records.values(), key=lambda r: r.peer))

    async def fences(self, *, timeout_s: float) -> tuple[FenceView, ...]:
        return tuple(self.found_fences)

    async def runs(self, *, timeout_s: float) -> tuple[RunRecord, ...]:
        return tuple(v.run for v in self.found_runs.values())

    async def view(self, head: RunRecord, *, timeout_s: float) -> RunView:
        return self.found_runs[head.run]

    async def receipts(self, run: str, *, timeout_s: float) -> tuple[Receipt, ...]:
        return tuple(r for r in self.found_receipts if r.run == run)

    async def links(self, *, fence: str | None, timeout_s: float) -> tuple[LinksRecord, ...]:
        return ()


def run_view(**fields: object) -> RunView:
    """Peers 1, 2 and 3 host its stages, peer 0 trains. Stage 1 is slow."""
    owner = fields.pop("owner", OWNER)
    assert isinstance(owner, Identity)
    run = run_record(
        owner, PEERS[0].peer_id, step=10, total=100, loss=2.5, step_time_s=2.0, plan=1, published=NOW, **fields
    )
    hosts = tuple(StageHost(s, 0, PEERS[s + 1].peer_id, "cpu") for s in range(3))
    figures = tuple(StageFigures(s, 0, 1.7 if s == 1 else 0.5, 0.1, 0.2 if s == 1 else 1.4) for s in range(3))
    links = (
        LinkBytes(0, 1, 5000, "int8", 1000, 4000),
        LinkBytes(1, 2, 5000, "", 0, 0),
        LinkBytes(1, 0, 9, "int8", 1000, 4000),
    )
    return RunView(run=run, stages=hosts, links=links, figures=figures)


def board(**fields: object) -> MemoryBoard:
    """Six peers and a run."""
    made = MemoryBoard()
    view = run_view(**fields)
    made.found_runs[view.run.run] = view
    for number, me in enumerate(PEERS[:6]):
        work = (Work(view.run.run, number - 1),) if number < 4 else ()
        made.records[me.peer_id] = peer_record(
            me, published=NOW, fence=FENCE, work=work, state="busy" if work else "free",
            addresses=(f"/ip4/93.184.216.{number + 10}/tcp/4000",),
        )  # fmt: skip
    made.found_fences = [
        FenceView(
            id=FENCE, leader=PEERS[0].peer_id, term=1, members=6, summary=LinkSummary(940_000, 900, 12, 1.2),
            outside=(), spares=(), nominees=(), age_s=3.0,
        )
    ]  # fmt: skip
    return made


async def sights(made: MemoryBoard, count: int, every_s: float = 5.0) -> list[Sight]:
    """`count` looks, `every_s` apart; everything is refreshed before each but the first."""
    observer = Observer(made)
    out = [await observer.look()]
    for _ in range(count - 1):
        made.clock.at += every_s
        made.refresh()
        out.append(await observer.look())
    return out

"""What the parts of a trainer session share. All of it is touched on one asyncio loop only."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dht.transport import Transport
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import NumericLogEntry, Numerics, Plan
from fusion_p2p.planner import AtomTimes, Ladder
from fusion_p2p.settings import state_bytes
from fusion_p2p.split import StageProgram
from fusion_p2p.workload import Atom
from peer.accusations import Judgement
from peer.channel_io import ChannelSettings
from peer.events import RunEvent, Sink
from peer.links import Links
from peer.offers import DeviceOffer, SwarmLinks
from peer.placement import PlanRequest
from peer.plan_change import SETUP_S, Advice
from peer.plan_codecs import channels_of
from peer.plan_rates import Rates
from peer.protocol import BlobRef
from peer.quiet import Quiet
from peer.trainer_assembly import Assembly, Refusal
from peer.trainer_session import Session
from peer.trainer_state import Manifest, RunFolder
from peer.trainer_swarm import Swarm
from peer.trainer_ticks import TickBook

GATHER_S = 60.0
AFTER_REFUSAL_S = 60.0  # before a volunteer that refused a stage while the run goes on is asked again
FLOOD = 100  # lines of one peer between two that are told: it says more than its state every second
AFTER_LOSS_S = 15.0  # before a volunteer that was lost, or could not be reached, is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """`peers`: volunteers to wait for, `gather_s` at most, before the plan is made. `recover_s`: how long a lost stage
    waits for a new host before the run pauses. `mark_interval`: steps between complete sets. `channels`: heartbeats,
    and the silence after which a volunteer is lost."""

    numerics: Numerics  # its cuts count only in a resumed run
    stages: int | None = None
    every_device: bool = False  # where `stages` is None: each device gets one, not only those that pay
    planner: str = "opfence"  # as in `plan_hosts.propose_by`
    compression: str = "adatopk"  # of a new run's links, as `fusion_p2p.adatopk.ladder_of` has it
    peers: int = 1
    gather_s: float = GATHER_S
    recover_s: float = 60.0
    mark_interval: int = 0
    adaptive: bool = False  # cuts and codecs may change at a complete set, not only hosts
    script: tuple[NumericLogEntry, ...] = ()  # the numeric log that is replayed; the first entry's numerics begin
    shape: AtomTimes | None = None  # of the atoms, as timed here
    probe: Callable[[], Ladder | None] | None = None  # measures the codecs of "adatopk" on a thread; None: the default
    channels: ChannelSettings = field(default_factory=ChannelSettings)


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, kw_only=True)
class Placed:
    """What exists once every stage has a host."""

    plan: Plan
    links: Links
    book: TickBook
    programs: tuple[StageProgram, ...]
    newest: Manifest  # the newest complete set
    offers: list[DeviceOffer]
    number: int  # of the last plan that was offered to anybody
    idle: asyncio.Event = field(default_factory=_set_event)  # no tick is open

    def edges(self) -> set[tuple[int, int]]:
        """Pairs of stages between which tensors travel. Norms and verdicts are too small to join anybody."""
        pairs = {(e.src, e.dst) for p in self.programs for e in p.edges_out}
        return pairs | {(a, b) for p in self.programs for w in p.shared for a in w.stages for b in w.stages if a < b}


@dataclass(slots=True, kw_only=True)
class Live:
    """`whole` is set while every stage of the plan has a live host; `lost`: peer of the plan -> why it is gone.
    `early`: the same of hosts of the plan that is about to be in force. `excluded`: peer -> until when it gets none, by
    `clock` (monotonic). `leaving`: hosts that serve until the next complete set, then hand over -> why. `kept`: hash of
    the newest set's snapshots -> buddies that have it; `keepers`: -> who has been asked to. `outbox_share`: how full
    each stage's outboxes are. `again`: stages to be rebuilt with the next that are lost; `anew`: why all stages are to
    be rebuilt where they are, or ""; `may_stay`: lost ones that go on serving if nobody takes their stages. `rates`:
    how fast devices are. `links`: as measured. `ladder`: codecs as measured. `advice`: a change for the next set;
    `script`: entries of the numeric log that are still to come. `placing` is held by whoever changes the plan;
    incarnations below `fence` are of cuts that are over."""

    transport: Transport
    swarm: Swarm
    session: Session
    folder: RunFolder
    dag: OpDag
    atoms: tuple[Atom, ...]
    options: TrainerOptions
    sink: Sink
    assembly: Assembly
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    lost: dict[str, str] = field(default_factory=dict)
    early: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, float] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    keepers: dict[str, str] = field(default_factory=dict)
    outbox_share: dict[int, float] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    anew: str = ""
    losses: int = 0  # of hosts, since the session began
    may_stay: set[str] = field(default_factory=set)
    placed: Placed | None = None
    rates: Rates = field(default_factory=Rates)
    links: SwarmLinks = field(default_factory=SwarmLinks)
    ladder: Ladder | None = None
    advice: Advice | None = None
    script: list[NumericLogEntry] = field(default_factory=list)
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    fence: int = 0
    recut_s: float = 2 * SETUP_S  # what the last change of cuts took
    quiet: Quiet = field(default_factory=Quiet)

    @property
    def request(self) -> PlanRequest:
        """What plans are asked for; the links are those known now."""
        o, dag = self.options, self.dag
        return PlanRequest(
            base=o.numerics,
            stages=o.stages,
            every_device=o.every_device,
            compression=o.compression,
            planner=o.planner,
            links=self.links,
            channels=lambda cuts: channels_of(dag, cuts, o.numerics.micro_batch_size),
            epoch=self.session.epoch,
            mark_interval=o.mark_interval,
            ladder=self.ladder,
            shape=o.shape,
            state=state_bytes(self.session.spec.optimizer),
        )

    @property
    def change_due(self) -> bool:
        """Whether the plan is to change before the next tick."""
        return self.advice is not None or bool(self.script and self.script[0].first_step <= self.step)

    @property
    def run(self) -> str:
        return self.session.spec.run

    @property
    def now(self) -> Placed:
        """Only after `Trainer.start`."""
        assert self.placed is not None
        return self.placed

    def refs(self, manifest: Manifest) -> dict[int, BlobRef]:
        """The set's snapshots, and who serves them: we, and buddies that are there."""
        me, there = self.transport.peer_id, self.assembly.linked
        return {
            e.stage: self.ref(e.hash, e.size, me, *(b for b in self.kept.get(e.hash, ()) if b in there))
            for e in manifest.stages
        }

    def ref(self, blob: str, size: int, *holders: str) -> BlobRef:
        """A snapshot that these peers hold, with their addresses."""
        return BlobRef(blob, size, holders, self.assembly.where(holders))

    def exclude(self, peer: str, for_s: float = math.inf) -> None:
        now = self.clock()
        self.excluded = {p: until for p, until in self.excluded.items() if until > now}
        self.excluded[peer] = max(now + for_s, self.excluded.get(peer, 0.0))

    def judged(self, found: Judgement) -> None:
        """What hosts said of each other leads to this. What was seen here, for good, is not cleared by it."""
        self.exclude(found.out, found.for_s)
        for peer in found.cleared:
            if math.isfinite(self.excluded.get(peer, math.inf)):
                del self.excluded[peer]

    def offering(self, peers: Iterable[str]) -> None:
        """They are asked to take stages: what was heard of them before counts no more, if they accept."""
        for peer in peers:
            self.early.pop(peer, None)

    def may_host(self, peer: str) -> bool:
        return peer not in self.lost and peer not in self.leaving and self.clock() >= self.excluded.get(peer, 0.0)

    def devices(self) -> list[DeviceOffer]:
        """Devices to choose from: those on the board, and the plan's living hosts whether they are on it or not.

        What a host had free when the plan was made counts, not what is left beside its stages now; one that is to get
        nothing more has no room.
        """
        known = {(o.peer, o.device): o for o in self.now.offers}
        hosts = {p.peer for p in self.now.plan.placement} - self.lost.keys()
        offers = {key: o for key, o in known.items() if o.peer in hosts}
        fresh = [o for o in self.swarm.known if self.may_host(o.peer)]
        offers |= {(o.peer, o.device): known.get((o.peer, o.device), o) for o in fresh}
        free = [o if self.may_host(o.peer) else replace(o, memory_bytes=0) for o in offers.values()]
        return self.rates.correct(self.assembly.timed(free))

    def hand_over(self, peer: str, reason: str) -> None:
        """`peer` serves until the next complete set, which is made soon; then its stages go elsewhere."""
        stages = [p.stage for p in self.now.plan.placement if p.peer == peer]
        if stages and peer not in self.lost and peer not in self.leaving:
            self.leaving[peer] = reason
            for stage in stages:
                self.say("moving", f"{peer[-8:]} hands stage {stage} over: {reason}", peer=peer, stage=stage)

    def gone(self, peer: str, reason: str) -> None:
        """The control stream to `peer` ended: it loses what it hosts, and is not asked again at once."""
        self.exclude(peer, AFTER_LOSS_S)
        self.lose(peer, reason)

    def cut_off(self) -> list[str]:
        """Lost hosts of which no more is known than that their control stream ended: they may live."""
        linked, soon = self.assembly.linked, self.clock() + AFTER_LOSS_S
        return [peer for peer in self.lost if peer not in linked and self.excluded.get(peer, 0.0) <= soon]

    def keep(self, peer: str) -> None:
        """A host whose stages nobody takes goes on serving."""
        self.may_stay.discard(peer)
        self.lost.pop(peer, None)
        if not self.lost and not self.anew:
            self.whole.set()

    def begin_anew(self, reason: str) -> None:
        """Every stage is rebuilt from the newest set, where it is. Does nothing the second time."""
        if not self.anew:
            self.anew = reason
            self.say("notice", f"every stage goes back to step {self.now.newest.step}: {reason}")
            self.whole.clear()
            self.broken.set()

    def lose(self, peer: str, reason: str, *, moving: bool = False) -> None:
        """A host of the plan is gone: marks wait, `Repair` wakes. Does nothing the second time.

        `moving`: it lives, and hands over.
        """
        if not moving:
            self.may_stay.discard(peer)
        plan = self.placed.plan if self.placed is not None and self.placed.plan.number >= self.fence else None
        stages = [p.stage for p in plan.placement if p.peer == peer] if plan is not None else []
        if not stages and self.assembly.hosts_stage(peer):  # of a plan that is not yet in force
            self.early[peer] = reason
        if not stages or peer in self.lost:
            return
        self.lost[peer] = reason
        self.losses += not moving
        if self.leaving.pop(peer, None) is not None:
            self.exclude(peer, AFTER_LOSS_S)  # on the board it may be seen for a while yet
        self.assembly.abandon(peer, reason)
        for stage in () if moving else stages:
            self.say("lost", f"{peer[-8:]} (stage {stage}) was lost: {reason}", peer=peer, stage=stage)
        self.whole.clear()
        self.broken.set()

    def refused(self, refusal: Refusal, for_s: float = 0.0) -> None:
        """Said; and for `for_s` that peer is asked no more."""
        p = refusal.placement
        self.say("refused", f"{p.peer[-8:]} refuses stage {p.stage}: {refusal.reason}", peer=p.peer, stage=p.stage)
        if for_s > 0:
            self.exclude(p.peer, for_s)

    def say(
        self, kind: str, text: str, *, peer: str = "", stage: int = -1, wanted_peers: int = 0, wanted_bytes: int = 0
    ) -> None:
        """To whoever listens. What waits is told once per peer and minute, whatever a host says how often."""
        if kind == "waiting" and peer:
            left_out = self.quiet.may_tell(peer, self.session.clock())
            if left_out is None:
                return
            text += f" ({left_out} more lines of it were left out)" if left_out > FLOOD else ""
        self.sink(
            RunEvent(
                kind=kind,
                text=text,
                time_s=self.session.clock(),
                step=self.step,
                peer=peer,
                stage=stage,
                wanted_peers=wanted_peers,
                wanted_bytes=wanted_bytes,
            )
        )

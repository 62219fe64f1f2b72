"""A run's progress where others look for it: on the board, and in progress.json of the run folder."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht import records
from dht.errors import DhtError
from dht.identity import Identity
from dht.records import RunRecord
from dht.runs import RunView
from fusion_p2p.plan import Plan
from peer.events import Happening, LinkBytes, PlanAdopted, RunEvent, StepResult
from peer.protocol import RunSpec
from peer.trainer_figures import Figures
from peer.trainer_state import Audited, Progress, RunFolder
from peer.trainer_swarm import Swarm, signer_for

log = logging.getLogger(__name__)

EVERY_S = 5.0
DELEGATION_S = 24 * 3600.0
EVENTS_SHOWN = 6
_BOARD_STATE: dict[str, Literal["training", "paused", "done"]] = {
    "training": "training",
    "paused": "paused",
    "stopped": "paused",
    "done": "done",
}


class Publisher:
    """A Sink; `serve` publishes what it has heard every few seconds, `publish` at once."""

    def __init__(
        self, swarm: Swarm, folder: RunFolder, spec: RunSpec, owner: Ed25519PrivateKey, trainer: str, epoch: int
    ) -> None:
        self._swarm, self._folder, self._spec, self._trainer, self._epoch = swarm, folder, spec, trainer, epoch
        self._owner, self._session = Identity.from_seed(owner.private_bytes_raw()), Identity.generate()
        self._plan: Plan | None = None
        self._last: StepResult | None = None
        self._figures = Figures()
        self._wanted = (0, 0)  # more volunteers, bytes each
        self._audited: list[Audited] = []  # steps that are not on disk yet
        self._events: deque[RunEvent] = deque(maxlen=EVENTS_SHOWN)
        self._phase, self._reason, self._since = "waiting", "", 0.0
        self.total = 0

    def __call__(self, happening: Happening) -> None:
        match happening:
            case PlanAdopted(plan=plan):
                self._plan, self._wanted = plan, (0, 0)
                self._figures.adopt()
                self.phase("training")
            case StepResult():
                self._last = happening
                self._audited.append(Audited(happening.step, happening.loss, happening.sent))
                self._figures.take(happening)
            case LinkBytes():
                self._figures.take(happening)
            case RunEvent():
                self._events.append(happening)
                if happening.kind == "wanted":
                    self._wanted = happening.wanted_peers, happening.wanted_bytes

    def phase(self, phase: str, reason: str = "") -> None:
        """Phases as in `trainer_state.Progress`."""
        if phase != self._phase:
            self._phase, self._since = phase, self._swarm.now()
        self._reason = reason

    async def serve(self) -> None:
        while True:
            self.publish()
            await asyncio.sleep(EVERY_S)

    def publish(self) -> None:
        audited, self._audited = self._audited, []
        self._folder.append_audit(audited)
        step = self._last.step + 1 if self._last else self._folder_step()
        loss = self._last.loss if self._last and math.isfinite(self._last.loss) else None
        self._folder.write_progress(
            Progress(
                name=self._spec.name,
                run=self._spec.run,
                phase=self._phase,
                epoch=self._epoch,
                tick=0,
                step=step,
                loss=loss,
                set_tick=self._folder.sets()[-1] if self._folder.sets() else 0,
                reason=self._reason,
            )
        )
        try:
            self._to_board(step, loss)
        except DhtError as error:
            log.warning("progress of run %s is not on the board: %s", self._spec.name, error)

    def _folder_step(self) -> int:
        return self._folder.manifest().step if self._folder.sets() else 0

    def _to_board(self, step: int, loss: float | None) -> None:
        spec, last = self._spec, self._last
        record = RunRecord(
            run=spec.run,
            owner=spec.owner,
            name=spec.name[:64],
            opdag_hash=spec.opdag_hash,
            seed=spec.seed,
            created=spec.created,
            trainer=self._trainer,
            state=_BOARD_STATE.get(self._phase, "waiting"),
            reason=self._reason[:240],
            since=self._since,
            epoch=self._epoch,
            plan=self._plan.number if self._plan else 0,
            step=step,
            total=self.total,
            loss=loss,
            step_time_s=last.step_time_s if last else None,
            tokens_per_s=last.tokens_per_s if last and last.tokens else None,
            wanted_peers=self._wanted[0],
            wanted_bytes=self._wanted[1],
        )
        signer = signer_for(self._owner, spec.run, self._session, self._swarm.now() + DELEGATION_S)
        plan, events = self._plan, tuple(records.Event(e.time_s, e.text[:240]) for e in self._events)
        if plan is None:
            self._swarm.publish(RunView(run=record, events=events), signer)
            return
        hosts = tuple(records.StageHost(p.stage, p.replica, p.peer, p.device) for p in plan.placement)
        links, stages = self._figures.links(plan), self._figures.stages(plan)
        self._swarm.publish(RunView(run=record, stages=hosts, links=links, events=events, figures=stages), signer)

"""Faults for a local swarm: a schedule that is a pure function of its seed, and the hand that carries it out.

Every fault strikes a real process, on the training thread, right after the step that the schedule names; what begins
also ends after a number of steps, so a run of chaos does not depend on how fast the machine is. Used by
`fusion-run train ... --local N --chaos SEED[:FAULTS]` and by the cluster tests. DESIGN section 2: the weights must not
notice.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self, TypeAlias, get_args

import msgspec
import psutil

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Plan
from peer.lab.local_swarm import READY_TIMEOUT_S, LocalSwarm, Volunteer

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal[
    "kill", "freeze", "kill-executor", "cut", "neighbours", "leave", "slow", "stall", "disk", "join"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANING: dict[Kind, str] = {
    "kill": "SIGKILL of a stage's volunteer with its executor and p2pd",
    "freeze": "SIGSTOP of all of them; they wake after others have done their work",
    "kill-executor": "SIGKILL of the executor alone",
    "cut": "SIGSTOP of its p2pd: nothing comes and nothing goes; healed later",
    "neighbours": "SIGKILL of the volunteers of two neighbouring stages",
    "leave": "SIGTERM: the volunteer says goodbye",
    "slow": "its executor computes a quarter of the time",
    "stall": "SIGSTOP for a quarter of the time after which a peer counts as dead",
    "disk": "its executor can write no file",
    "join": "one volunteer more",
}
LEAST_ALIVE = 3
SLOW_PERIOD_S, SLOW_SHARE = 0.04, 0.25  # short beside a stage's work: else it is the waits that are stretched
STALL_S = 2.0
DISK_FULL_BYTES = 1
TAKES_AWAY: dict[Kind, int] = {"kill": 1, "freeze": 1, "cut": 1, "neighbours": 2, "leave": 1}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """After step `step`, `kind` befalls the `pick`-th host of the plan (modulo), for `steps` steps where it ends."""

    step: int
    kind: Kind
    pick: int
    steps: int


def schedule(seed: int, faults: int, steps: int, kinds: Sequence[Kind] = KINDS) -> tuple[Fault, ...]:
    """`faults` faults within a run of `steps` steps: the same for the same arguments, everywhere.

    No kind comes again before each has come once. InputError if they do not fit: one a step, none in the last tenth.
    """
    last = steps - max(2, steps // 10)
    if not 0 <= faults <= last:
        raise InputError(f"--chaos: {faults} faults do not fit into {steps} steps; at most {max(0, last)} do")
    dice = random.Random(f"chaos {seed}")
    bag: list[Kind] = []
    out = []
    for step in sorted(dice.sample(range(last), faults)):
        if not bag:
            bag = list(kinds)
            dice.shuffle(bag)
        out.append(Fault(step=step, kind=bag.pop(), pick=dice.randrange(1 << 16), steps=dice.randint(2, 8)))
    return tuple(out)


def parse(text: str) -> tuple[int, int]:
    """(seed, faults) of SEED[:FAULTS]; InputError otherwise."""
    seed, _, faults = text.partition(":")
    if not seed.isdecimal() or not (faults or "5").isdecimal():
        raise InputError(f"--chaos {text!r}: write a seed, and how many faults after a colon: --chaos 7:25")
    return int(seed), int(faults or "5")


class Chaos:
    """A context manager around a run on `swarm`. Call `after(step, plan)` on the training thread with each step done.

    Lost volunteers are replaced by fresh ones; a fault that would leave fewer than LEAST_ALIVE able ones, or has none
    to strike but them, waits for those. `told` hears one line per fault. On leaving, everything that is frozen goes on.
    """

    def __init__(self, swarm: LocalSwarm, faults: Sequence[Fault], told: Callable[[str], None] = log.info) -> None:
        self._swarm, self._told = swarm, told
        self._due = sorted(faults, key=lambda f: f.step)
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self._unable: set[str] = set()  # peers that are frozen or cut off
        self._coming: list[tuple[Volunteer, int]] = []
        self._seen_alive: set[str] = set()
        self.struck: list[tuple[Fault, str]] = []  # with whom it befell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, end in self._ends:
            end()
        self._ends.clear()

    def after(self, step: int, plan: Plan) -> None:
        """Let what is due happen. VolunteerFailed if a replacement does not start."""
        for at, end in list(self._ends):
            if at <= step:
                self._ends.remove((at, end))
                end()
        while self._due and self._due[0].step <= step:
            self._strike(self._due.pop(0), plan)

    @property
    def able(self) -> list[Volunteer]:
        """Volunteers that are ready, alive and neither frozen nor cut off."""
        coming = {id(v) for v, _ in self._coming}
        return [v for v in self._swarm.alive if id(v) not in coming and v.ready.peer not in self._unable]

    # --- one fault

    def _strike(self, fault: Fault, plan: Plan) -> None:
        if fault.kind == "join":
            self._coming.append(self._swarm.launch(self.able))
            return self._tell(fault, "")
        wanted = LEAST_ALIVE + TAKES_AWAY.get(fault.kind, 0)
        while self._coming and (len(self.able) < wanted or not self._victims(fault, plan)):
            self._welcome()
        victims = self._victims(fault, plan)
        if len(self.able) < wanted or not victims:
            return self._told(f"after step {fault.step}: {fault.kind} is left out, too few volunteers are able")
        for victim in victims:
            self._befall(fault, victim)
            self._tell(fault, victim.ready.peer)
        nominal = self._swarm.peers - len(self.able) - len(self._coming)
        for _ in range(min(nominal, TAKES_AWAY.get(fault.kind, 0))):
            self._coming.append(self._swarm.launch(self.able))

    def _tell(self, fault: Fault, peer: str) -> None:
        self.struck.append((fault, peer))
        who = f" of {peer[-8:]}" if peer else ""
        self._told(f"after step {fault.step}: {fault.kind}{who}: {MEANING[fault.kind]}")

    def _welcome(self) -> None:
        volunteer, descriptor = self._coming.pop(0)
        volunteer.wait_ready(descriptor, time.monotonic() + READY_TIMEOUT_S)

    def _victims(self, fault: Fault, plan: Plan) -> list[Volunteer]:
        """Able hosts of the plan, so that each fault hurts."""
        able = {v.ready.peer: v for v in self.able}
        order = [p.peer for p in sorted(plan.placement, key=lambda p: p.stage)]
        hosts = [peer for peer in dict.fromkeys(order) if peer in able]
        if not hosts:
            return []
        first = fault.pick % len(hosts)
        if fault.kind != "neighbours":
            return [able[hosts[first]]]
        pairs = [(a, b) for a, b in itertools.pairwise(order) if a != b and a in able and b in able]
        return [able[peer] for peer in pairs[fault.pick % len(pairs)]] if pairs else []

    def _befall(self, fault: Fault, victim: Volunteer) -> None:
        family = _family(victim)
        executors = [p for p in family if _is_executor(p)]
        match fault.kind:
            case "kill" | "neighbours":
                _send(family, signal.SIGKILL)
                victim.kill()
            case "kill-executor":
                _send(executors, signal.SIGKILL)
            case "leave":
                victim.terminate()
            case "freeze":
                self._until(fault, victim, _stopped(family))
            case "cut":
                self._until(fault, victim, _stopped([p for p in family if p.pid != victim.pid and p not in executors]))
            case "slow":
                self._until(fault, None, _slowed(executors))
            case "disk":
                self._until(fault, None, _disk_full(executors))
            case "stall":
                with _stopped(family):
                    time.sleep(STALL_S)
            case "join":
                pass

    def _until(self, fault: Fault, victim: Volunteer | None, trouble: contextlib.AbstractContextManager[None]) -> None:
        """Enter `trouble` now and leave it some steps later; `victim` is unable meanwhile."""
        trouble.__enter__()
        if victim is not None:
            self._unable.add(victim.ready.peer)

        def end() -> None:
            trouble.__exit__(None, None, None)
            if victim is not None:
                self._unable.discard(victim.ready.peer)

        self._ends.append((fault.step + fault.steps, end))


# --- what can befall processes


def _family(volunteer: Volunteer) -> list[psutil.Process]:
    """The daemon, its executor and its p2pd."""
    try:
        daemon = psutil.Process(volunteer.pid)
        return [daemon, *daemon.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_executor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "peer.executor" in process.cmdline()
    return False


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil checks that the id was not given to another
            process.send_signal(number)


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    _send(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(processes, signal.SIGCONT)


@contextlib.contextmanager
def _slowed(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """They run SLOW_SHARE of the time."""
    over = threading.Event()

    def toggle() -> None:
        while not over.wait(SLOW_PERIOD_S * SLOW_SHARE):
            with _stopped(processes):
                over.wait(SLOW_PERIOD_S * (1 - SLOW_SHARE))

    thread = threading.Thread(target=toggle, name="slow-down", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _disk_full(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """No file of theirs may grow: a write fails as on a full disk."""
    before = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            soft, hard = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (DISK_FULL_BYTES, hard))
            before.append((process, (soft, hard)))
    try:
        yield
    finally:
        for process, limits in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(resource.RLIMIT_FSIZE, limits)

"""What a volunteer accepts: whose runs, when, how much, and who leads a run here. Pure; clocks are passed in.

Default policy: any owner's run, at any hour, within the caps. `--runs OWNER…` restricts it to owners by their key.
"""

from __future__ import annotations

import re

import msgspec

from fusion_p2p.errors import InputError
from fusion_p2p.plan import Numerics
from peer.errors import RefusedError
from peer.protocol import Assignment, BlobRef, RunSpec, SessionCert

MAX_STAGES = 16
LEASE_S = 1800.0  # how long a run's stages are kept without a word from its trainer
MAX_FENCES = 4096
OFFER_S = 600.0  # an offer's admission, state and trial step; longer is a compute bomb or a dead holder
MAX_MICRO_BATCHES = 1 << 16
MAX_MICRO_BATCH_SIZE = 1 << 20
MAX_STAGES_OF_RUN = 4096
MAX_THREADS = 4096
MAX_NAME = 200
MAX_UINT32 = (1 << 32) - 1
MAX_HOLDERS = 16
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """`owners`: hex owner keys, or beginnings of at least 8 digits; () accepts all. `hours`: "22:00-07:00" local
    time, "" always. `memory_bytes`: most that all stages of a device may take together with its executor."""

    owners: tuple[str, ...] = ()
    hours: str = ""
    memory_bytes: int = 0
    paused: bool = False
    over_cap: str = ""  # why it takes nothing now: a cap on disk or on the month's traffic


def check_owner(text: str) -> str:
    """An owner as `--runs` takes it."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", text):
        raise InputError(f"--runs {text!r} is no owner's key: 8 to 64 hex digits, as `fusion-run show` prints them")
    return text


def check_hours(text: str) -> str:
    if text and not _HOURS.fullmatch(text):
        raise InputError(f"--hours {text!r} is no span of time; write for example 22:00-07:00")
    return text


def within_hours(hours: str, minute_of_day: int) -> bool:
    """Whether `minute_of_day` (0..1439, local) lies in the span; one that ends before it begins spans midnight."""
    found = _HOURS.fullmatch(hours)
    if not found:
        return True
    h1, m1, h2, m2 = map(int, found.groups())
    start, end = 60 * h1 + m1, 60 * h2 + m2
    return start <= minute_of_day < end if start < end else minute_of_day >= start or minute_of_day < end


def check_run(policy: Policy, spec: RunSpec, minute_of_day: int) -> None:
    """Whether this run may have stages here now; RefusedError (policy) says why not.

    Its name is shown here in status and logs.
    """
    if not (spec.name.isprintable() and len(spec.name) <= MAX_NAME):
        raise RefusedError("policy", f"the run's name is not one printable line of at most {MAX_NAME} characters")
    owner = spec.owner.hex()
    if policy.owners and not any(owner.startswith(o) for o in policy.owners):
        raise RefusedError("policy", f"this volunteer takes runs of named owners only, not of {owner[:16]}")
    if policy.paused:
        raise RefusedError("policy", "this volunteer is paused")
    if policy.over_cap:
        raise RefusedError("policy", f"this volunteer takes nothing now: {policy.over_cap}")
    if not within_hours(policy.hours, minute_of_day):
        raise RefusedError("policy", f"this volunteer computes at {policy.hours} only")


class Held(msgspec.Struct, frozen=True):
    """The session that leads a run here. `heard`: when its trainer was last heard of, monotonic."""

    session: SessionCert
    heard: float


class Leases:
    """One exclusive lease per run. A second session is refused by name, unless its epoch is higher: it takes over."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def take(self, session: SessionCert, now: float) -> bool:
        """Grant or renew; True if another session was put out. RefusedError (lease) if another one leads."""
        held = self._held.get(session.run)
        other = held is not None and held.session.session_key != session.session_key
        if held is not None and other and session.epoch <= held.session.epoch:
            leads = held.session
            raise RefusedError(
                "lease",
                f"run {session.run} is led here by trainer {leads.trainer_peer} (epoch {leads.epoch}, "
                f"heard {now - held.heard:.0f} s ago); a session takes over with a higher epoch than {leads.epoch}",
            )
        self._held[session.run] = Held(session, now)
        return other

    def renew(self, session: SessionCert, now: float) -> bool:
        """The trainer was heard of; False if the session does not lead (any more)."""
        if not self.leads(session):
            return False
        self._held[session.run] = Held(session, now)
        return True

    def leads(self, session: SessionCert) -> bool:
        """Whether this session leads its run here, by this certificate or by a newer one of its own."""
        held = self._held.get(session.run)
        return held is not None and (held.session.session_key, held.session.epoch) == (
            session.session_key,
            session.epoch,
        )

    def silent_s(self, run: str, now: float) -> float:
        """Seconds since the run's trainer was heard of; infinite if nobody leads it."""
        held = self._held.get(run)
        return now - held.heard if held is not None else float("inf")

    def end(self, run: str) -> None:
        self._held.pop(run, None)

    def runs(self) -> tuple[str, ...]:
        return tuple(self._held)


class Fences:
    """Highest (epoch, incarnation) assigned here per (run, stage); what lies below is refused, also after a restart."""

    def __init__(self, known: dict[str, tuple[int, int]] | None = None) -> None:
        self._known = dict(known or {})

    def check(self, a: Assignment) -> None:
        """RefusedError (lease) for an assignment older than one already seen; else remember it."""
        key = f"{a.run}/{a.stage}/{a.replica}"
        last = self._known.pop(key, (0, 0))
        self._known[key] = max(last, (a.epoch, a.incarnation))
        while len(self._known) > MAX_FENCES:
            del self._known[next(iter(self._known))]
        if (a.epoch, a.incarnation) < last:
            raise RefusedError(
                "lease",
                f"stage {a.stage} of run {a.run} was assigned here by epoch {last[0]} as incarnation {last[1]}; "
                f"epoch {a.epoch}, incarnation {a.incarnation} is older",
            )

    def to_dict(self) -> dict[str, tuple[int, int]]:
        return dict(self._known)


def check_offer(policy: Policy, a: Assignment, *, devices: tuple[str, ...], stages: int, state_bytes: int) -> None:
    """What can be told without torch: the device is here, there is room for one more stage. RefusedError otherwise.

    Its numbers must fit the frames' headers and the board's records, which are made of them.
    """
    ranges = (
        ("stage", a.stage, MAX_STAGES_OF_RUN - 1),
        ("replica", a.replica, MAX_STAGES_OF_RUN - 1),
        ("incarnation", a.incarnation, MAX_UINT32),
        ("epoch", a.epoch, MAX_UINT32),
        ("plan", a.plan, MAX_UINT32),
    )
    for name, value, most in ranges:
        if not 0 <= value <= most:
            raise RefusedError("admission", f"{name} = {value} of an assignment is outside 0..{most}")
    if a.device not in devices:
        raise RefusedError("policy", f"stage {a.stage} is meant for device {a.device!r}; here are {', '.join(devices)}")
    if stages >= MAX_STAGES:
        raise RefusedError("busy", f"this volunteer hosts {stages} stages already, at most {MAX_STAGES}")
    needed = 2 * state_bytes
    if policy.memory_bytes and needed > policy.memory_bytes:
        raise RefusedError(
            "memory",
            f"stage {a.stage} needs {needed / 2**30:.2f} GiB at least, cap {policy.memory_bytes / 2**30:.2f} GiB",
            needed=needed,
            cap=policy.memory_bytes,
        )


def check_numerics(n: Numerics, window: int) -> None:
    """Numbers that a graph or a loop is made of lie within reason; RefusedError (admission) names one that does not."""
    ranges = (
        ("micro_batches", n.micro_batches, MAX_MICRO_BATCHES),
        ("micro_batch_size", n.micro_batch_size, MAX_MICRO_BATCH_SIZE),
        ("threads", n.threads, MAX_THREADS),
        ("window", window, MAX_MICRO_BATCHES),
        ("stages", n.stages, MAX_STAGES_OF_RUN),
    )
    for name, value, most in ranges:
        if not 1 <= value <= most:
            raise RefusedError("admission", f"{name} = {value} is outside 1..{most}")
    if n.tf32 or not n.deterministic:
        raise RefusedError("policy", "executors compute with TF32 off and with deterministic kernels only")
    if len(n.codecs) > MAX_STAGES_OF_RUN**2 // 2:
        raise RefusedError("admission", f"{len(n.codecs)} codecs named for {n.stages} stages")


def check_state(state: BlobRef) -> None:
    """A stage's bytes are named by a hash, and there are few to ask for them; RefusedError (admission) otherwise."""
    if not re.fullmatch(r"[0-9a-f]{64}", state.hash):
        raise RefusedError("admission", f"{state.hash[:80]!r} is no snapshot's hash: 64 hex digits")
    if state.size < 0:
        raise RefusedError("admission", f"a snapshot of {state.size} bytes")
    if len(state.holders) > MAX_HOLDERS:
        raise RefusedError("admission", f"a snapshot of {len(state.holders)} holders, at most {MAX_HOLDERS} are asked")
    if strangers := state.addresses.keys() - set(state.holders):
        raise RefusedError("admission", f"addresses of {min(strangers)[:80]!r}, which does not hold the snapshot")

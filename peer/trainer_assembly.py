"""The volunteers that host a run's stages: hello, signed offers, refusals, who is connected to whom.

A refusal is an answer like any other: the plan is made again with what it says (less memory, or without that peer).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dht.errors import DhtError
from dht.transport import Transport
from fusion_p2p.errors import InputError
from fusion_p2p.frame import TRAINER
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import Plan, StagePlacement
from fusion_p2p.planner import AtomTimes
from fusion_p2p.suspicion import Watched
from fusion_p2p.workload import Atom
from peer.channel_io import ChannelSettings
from peer.errors import RefusedError
from peer.offers import DeviceOffer, shape_of_atoms
from peer.placement import PlanRequest, make_plan, next_of, revise
from peer.protocol import (
    Accepted,
    BlobRef,
    Connect,
    Drop,
    Endpoint,
    Renew,
    StageFault,
    StageOffer,
    StageStatus,
    Suspect,
    bounded,
)
from peer.stage_load import stage_bytes
from peer.trainer_host import Host, HostLost
from peer.trainer_session import CERT_S, Credentials, Session

RENEW_LOOK_S = 60.0
MAX_PLANS = 16  # plans tried before a run gives up on volunteers that refuse
MEMORY_MARGIN = 0.95
ADOPT_S = 5.0  # for a host to say that it still has its stage
MAX_REFUSALS = 2  # of one peer; then it is planned without
Spawn = Callable[[Coroutine[Any, Any, None]], object]
Lost = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`needed` and `cap` in bytes where memory was the reason; `gone`: the peer could not be asked at all."""

    placement: StagePlacement
    reason: str
    needed: int = 0
    cap: int = 0
    gone: bool = False


class Assembly:
    """`on_lost(peer, reason)` is called once per volunteer that had a stage and is gone, `on_offer(peers)` before they
    are asked to take one. `atoms`: how many the model has."""

    def __init__(
        self,
        transport: Transport,
        session: Session,
        dag: OpDag,
        *,
        atoms: int,
        spawn: Spawn,
        on_lost: Lost,
        on_offer: Callable[[Collection[str]], None],
        on_fault: Callable[[str, StageFault | Suspect], None],
        on_status: Callable[[str, StageStatus], None],
        channels: ChannelSettings,
        own_addresses: Callable[[], tuple[str, ...]] = lambda: (),
    ) -> None:
        self._own_addresses = own_addresses  # where volunteers reach the trainer
        self._transport, self._session, self._channels = transport, session, channels
        self._opdag, self._opdag_hash = dag.to_bytes(), dag.hash
        self._atoms = atoms
        self._spawn, self._on_lost, self._on_fault, self._on_status = spawn, on_lost, on_fault, on_status
        self._on_offer = on_offer
        self._credentials = Credentials(session, transport.peer_id, dag.hash)
        self._hosts: dict[str, Host] = {}
        self._opening = weakref.WeakValueDictionary[str, asyncio.Lock]()
        self._accepted: dict[int, tuple[StagePlacement, Accepted]] = {}
        self._offered: Counter[str] = Counter()  # peers with an offer under way
        self._confirmed: dict[tuple[str, str], AtomTimes | None] = {}  # devices that were timed -> their own table
        self._wanted: frozenset[tuple[str, int, int]] = frozenset()  # (peer, stage, incarnation) to be adopted
        self.addresses: Mapping[str, tuple[str, ...]] = {}
        self.watched: dict[int, tuple[Watched, ...]] = {}  # by stage, for its next host
        self.me = self._new_endpoint()
        self._told: tuple[Endpoint, ...] = ()  # by `connect`

    async def assemble(
        self,
        atoms: Sequence[Atom],
        offers: Sequence[DeviceOffer],
        request: PlanRequest,
        states: Callable[[Plan], Mapping[int, BlobRef]],
        first_tick: int,
        on_refusal: Callable[[Refusal], None],
        known: Collection[tuple[str, str]] = (),
    ) -> tuple[Plan, list[DeviceOffer]]:
        """A plan whose every stage has been accepted, and the offers as trial steps corrected them.

        InputError when what is left of the swarm cannot host it. What an accepted plan's trial steps took may lead to
        another one (`placement.next_of`). Peers of one machine are asked in turn: trial steps beside each other tell
        how busy it is, not how fast each of them would be. Of the devices `known` no trial step is believed.
        """
        last, refused = "", Counter[str]()
        tried: list[Plan] = []
        wanted: Plan | None = None
        for number in range(request.number, request.number + MAX_PLANS):
            if wanted is None:
                try:
                    plan = await asyncio.to_thread(make_plan, atoms, offers, replace(request, number=number))
                except InputError as error:
                    raise InputError(f"{error}{f' (after a refusal: {last})' if last else ''}") from None
            else:
                plan, wanted = _numbered(wanted, number), None
            machine = {o.peer: o.machine or o.peer for o in offers}
            held = await asyncio.to_thread(states, plan)  # may write and hash the model
            refusals = await self.place(plan, range(plan.numerics.stages), held, first_tick, machine)
            if not refusals:
                offers, told = self.timed(offers), self.trial_s()
                seconds = {p.stage: told.get(p.stage, 0.0) for p in plan.placement if (p.peer, p.device) not in known}
                seen, other, offers = await asyncio.to_thread(revise, plan, atoms, offers, request, seconds)
                tried.append(seen)
                wanted = next_of(tried, other)
                if wanted is None:
                    return seen, list(offers)
            await self._drop(self._accepted, "the plan changed")
            for refusal in refusals:
                on_refusal(refusal)
                last, peer = refusal.reason, refusal.placement.peer
                refused[peer] += 1
                offers = _after_refusal(offers, refusal, plan, atoms, request)
                if refused[peer] >= MAX_REFUSALS:
                    offers = [o for o in offers if o.peer != peer]
        raise InputError(f"no plan found after {MAX_PLANS} tries; the last refusal was: {last}")

    async def place(
        self,
        plan: Plan,
        stages: Iterable[int],
        states: Mapping[int, BlobRef],
        first_tick: int,
        machine: Mapping[str, str] | None = None,
    ) -> list[Refusal]:
        """Offer these stages to their hosts, all at once but for those of one `machine`; what was refused.

        After a refusal the new hosts of the others are told to forget them; an old host elsewhere still has its stage.
        """
        taken: dict[int, tuple[StagePlacement, Accepted]] = {}
        turns: dict[str, asyncio.Lock] = {}
        by_peer: dict[str, list[StagePlacement]] = {}
        for stage in stages:
            placement = plan.host(stage)
            by_peer.setdefault(placement.peer, []).append(placement)

        async def on_peer(peer: str, placements: list[StagePlacement]) -> list[Refusal]:
            async with turns.setdefault((machine or {}).get(peer, peer), asyncio.Lock()):
                return await in_turn(peer, placements)

        async def in_turn(peer: str, placements: list[StagePlacement]) -> list[Refusal]:
            for p in placements:
                try:
                    host = await self._host(peer)
                    offer = self._offer(plan, p, host, states[p.stage], first_tick)
                    accepted = await host.offer(offer, p.stage)
                    said = accepted.run, accepted.stage, accepted.incarnation
                    if said != (self._session.spec.run, p.stage, p.incarnation):
                        return [Refusal(p, f"accepts what it was not offered: {said!r:.120}", gone=True)]
                    if not self._confirm(p, accepted, offer.trial):
                        return [Refusal(p, "accepts without the trial step that it was asked for", gone=True)]
                    taken[p.stage] = p, accepted
                except RefusedError as error:
                    return [Refusal(p, str(error), error.needed, error.cap)]
                except (HostLost, DhtError) as error:
                    return [Refusal(p, str(error), gone=True)]
            return []

        self._on_offer(by_peer.keys())
        self._offered.update(by_peer.keys())
        try:  # until all is settled: what becomes of one that has accepted while others have not is heard
            answers = await asyncio.gather(*(on_peer(peer, ps) for peer, ps in by_peer.items()))
            refused = [refusal for refusals in answers for refusal in refusals]
            for stage, (p, accepted) in taken.items():
                before = self._accepted.get(stage)
                if refused and (before is None or before[0].peer != p.peer):
                    await self.drop(p.peer, (stage,), "the plan changed")
                else:
                    self._accepted[stage] = p, accepted
            return refused
        finally:
            self._offered -= Counter(by_peer.keys())

    def _confirm(self, p: StagePlacement, accepted: Accepted, tried: bool) -> bool:
        """Whether the device has shown what it takes, now or before; what it says of its operators is noted."""
        key, seconds = (p.peer, p.device), accepted.trial_forward_s + accepted.trial_backward_s
        if tried and not (math.isfinite(seconds) and seconds > 0):
            return key in self._confirmed
        shape = shape_of_atoms(accepted.atoms, self._atoms)
        self._confirmed[key] = shape or self._confirmed.get(key)
        return True

    def timed(self, offers: Iterable[DeviceOffer]) -> list[DeviceOffer]:
        """The offers with what the devices' trial steps have shown: that they work, and their own operators' times.

        Not the times of peers that share a machine: they are alike, and what one takes tells how busy the others are.
        """
        known = self._confirmed
        return [
            replace(
                o,
                confirmed=(o.peer, o.device) in known,
                shape=None if o.machine else known.get((o.peer, o.device)),
            )
            for o in offers
        ]

    async def adopt(self, plan: Plan, states: Mapping[int, BlobRef], first_tick: int) -> dict[int, str]:
        """Take over the stages of an earlier session where they run; why the others are not there, by stage."""
        self._wanted = frozenset((p.peer, p.stage, p.incarnation) for p in plan.placement)

        async def one(p: StagePlacement) -> str:
            try:
                async with asyncio.timeout(ADOPT_S):
                    host = await self._host(p.peer)
                    offer = self._offer(plan, p, host, states[p.stage], first_tick)
                    offer = msgspec.structs.replace(offer, adopt=True, opdag=b"")
                    accepted = await host.offer(offer, p.stage)
            except TimeoutError:
                return f"{p.peer[-8:]} did not answer within {ADOPT_S:g} s"
            except (RefusedError, HostLost, DhtError) as error:
                return str(error)
            if (accepted.run, accepted.incarnation) != (self._session.spec.run, p.incarnation):
                return "it accepts what it was not offered"
            self._confirm(p, accepted, False)
            self._accepted[p.stage] = p, accepted
            return ""

        reasons = await asyncio.gather(*map(one, plan.placement))
        self._wanted = frozenset()  # who comes back later with a stage of that plan holds what lives elsewhere by then
        return {p.stage: why for p, why in zip(plan.placement, reasons, strict=True) if why}

    async def take_back(self, plan: Plan, peer: str) -> bool | None:
        """Open a stream again to a host of `plan` whose last one ended. Whether it has its stages as they were; None
        if it does not answer, or with a refusal."""
        mine = frozenset((p.peer, p.stage, p.incarnation) for p in plan.placement if p.peer == peer)
        self._wanted |= mine
        try:
            async with asyncio.timeout(ADOPT_S):
                host = await self._host(peer)
        except (TimeoutError, RefusedError, HostLost, DhtError):
            return None
        finally:
            self._wanted -= mine
        held = host.welcome.held if host.welcome is not None else ()
        return mine <= {(peer, h.stage, h.incarnation) for h in held}

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where every stage and the trainer live now."""
        stages = (
            Endpoint(
                stage=k,
                peer=p.peer,
                endpoint=accepted.endpoint,
                incarnation=accepted.incarnation,
                addresses=bounded(self.addresses.get(p.peer, ())),
            )
            for k, (p, accepted) in sorted(self._accepted.items())
        )
        return (msgspec.structs.replace(self.me, addresses=bounded(self._own_addresses())), *stages)

    def where(self, peers: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Their addresses, as far as they are known; our own too."""
        known = {**self.addresses, self._transport.peer_id: self._own_addresses()}
        return {peer: bounded(known[peer]) for peer in peers if known.get(peer)}

    async def connect(self, plan: Plan) -> list[HostLost]:
        """Tell every host where the others live; those that could not be told."""
        endpoints, run, lost = self.endpoints(), self._session.spec.run, list[HostLost]()
        self._told = endpoints
        for k, (p, _) in sorted(self._accepted.items()):
            message = Connect(run=run, plan=plan.number, stage=k, endpoints=endpoints, buddies=self.linked)
            try:
                await self.host(p.peer).send(message)
            except HostLost as error:
                lost.append(error)
        return lost

    @property
    def moved(self) -> bool:
        """Whether the same ends as `connect` told of last can be reached elsewhere by now."""
        now, told = self.endpoints(), self._told
        same = [_end(e) for e in now] == [_end(e) for e in told]
        return same and [set(e.addresses) for e in now] != [set(e.addresses) for e in told]

    def hosts_stage(self, peer: str) -> bool:
        """Whether `peer` has a stage, or an offer to take one."""
        return self._offered[peer] > 0 or any(p.peer == peer for p, _ in self._accepted.values())

    @property
    def linked(self) -> tuple[str, ...]:
        """Peers with an open control stream: hosts, and spares that were greeted."""
        return tuple(self._hosts)

    async def greet(self, peer: str) -> None:
        """Open the control stream to a spare now: that it lives is known when it is needed. RefusedError, HostLost or
        DhtError."""
        await self._host(peer)

    def trial_s(self) -> dict[int, float]:
        """Seconds a micro-batch, forward and backward, of each stage's trial step where it is now; of those that had
        one."""
        found = {k: a.trial_forward_s + a.trial_backward_s for k, (_, a) in self._accepted.items()}
        return {k: seconds for k, seconds in found.items() if seconds > 0}

    def abandon(self, peer: str, reason: str) -> None:
        """`peer` lost its stages, though its stream may live: who waits for its snapshots is told."""
        if peer in self._hosts:
            self._hosts[peer].abandon(reason)

    async def drop(self, peer: str, stages: Iterable[int], reason: str) -> None:
        """Stages that now live elsewhere end at `peer`, if it can still be told."""
        with contextlib.suppress(HostLost):
            for stage in stages:
                if peer in self._hosts:
                    await self._hosts[peer].send(Drop(run=self._session.spec.run, stage=stage, reason=reason))

    def part(self, peer: str) -> None:
        """Close the stream to a spare."""
        if not self.hosts_stage(peer) and (host := self._hosts.pop(peer, None)) is not None:
            host.close("not needed")

    def host(self, peer: str) -> Host:
        """The open link to a host of this plan; HostLost if it is gone."""
        if peer not in self._hosts:
            raise HostLost(peer, "gone")
        return self._hosts[peer]

    def forget(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._accepted.pop(stage, None)

    async def clear(self, reason: str) -> None:
        """Every stage ends where it is; the links to the peers stay. Streams to come are those of another endpoint."""
        await self._drop(self._accepted, reason)
        self.me = self._new_endpoint()

    def _new_endpoint(self) -> Endpoint:
        return Endpoint(stage=TRAINER, peer=self._transport.peer_id, endpoint=secrets.token_hex(16), incarnation=0)

    async def leave(self, reason: str) -> None:
        """Drop every stage and close every link."""
        run, hosts = self._session.spec.run, list(self._hosts.items())
        self._hosts.clear()
        by_peer: dict[str, list[int]] = {}
        for k, (p, _) in self._accepted.items():
            by_peer.setdefault(p.peer, []).append(k)
        await asyncio.gather(*(host.leave(run, tuple(by_peer.get(peer, ())), reason) for peer, host in hosts))

    async def _host(self, peer: str) -> Host:
        async with self._opening.setdefault(peer, asyncio.Lock()):  # a greeting and an offer want one stream
            return self._hosts.get(peer) or await self._open(peer)

    async def _open(self, peer: str) -> Host:
        await self._transport.connect(peer, self.addresses.get(peer, ()))
        host = Host(
            self._transport,
            peer,
            on_status=self._on_status,
            on_fault=self._on_fault,
            is_successor=self._credentials.is_successor,
            channels=self._channels,
        )
        try:
            await host.open(self._credentials.hello())
        except BaseException:
            host.close("not admitted")
            raise
        self._hosts[peer] = host
        self._spawn(self._watch(host))
        held = host.welcome.held if host.welcome else ()
        useless = [h.stage for h in held if (peer, h.stage, h.incarnation) not in self._wanted]
        await self.drop(peer, useless, "it lives elsewhere now")
        return host

    async def _watch(self, host: Host) -> None:
        try:
            await host.serve()
        except HostLost as lost:
            if self._hosts.get(host.peer) is host:
                del self._hosts[host.peer]
                host.close(lost.reason)
                self._on_lost(host.peer, lost.reason)

    async def keep_certified(self, look_s: float = RENEW_LOOK_S) -> None:
        """Renew the session's certificate everywhere once half of its life is over; for as long as the session."""
        issued = self._session.clock()
        while True:
            await asyncio.sleep(look_s)
            now = self._session.clock()
            if now - issued < CERT_S / 2:
                continue
            issued, cert = now, self._credentials.cert()
            for host in list(self._hosts.values()):
                with contextlib.suppress(HostLost):  # `_watch` tells
                    await host.send(Renew(cert=cert))

    def _offer(self, plan: Plan, p: StagePlacement, host: Host, state: BlobRef, first_tick: int) -> StageOffer:
        before = self._accepted.get(p.stage)
        known = host.welcome is not None and self._opdag_hash in host.welcome.have_opdags
        return StageOffer(
            assignment=self._credentials.assignment(plan, p),
            numerics=plan.numerics,
            window=p.window,
            opdag=b"" if known else self._opdag,
            state=state,
            first_tick=first_tick,
            trial=before is None or (before[0].peer, before[0].device) != (p.peer, p.device),
            logged=p.logged,
            watched=self.watched.get(p.stage, ()),
        )

    async def _drop(self, stages: Mapping[int, tuple[StagePlacement, Accepted]], reason: str) -> None:
        run = self._session.spec.run
        for k, (p, _) in list(stages.items()):
            if p.peer in self._hosts:
                with_host = self._hosts[p.peer]
                try:
                    await with_host.send(Drop(run=run, stage=k, reason=reason))
                except HostLost:
                    continue
        self.forget(list(stages))


def _after_refusal(
    offers: Sequence[DeviceOffer], refusal: Refusal, plan: Plan, atoms: Sequence[Atom], request: PlanRequest
) -> list[DeviceOffer]:
    """The offers as the refusal corrects them: memory on the scale of our estimate, or without the peer."""
    p = refusal.placement
    if not refusal.cap or not refusal.needed:
        return [o for o in offers if o.peer != p.peer]
    estimate = stage_bytes(plan, p.stage, atoms, request.state)
    room = int(MEMORY_MARGIN * estimate * refusal.cap / refusal.needed)
    return [replace(o, memory_bytes=room) if (o.peer, o.device) == (p.peer, p.device) else o for o in offers]


def _numbered(plan: Plan, number: int) -> Plan:
    hosts = tuple(msgspec.structs.replace(p, incarnation=number) for p in plan.placement)
    return msgspec.structs.replace(plan, number=number, placement=hosts)


def _end(e: Endpoint) -> tuple[int, str, str, int]:
    return e.stage, e.peer, e.endpoint, e.incarnation

"""A volunteer in memory: real stages, real links, the real control protocol; no process, no p2pd, no policy."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from dht.records import Device, PeerRecord
from dht.transport import Stream
from fusion_p2p.compute import Compute
from fusion_p2p.errors import EndsDiffer
from fusion_p2p.frame import TRAINER, Frame
from fusion_p2p.guard import Guard
from fusion_p2p.ir import OpDag
from fusion_p2p.snapshot import from_bytes, to_bytes
from fusion_p2p.split import split
from fusion_p2p.stage import Stage
from fusion_p2p.suspicion import Suspicion
from peer.blobs import BlobStore, fetch_blob, serve_blobs
from peer.channel_io import ChannelSettings
from peer.control_io import MessageStream
from peer.executor_compute import TICKS_TAKEN
from peer.link_ends import LinkEvent
from peer.links import Links
from peer.protocol import (
    CONTROL,
    PROTOCOL_VERSION,
    Accepted,
    Assignment,
    AtomSeconds,
    BlobRef,
    Connect,
    Drop,
    Endpoint,
    Heartbeat,
    Held,
    Hello,
    Keep,
    Kept,
    Mark,
    Marked,
    Pass,
    Refused,
    Renew,
    RunSpec,
    SessionCert,
    Snapshotted,
    StageFault,
    StageOffer,
    StageStatus,
    Suspect,
    ToVolunteer,
    Trim,
    Welcome,
)
from peer.ratelimit import Limiter
from tests.memory_transport import Network

_DECODER: msgspec.msgpack.Decoder[ToVolunteer] = msgspec.msgpack.Decoder(ToVolunteer)


class _Hosted:
    def __init__(self, stage: Stage, links: Links, owner: MiniVolunteer) -> None:
        self.stage, self.links, self.owner = stage, links, owner
        self.marks: dict[int, asyncio.Future[bytes]] = {}
        self.news = asyncio.Event()
        self.named: Suspicion | None = None
        self.differing = 0
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            await self._compute()
        except EndsDiffer as error:
            assert error.src is not None
            self.links.report("apart", error.src, str(error))

    async def _compute(self) -> None:
        while True:
            self.news.clear()
            while (frame := self.links.get_nowait(self.stage.tick + TICKS_TAKEN)) is not None:
                self.stage.offer(frame)
            if (waiter := self.marks.pop(self.stage.tick, None)) is not None:
                waiter.set_result(to_bytes(self.stage.snapshot()))
            sent = self.stage.advance()
            what, messages = self.stage.suspicion, self.owner.messages
            if what is not None and what is not self.named and messages is not None:
                self.named, me = what, self.links.me
                said = Suspect(run=self.links.run.hex(), stage=me.stage, incarnation=me.incarnation, what=what)
                await self.owner.tell(messages, said)
            if self.links.differing() > self.differing and messages is not None:
                await self._tell_differing(messages)
            for out in sent or ():
                await self.links.send(self.owner.lie(out))
            await (self.news.wait() if sent is None else asyncio.sleep(0))

    async def _tell_differing(self, messages: MessageStream[ToVolunteer]) -> None:
        self.differing, me = self.links.differing(), self.links.me
        said = StageStatus(
            run=self.links.run.hex(),
            stage=me.stage,
            incarnation=me.incarnation,
            tick=self.stage.tick,
            differing=self.differing,
        )
        await self.owner.tell(messages, said)

    def on_event(self, event: LinkEvent) -> None:
        """As an executor does."""
        if event.code == "apart" and (messages := self.owner.messages) is not None:
            me, reason = self.links.me, f"stage {event.stage}: {event.reason}"
            said = StageFault(
                run=self.links.run.hex(),
                stage=me.stage,
                incarnation=me.incarnation,
                code="apart",
                reason=reason,
                peer=event.peer,
            )
            self.told = asyncio.ensure_future(self.owner.tell(messages, said))


UNSAID_S = 1e-9  # of a trial step that a test does not care for; whoever reports none is refused


class MiniVolunteer:
    """`refuse`: what to answer to an offer of a stage. `trial_s`: what its trial step is said to take, below 0: it
    skips it; `unit_s`: and each forward and backward. `atoms`: what it says of its operators. `keeps`: it answers those
    who ask it to keep other stages' snapshots.

    `kill` ends it as a power cut would."""

    def __init__(
        self, network: Network, peer: str, folder: Path, refuse: dict[int, Refused | Accepted] | None = None
    ) -> None:
        self.network, self.peer, self.transport = network, peer, network.transport(peer)
        self.store, self.refuse = BlobStore(folder / peer), refuse or {}
        self.hosted: dict[int, _Hosted] = {}
        self.offered: list[int] = []
        self.adopted: list[int] = []
        self.addresses: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/1",)
        self.alive = True
        self.trial_s = 0.0
        self.unit_s = 0.0
        self.keeps = False
        self.atoms: tuple[AtomSeconds, ...] = ()
        self._now_s = 0.0
        self.compute: type[Compute] = Compute
        self.lie: Callable[[Frame], Frame] = lambda frame: frame
        self.renewed: asyncio.Queue[SessionCert] = asyncio.Queue()
        self.messages: MessageStream[ToVolunteer] | None = None

    async def start(self) -> None:
        await self.transport.serve(CONTROL, self._control)
        await serve_blobs(
            self.transport, self.store, lambda *_: True, limiter=Limiter(None), settings=ChannelSettings()
        )

    def _clock(self) -> float:
        """A unit's clock is read before and after it."""
        self._now_s += self.unit_s
        return self._now_s

    async def kill(self) -> None:
        self.alive = False
        self.network.dead.add(self.peer)
        for hosted in self.hosted.values():
            if hosted.task is not None:
                hosted.task.cancel()
        await self.transport.close()

    def record(self) -> PeerRecord:
        device = Device(
            kind="cpu", name="test", flops_per_s=1e9, memory_bytes_per_s=1e9, memory_bytes=1 << 30, free_bytes=1 << 30
        )
        return PeerRecord(peer=self.peer, version="0", addresses=self.addresses, devices=(device,))

    async def _control(self, stream: Stream) -> None:
        with contextlib.suppress(ConnectionError):  # the stream ended while something was said
            await self._serve(stream)

    async def _serve(self, stream: Stream) -> None:
        messages: MessageStream[ToVolunteer] = MessageStream(stream.reader, stream.writer, _DECODER)
        self.messages = messages
        hello = await messages.receive(timeout_s=60.0)
        assert isinstance(hello, Hello)
        spec = msgspec.msgpack.decode(hello.spec.body, type=RunSpec)
        await self._say(
            messages, Welcome(version=PROTOCOL_VERSION, peer=self.peer, devices=("cpu",), held=self._held())
        )
        epoch = msgspec.msgpack.decode(hello.cert.body, type=SessionCert).epoch
        marks: set[asyncio.Task[None]] = set()
        while (message := await messages.receive(timeout_s=60.0)) is not None:
            match message:
                case StageOffer():
                    await self._say(messages, await self._host(spec, message))
                    stage = msgspec.msgpack.decode(message.assignment.body, type=Assignment).stage
                    if stage in self.hosted:
                        await self._say(messages, StageStatus(run=spec.run, stage=stage, incarnation=0, tick=0))
                case Connect():
                    there = self.hosted[message.stage]
                    if epoch > there.links.epoch:  # another trainer: it hears again what is held back
                        there.named = None
                        there.news.set()
                    there.links.update(message.endpoints, message.plan, epoch=epoch)
                case Mark():
                    await self._say(messages, Marked(run=spec.run, stage=message.stage, tick=message.tick))
                    marks.add(task := asyncio.create_task(self._mark(messages, message)))
                    task.add_done_callback(marks.discard)
                case Keep() if self.keeps:
                    await fetch_blob(self.transport, self.store, spec.run, message.state, max_bytes=1 << 30)
                    await self._say(messages, Kept(run=message.run, stage=message.stage, tick=message.tick))
                case Renew():
                    self.renewed.put_nowait(msgspec.msgpack.decode(message.cert.body, type=SessionCert))
                case Heartbeat():
                    await self._say(messages, message)
                case Pass():
                    self.hosted[message.stage].stage.pass_frame(message.frame)
                    self.hosted[message.stage].news.set()
                case Trim(stage=-1):
                    pass
                case Trim():
                    self.hosted[message.stage].links.trim(message.tick)
                case Drop():
                    await self._drop(message.stage)

    def _held(self) -> tuple[Held, ...]:
        return tuple(Held(k, h.links.me.incarnation) for k, h in self.hosted.items())

    async def _host(self, spec: RunSpec, offer: StageOffer) -> Accepted | Refused:
        a = msgspec.msgpack.decode(offer.assignment.body, type=Assignment)
        if offer.adopt:
            there = self.hosted.get(a.stage)
            if there is None or there.links.me.incarnation != a.incarnation:
                return Refused(code="gone", reason="it does not run here", stage=a.stage)
            self.adopted.append(a.stage)
            return self._accepted(spec, there)
        self.offered.append(a.stage)
        if a.stage in self.refuse:
            return self.refuse[a.stage]
        dag = msgspec.json.decode(offer.opdag, type=OpDag)
        path = await fetch_blob(self.transport, self.store, spec.run, offer.state, max_bytes=1 << 30)
        stage = Stage(
            split(dag, offer.numerics.cuts)[a.stage],
            dag,
            offer.numerics,
            spec.optimizer,
            spec.seed,
            from_bytes(path.read_bytes()),
            first_tick=offer.first_tick,
            window=offer.window,
            clock=self._clock,
            compute=self.compute,
            guard=Guard(offer.watched),
        )
        me = Endpoint(stage=a.stage, peer=self.peer, endpoint=secrets.token_hex(8), incarnation=a.incarnation)
        hosted: _Hosted
        links = Links(
            self.transport,
            me,
            spec.run,
            a.epoch,
            bound=stage.bound,
            logged=lambda dst: offer.logged or dst == TRAINER,
            start_tick=offer.first_tick,
            notify=lambda: hosted.news.set(),
            on_event=lambda event: hosted.on_event(event),
        )
        await links.__aenter__()
        hosted = self.hosted[a.stage] = _Hosted(stage, links, self)
        hosted.task = asyncio.create_task(hosted.run())
        return self._accepted(spec, hosted)

    def _accepted(self, spec: RunSpec, hosted: _Hosted) -> Accepted:
        me = hosted.links.me
        return Accepted(
            run=spec.run,
            stage=me.stage,
            incarnation=me.incarnation,
            endpoint=me.endpoint,
            memory_bytes=1 << 20,
            tick=hosted.stage.tick,
            trial_forward_s=max(0.0, self.trial_s or UNSAID_S),
            atoms=self.atoms,
        )

    async def _mark(self, messages: MessageStream[ToVolunteer], mark: Mark) -> None:
        hosted = self.hosted[mark.stage]
        waiter = hosted.marks[mark.tick] = asyncio.get_running_loop().create_future()
        hosted.news.set()
        blob, size = self.store.put(await waiter)
        ref = BlobRef(blob, size, (self.peer,))
        await self.tell(messages, Snapshotted(run=mark.run, stage=mark.stage, incarnation=0, tick=mark.tick, state=ref))

    async def _drop(self, stage: int) -> None:
        hosted = self.hosted.pop(stage)
        if hosted.task is not None:
            hosted.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hosted.task
        await hosted.links.__aexit__(None, None, None)

    async def tell(self, messages: MessageStream[ToVolunteer], message: msgspec.Struct) -> None:
        """Out of turn: lost with the stream if that has ended."""
        with contextlib.suppress(ConnectionError):
            await self._say(messages, message)

    async def _say(self, messages: MessageStream[ToVolunteer], message: msgspec.Struct) -> None:
        if self.alive:
            await messages.send(message, timeout_s=60.0)

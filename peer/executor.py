"""The executor of one device: `python -m peer.executor FD`, started by a volunteer's daemon over a private socketpair.

Two threads. The loop owns streams, heartbeats and messages; the compute thread owns torch. Memory and threads are
capped before any stage comes. The end of the socketpair is the end of the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path

import msgspec
import torch
import uvloop

from dht import p2p
from dht.control import socket_path
from dht.errors import DhtError
from fusion_p2p.compute import Compute
from fusion_p2p.errors import EndsDiffer, FrameError, FusionError
from fusion_p2p.frame import TRAINER
from fusion_p2p.snapshot import chunks
from fusion_p2p.suspicion import Suspicion
from peer.blobs import BlobStore, fetch_blob
from peer.channel_io import executor_settings
from peer.control_io import MessageStream
from peer.devices import measure
from peer.errors import BlobError, RefusedError
from peer.executor_build import build, framework_compute
from peer.executor_compute import ComputeThread, Hosted, Key, Snapshot
from peer.executor_memory import MemoryLimit, gib, is_out_of_memory, limit_memory
from peer.executor_protocol import (
    MAX_PRIVATE_MESSAGE,
    Adopt,
    Beat,
    FromExecutor,
    HostStage,
    Lease,
    Ready,
    Start,
    ToExecutor,
    Upload,
)
from peer.link_ends import LinkEvent
from peer.links import Links
from peer.plain import reason
from peer.protocol import (
    Accepted,
    BlobRef,
    Connect,
    Drop,
    Endpoint,
    Mark,
    Marked,
    Pass,
    Refused,
    Snapshotted,
    StageFault,
    StageStatus,
    Suspect,
    Trim,
)
from peer.quiet import LONG_WAIT_S
from peer.ratelimit import Limiter
from peer.selfdial import SelfDial
from peer.spill import Spill

log = logging.getLogger("peer.executor")

BEAT_S = 2.0
SEND_S = 30.0
FETCH_S = 420.0  # for a stage's state; below the daemon's OFFER_S, which ends the whole executor
MAX_OBSERVED = 256  # between two beats
MAX_MARKS = 16  # of one stage that are not served yet
FOREVER_S = 1e9  # the daemon may have nothing to say for long; its end is seen as the end of the socketpair
_DECODER: msgspec.msgpack.Decoder[ToExecutor] = msgspec.msgpack.Decoder(ToExecutor)


class Executor:
    """`serve` runs until the daemon is gone."""

    def __init__(
        self,
        stream: MessageStream[ToExecutor],
        start: Start,
        transport: SelfDial,
        limit: MemoryLimit,
        operators: type[Compute],
    ) -> None:
        self._stream, self._start, self._transport, self._limit = stream, start, transport, limit
        self._settings = executor_settings(start.memory_bytes, start.spill_bytes, start.beat_s, start.dead_s)
        self._spill = Spill(Path(start.blobs), start.device.replace(":", "-"), start.spill_bytes)
        self._limiter = Limiter(start.upload_bytes_per_s)
        self._store = BlobStore(Path(start.blobs), start.blob_bytes)
        self._observed: list[tuple[str, int, float]] = []
        self._hosted: dict[Key, Hosted] = {}
        self._building: dict[Key, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._compute = ComputeThread(self._report_failure)
        self._operators = operators

    async def serve(self) -> None:
        self._compute.start()
        figures = await asyncio.wrap_future(self._compute.call(lambda: measure(self._start.device)))
        await self._say(
            Ready(
                device=figures.device, name=figures.name, flops_per_s=figures.flops_per_s,
                memory_bytes_per_s=figures.memory_bytes_per_s, memory_bytes=self._limit.cap_bytes,
                base_bytes=self._limit.base_bytes,
            )
        )  # fmt: skip
        beats = asyncio.create_task(self._beat())
        try:
            while (message := await self._stream.receive(timeout_s=FOREVER_S)) is not None:
                await self._on_message(message)
        finally:
            beats.cancel()

    async def _on_message(self, message: ToExecutor) -> None:
        match message:
            case HostStage():
                await self._drop((message.spec.run, message.assignment.stage))
                key = (message.spec.run, message.assignment.stage)
                self._building[key] = self._spawn(self._host(message))
            case Adopt():
                await self._adopt((message.run, message.stage))
            case Connect():
                self._connect(message)
            case Mark():
                self._mark(message)
            case Trim():
                if (links := self._links(message.run, message.stage)) is not None:
                    links.trim(message.tick)
            case Pass():
                if (passing := self._hosted.get((message.run, message.stage))) is not None:
                    stage, frame = passing.stage, message.frame
                    self._compute.call(lambda: stage.pass_frame(frame))
            case Drop():
                await self._drop((message.run, message.stage))
            case Lease():
                for (run, _), hosted in self._hosted.items():
                    if run == message.run and hosted.links is not None:
                        hosted.links.release() if message.held else hosted.links.hold()
            case Upload():
                self._limiter.set(message.bytes_per_s)
            case Start():
                log.warning("started twice: ignored")

    # --- a stage comes

    async def _host(self, message: HostStage) -> None:
        a, key = message.assignment, (message.spec.run, message.assignment.stage)
        try:
            hosted, accepted = await self._make(message)
        except RefusedError as error:
            answer = Refused(
                code=error.code, reason=str(error), stage=a.stage, needed=error.needed, cap=error.cap, run=a.run
            )
            await self._say(answer)
            return
        except Exception as error:  # the top of this task: whatever a stranger's offer provokes, it is answered
            log.exception("stage %d of run %s could not be made", a.stage, a.run)
            code = "busy" if isinstance(error, DhtError | OSError) else "admission"
            reason = f"stage {a.stage}: {type(error).__name__}: {error}"[:500]
            await self._say(Refused(code=code, reason=reason, stage=a.stage, run=a.run))
            return
        finally:
            if self._building.get(key) is asyncio.current_task():
                del self._building[key]
        hosted.accepted = accepted
        self._hosted[key] = hosted
        await asyncio.wrap_future(self._compute.call(lambda: self._compute.add(hosted)))
        await self._say(accepted)

    async def _make(self, message: HostStage) -> tuple[Hosted, Accepted]:
        a, run = message.assignment, message.spec.run
        try:
            async with asyncio.timeout(FETCH_S):
                path = await fetch_blob(
                    self._transport, self._store, run, message.state, max_bytes=self._limit.cap_bytes,
                    settings=self._settings,
                )  # fmt: skip
        except BlobError as error:
            raise RefusedError("state", f"stage {a.stage}: {error}") from error
        except TimeoutError as error:
            why = f"stage {a.stage}: its {message.state.size} bytes did not come within {FETCH_S:.0f} s"
            raise RefusedError("state", why) from error
        tables = Path(self._start.operators)
        job = self._compute.call(
            lambda: build(message, path, self._limit, self._start.threads, self._operators, tables)
        )
        built = await asyncio.wrap_future(job)
        hosted = Hosted((run, a.stage), built.stage, message.numerics.threads)
        hosted.stage_flops = built.stage_flops

        def suspect(what: Suspicion) -> None:
            said = Suspect(run=run, stage=a.stage, incarnation=a.incarnation, what=what)
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._say(said)))

        hosted.on_suspicion = suspect
        me = Endpoint(
            stage=a.stage, peer=self._transport.peer_id, endpoint=secrets.token_hex(16), incarnation=a.incarnation
        )
        hosted.links = Links(
            self._transport, me, run, a.epoch, bound=built.stage.bound, start_tick=message.first_tick,
            logged=lambda dst: message.logged or dst == TRAINER,  # losses and reports are few bytes: always kept
            settings=self._settings, limiter=self._limiter, spill=self._spill, notify=self._compute.wake,
            on_event=lambda event: self._on_event(hosted, event), observed=self._observe,
        )  # fmt: skip
        await hosted.links.__aenter__()
        accepted = Accepted(
            run=run, stage=a.stage, incarnation=a.incarnation, endpoint=me.endpoint, memory_bytes=built.memory_bytes,
            trial_forward_s=built.times.forward_s, trial_backward_s=built.times.backward_s, atoms=built.atoms,
        )  # fmt: skip
        return hosted, accepted

    async def _adopt(self, key: Key) -> None:
        """Its trainer is back, in a new session; a Connect under that session's epoch follows."""
        hosted = self._hosted.get(key)
        if hosted is None or hosted.accepted is None or hosted.links is None:
            reason = f"stage {key[1]} does not run here (any more)"
            return await self._say(Refused(code="gone", reason=reason, stage=key[1], run=key[0]))
        hosted.links.release()
        await self._say(msgspec.structs.replace(hosted.accepted, tick=hosted.stage.tick))

    def _connect(self, message: Connect) -> None:
        hosted = self._hosted.get((message.run, message.stage))
        if hosted is None or hosted.links is None:
            return
        hosted.links.update(message.endpoints, message.plan, epoch=message.epoch)

    # --- and goes

    async def _drop(self, key: Key) -> None:
        if (building := self._building.pop(key, None)) is not None:
            building.cancel()
            await asyncio.wait({building})
        if (hosted := self._hosted.pop(key, None)) is not None:
            await asyncio.wrap_future(self._compute.call(lambda: self._compute.remove(hosted)))
            if hosted.links is not None:
                await hosted.links.__aexit__(None, None, None)

    def _report_failure(self, hosted: Hosted, error: Exception) -> None:
        """Called on the compute thread."""
        self._loop.call_soon_threadsafe(self._failed, hosted, error)

    def _failed(self, hosted: Hosted, error: Exception) -> None:
        """A stage that the compute thread has taken out."""
        self._tell_failure(hosted, error)
        if self._hosted.get(hosted.key) is hosted:
            self._spawn(self._drop(hosted.key))

    def _tell_failure(self, hosted: Hosted, error: Exception) -> None:
        if isinstance(error, EndsDiffer) and error.src is not None and hosted.links is not None:
            return hosted.links.report("apart", error.src, str(error))
        if is_out_of_memory(error):
            code, reason = "memory", f"stage {hosted.key[1]} ran out of memory, cap {gib(self._limit.cap_bytes)}"
        elif isinstance(error, FrameError) and error.src is not None and error.src != TRAINER:
            code, reason = "died", f"stage {error.src} sent what does not fit: {error}"
            if hosted.links is not None:
                hosted.links.report("frame", error.src, str(error))  # so that not the victim alone is known
        elif isinstance(error, FrameError):
            code, reason = "frame", str(error)
        elif isinstance(error, FusionError):
            code, reason = "died", str(error)
        else:
            log.error("stage %d of run %s failed", hosted.key[1], hosted.key[0], exc_info=error)
            code, reason = "died", f"{type(error).__name__}: {error}"
        self._fault(hosted, code, reason)

    def _on_event(self, hosted: Hosted, event: LinkEvent) -> None:
        log.info("stage %d and %d: %s %s", hosted.key[1], event.stage, event.code, event.reason)
        if event.code == "broken":
            return
        code = {"lost": "peer-lost", "frame": "peer-frame"}.get(event.code, event.code)
        self._fault(hosted, code, f"stage {event.stage}: {event.reason}", event.peer)

    def _fault(self, hosted: Hosted, code: str, reason: str, peer: str = "") -> None:
        run, stage = hosted.key
        incarnation = hosted.links.me.incarnation if hosted.links is not None else 0
        fault = StageFault(run=run, stage=stage, incarnation=incarnation, code=code, reason=reason[:500], peer=peer)
        self._spawn(self._say(fault))

    # --- snapshots

    def _mark(self, mark: Mark) -> None:
        hosted = self._hosted.get((mark.run, mark.stage))
        if hosted is None:
            return

        def deliver(snapshot: Snapshot | Exception) -> None:
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._store_snapshot(hosted, mark, snapshot)))

        if len(hosted.marks) >= MAX_MARKS:
            return deliver(ValueError(f"{MAX_MARKS} marks wait already: tick {mark.tick} is one too many"))
        hosted.marks[mark.tick] = deliver  # at once, though the compute thread be busy: the tick opens after our answer
        self._compute.wake()
        self._spawn(self._say(Marked(run=mark.run, stage=mark.stage, tick=mark.tick)))

    async def _store_snapshot(self, hosted: Hosted, mark: Mark, snapshot: Snapshot | Exception) -> None:
        if isinstance(snapshot, Exception):
            return self._fault(hosted, "mark", str(snapshot))
        try:
            blob, size = await asyncio.to_thread(lambda: self._store.put(chunks(snapshot)))
        except (OSError, BlobError) as error:
            return self._fault(hosted, "mark", f"its snapshot at tick {mark.tick} cannot be written: {reason(error)}")
        ref = BlobRef(blob, size, (self._transport.peer_id,))
        incarnation = hosted.links.me.incarnation if hosted.links is not None else 0
        await self._say(Snapshotted(run=mark.run, stage=mark.stage, incarnation=incarnation, tick=mark.tick, state=ref))

    # --- the daemon

    def _observe(self, peer: str, count: int, seconds: float) -> None:
        if len(self._observed) < MAX_OBSERVED and peer != self._transport.peer_id:
            self._observed.append((peer, count, seconds))

    async def _beat(self) -> None:
        while True:
            observed, self._observed = tuple(self._observed), []
            await self._say(Beat(resident_bytes=self._limit.held(), stages=tuple(self._hosted), observed=observed))
            for hosted in list(self._hosted.values()):
                if hosted.links is not None:
                    await self._say(self._status(hosted, hosted.links))
            await asyncio.sleep(BEAT_S)

    def _status(self, hosted: Hosted, links: Links) -> StageStatus:
        waiting = hosted.waiting_for
        waited_s = time.monotonic() - hosted.waiting_since if waiting else 0.0
        for wait in links.waits():
            if wait.waited_s > LONG_WAIT_S and waiting:
                where = f"stage {wait.stage} at {wait.peer[-8:]}, {wait.held_bytes} bytes held"
                waiting = f"{waiting}; {wait.phase} to {where}: {wait.reason}"
        return StageStatus(
            run=hosted.key[0], stage=hosted.key[1], incarnation=links.me.incarnation, tick=hosted.stage.tick,
            waiting_for=waiting[:300], waited_s=waited_s, bytes_sent=links.bytes_sent(),
            resident_bytes=self._limit.held() + links.held_bytes(), held_up_s=hosted.held_up_s,
            accepted=links.accepted(hosted.stage_flops), outbox_share=links.outbox_share(),
            differing=links.differing(),
        )  # fmt: skip

    async def _say(self, message: FromExecutor) -> None:
        await self._stream.send(message, timeout_s=SEND_S)

    def _links(self, run: str, stage: int) -> Links | None:
        hosted = self._hosted.get((run, stage))
        return None if hosted is None else hosted.links

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the executor failed", exc_info=error)


def _prepare_torch(start: Start) -> None:
    """Fixed for the process: what changes bits is not left to the environment (DESIGN section 7)."""
    torch.set_num_threads(start.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


async def run(connection: socket.socket) -> None:
    """Until the daemon closes its end."""
    reader, writer = await asyncio.open_connection(sock=connection)
    stream: MessageStream[ToExecutor] = MessageStream(reader, writer, _DECODER, limit=MAX_PRIVATE_MESSAGE)
    start = await stream.receive(timeout_s=60.0)
    if not isinstance(start, Start):
        raise SystemExit("the daemon did not say how to start")
    _prepare_torch(start)
    operators = framework_compute(start.framework)  # before the limit: its libraries are no stage's memory
    inner = await p2p.attach(start.control_address)
    transport = SelfDial(inner, socket_path(start.control_address).parent)
    try:
        await Executor(
            stream, start, transport, limit_memory(start.device, start.memory_bytes, start.vram_bytes), operators
        ).serve()
    except (ConnectionError, TimeoutError, DhtError) as error:
        log.info("the daemon is gone: %s", error)


def main() -> None:
    """The process: its one argument is the descriptor of the daemon's socket."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(False)
    uvloop.run(run(connection))
    os._exit(0)  # the compute thread may be deep in torch: nothing it still does matters to anybody


if __name__ == "__main__":
    main()

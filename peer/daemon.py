"""A volunteer's daemon: p2pd, the board, the control server, one executor per device. Small: it never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from dht import door, p2p, records
from dht.control import socket_path
from dht.errors import DhtError, RecordError
from dht.fencing import Fencing, seen_at
from dht.home import remember_swarm
from dht.node import Board
from dht.p2p import P2PTransport
from dht.receipts import Receipt
from peer import caps, preflight
from peer.blobs import BlobStore, serve_blobs
from peer.buddy import Buddy
from peer.channel_io import ChannelSettings
from peer.courtesy import Courtesy, Watch, look, untold
from peer.daemon_record import board_names, device_view, leader_score, peer_record
from peer.daemon_session import ControlServer
from peer.devices import OPERATORS
from peer.executor_process import ExecutorProcess
from peer.executor_protocol import Beat, FromExecutor, Start
from peer.invitation import invite_line
from peer.joining import join_patiently
from peer.local_control import Command, LocalControl, PeerStatus, StageView
from peer.pipe_service import REACH_S, PipeService, reach_of
from peer.pipes import hosts_of
from peer.policy import LEASE_S, Policy, within_hours
from peer.preflight import Finding
from peer.protocol import CONTROL, RunSpec
from peer.ratelimit import Limiter
from peer.receipts import receipts
from peer.selfdial import SelfDial
from peer.volunteer import GRACE_S, Volunteer, minute_of_day

log = logging.getLogger("peer.daemon")

ROUND_S = 2.0
LEAVE_S, STOP_S = 8.0, 3.0
BLOB_AGE_S = 24 * 3600.0


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `fusion-peer join` was told, checked. `upload_bytes_per_s` None: no cap; `vram_bytes` 0: the whole card."""

    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = p2p.ANY_ADDRESS
    home: Path
    name: str = ""
    place: str = ""
    devices: tuple[str, ...] = ("cpu",)
    framework: str = "torch"
    memory_bytes: int
    vram_bytes: int = 0
    threads: int
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    disk_bytes: int | None = None
    monthly_bytes: int | None = None
    relay_bytes_per_s: float | None = None
    courtesy: Courtesy = Courtesy()
    give_up_s: float = 0.0
    policy: Policy
    beat_s: float = 2.0
    dead_s: float = 8.0


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent process is told, as one JSON line each: first when the peer has joined, then once its devices are
    measured (event "devices")."""

    event: Literal["joined", "devices"]
    peer: str
    addresses: tuple[str, ...]
    pid: int


class Daemon:
    """`run` joins, serves until `leave` is called, then leaves within LEAVE_S."""

    _volunteer: Volunteer

    def __init__(
        self,
        options: JoinOptions,
        on_ready: Callable[[Ready], None],
        on_findings: Callable[[list[Finding]], None] = lambda findings: None,
        on_asked: Callable[[RunSpec], None] = lambda spec: None,
        on_waiting: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_waiting = on_waiting
        self._on_asked = on_asked
        self._options, self._on_ready, self._on_findings = options, on_ready, on_findings
        self._leaving = asyncio.Event()
        self.joined = False
        self._started = time.monotonic()
        self._told_devices = False
        self._published: records.PeerRecord | None = None
        self._receipts: dict[str, Receipt] = {}  # by run
        self._addresses: tuple[str, ...] = ()
        self._seen_peers: int | None = None
        self._fencing: Fencing | None = None
        self._courtesy = Watch(options.courtesy)
        self._month = caps.MonthlyCap(options.home, options.monthly_bytes)
        self._p2pd_pid: Callable[[], int | None] = lambda: None
        self._reach: Literal["", "direct", "relay", "none"] = ""
        self._pipes: PipeService | None = None
        self._told: set[str] = set()  # addresses published by this process
        self._since = 0.0  # swarm time
        self._twin = ""

    def leave(self) -> None:
        self._leaving.set()

    async def _until_leaving(self) -> None:
        await self._leaving.wait()

    async def run(self) -> None:
        """Raises DhtError (bad or dead address, port or identity in use) before anything has been started for long."""
        o = self._options
        transport = await p2p.start(
            o.home / "identity",
            host_addresses=o.listen,
            bootstrap=o.bootstrap,
            join=False,
            download_bytes_per_s=caps.download_shares(o.download_bytes_per_s, o.relay_bytes_per_s, len(o.devices)),
        )
        dial = SelfDial(transport, socket_path(transport.control_address).parent)
        try:
            self._addresses = await transport.addresses()
            self._p2pd_pid = lambda: transport.p2pd_pid
            await preflight.refuse_second_host(transport, None, o.home / "identity")
            joined = await join_patiently(transport, give_up_s=o.give_up_s, say=self._on_waiting)
            board = await Board.start(transport, alone=not joined)
            try:
                if o.bootstrap:
                    await preflight.refuse_second_host(transport, board, o.home / "identity")
                await self._serve(transport, dial, board)
            finally:
                await board.close()
        finally:
            await dial.close()

    async def _serve(self, transport: P2PTransport, dial: SelfDial, board: Board) -> None:
        o = self._options
        store = BlobStore(o.home / "blobs", caps.blob_bytes(o.disk_bytes))
        _clear_old(o.home / "blobs")
        executors: dict[str, ExecutorProcess] = {}
        settings = ChannelSettings(beat_s=o.beat_s, dead_s=o.dead_s)
        self._volunteer = volunteer = Volunteer(
            transport.peer_id, o.home, o.policy, store, executors, lambda: self._publish(board),
            buddy=Buddy(dial, store, o.home, settings),
        )  # fmt: skip
        volunteer.asked = self._on_asked
        for name, device in board_names(o.devices):
            executors[name] = self._executor(name, device, transport, len(o.devices))
        blob_rate, _ = caps.upload_shares(o.upload_bytes_per_s, o.relay_bytes_per_s, len(o.devices))
        await serve_blobs(dial, store, volunteer.may_fetch, limiter=Limiter(blob_rate), settings=settings)

        async def range_of(peer: str) -> str:
            return door.range_of(await seen_at(board, peer))

        control = ControlServer(volunteer, beat_s=o.beat_s, dead_s=o.dead_s, range_of=range_of)
        await dial.serve(CONTROL, control.handle)
        self._pipes = await PipeService.start(
            transport, board, dial, offer_bytes_per_s=o.relay_bytes_per_s,
            refuses=lambda: volunteer.policy.over_cap, changed=lambda: self._publish(board),
        )  # fmt: skip
        local = LocalControl(dial.folder / "local", o.home, transport.peer_id, lambda c: self._answer(c, board))
        await local.start()
        score = leader_score(bool(o.policy.hours), o.upload_bytes_per_s is not None)
        _, probe_rate = caps.upload_shares(o.upload_bytes_per_s, o.relay_bytes_per_s, 1)
        self._fencing = await Fencing.start(
            board, score=score, busy=lambda: bool(volunteer.stages), upload_bytes_per_s=probe_rate
        )
        remember_swarm(self._addresses + o.bootstrap)
        self._since = board.clock.now()
        self._publish(board)
        self.joined = True
        self._say_ready("joined")
        runs = [asyncio.create_task(e.run(), name=f"executor {n}") for n, e in executors.items()]
        rounds = asyncio.create_task(self._rounds(transport, board), name="rounds")
        leaving = asyncio.create_task(self._until_leaving(), name="leaving")
        look = asyncio.create_task(self._preflight(transport, board), name="preflight")
        try:
            done, _ = await asyncio.wait({leaving, rounds, *runs}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # a defect: the daemon must not live on without one of its parts
        finally:
            await self._wind_up([leaving, rounds, look, *runs], local, board)

    async def _preflight(self, transport: P2PTransport, board: Board) -> None:
        """How the swarm sees this peer: told once, and published."""
        if self._fencing is None:
            return
        found = preflight.host_findings(self._options.home, memory_bytes=self._options.memory_bytes)
        if self._options.courtesy.asked and (missing := untold(self._options.courtesy, await asyncio.to_thread(look))):
            found.append(Finding(name="courtesy", ok=None, text=missing))
        try:
            found += await preflight.network_findings(transport, board, self._fencing)
        except DhtError as error:
            found.append(Finding(name="swarm", ok=False, text=str(error)))
        self._on_findings(found)
        word = preflight.reach_word(found)
        while not word:  # nobody was there to try it
            await asyncio.sleep(REACH_S)
            with contextlib.suppress(DhtError):
                word, _ = await reach_of(transport)
        self._reach = word
        if self._pipes is not None:
            self._pipes.found(word, self._addresses)
        self._publish(board)

    async def _wind_up(self, tasks: list[asyncio.Task[None]], local: LocalControl, board: Board) -> None:
        """Tell trainers and the board, end the executors; bounded, whatever others do."""
        try:
            async with asyncio.timeout(LEAVE_S - STOP_S):
                await self._volunteer.leave("the volunteer leaves", GRACE_S)
                board.publish(msgspec.structs.replace(self._record(), state="left", work=()))
                await board.flush(timeout_s=1.0)
        except (DhtError, TimeoutError) as error:
            log.info("leaving: %s", error)
        if self._fencing is not None:
            await self._fencing.close()
        if self._pipes is not None:
            await self._pipes.close()
        local.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_S)

    def _executor(self, name: str, device: str, transport: P2PTransport, count: int) -> ExecutorProcess:
        o = self._options
        _, share = caps.upload_shares(o.upload_bytes_per_s, o.relay_bytes_per_s, count)
        start = Start(
            control_address=transport.control_address, device=device, framework=o.framework,
            threads=max(1, o.threads // count),
            memory_bytes=o.memory_bytes // count, vram_bytes=o.vram_bytes, upload_bytes_per_s=share,
            blobs=str(o.home / "blobs"), blob_bytes=caps.blob_bytes(o.disk_bytes),
            spill_bytes=caps.spill_bytes(o.home, o.disk_bytes) // count, operators=str(o.home / OPERATORS),
            beat_s=o.beat_s, dead_s=o.dead_s,
        )  # fmt: skip
        return ExecutorProcess(
            start,
            log_file=o.home / f"executor-{name.replace(':', '-')}.log",
            on_message=self._on_executor,
            on_death=lambda death: self._volunteer.on_death(name, death),
        )

    def _on_executor(self, message: FromExecutor) -> None:
        if isinstance(message, Beat) and self._fencing is not None:
            for peer, count, seconds in message.observed:
                self._fencing.observe(peer, count, seconds)
        self._volunteer.on_message(message)

    # --- rounds

    async def _rounds(self, transport: P2PTransport, board: Board) -> None:
        """Leases, hours, the board's view of us and ours of it."""
        at = 0
        while True:
            volunteer = self._volunteer
            await volunteer.check_leases(self._options.dead_s, LEASE_S)
            volunteer.check_offers()
            if self._courtesy.due(time.monotonic()):
                await asyncio.to_thread(self._courtesy.update, time.monotonic())
            self._look_at_caps()
            if volunteer.stages and not self._may_compute():
                why = volunteer.policy.over_cap or f"this volunteer computes at {volunteer.policy.hours} only"
                await volunteer.evict(why, GRACE_S)
            self._publish(board)
            if at % 4 == 0:
                self._publish_receipts(board)
            if at % 8 == 1:
                try:
                    await self._look_around(transport, board)
                except DhtError as error:
                    log.info("board: %s", error)
            at += 1
            await asyncio.sleep(ROUND_S)

    async def _look_around(self, transport: P2PTransport, board: Board) -> None:
        peers = await board.peers(timeout_s=5.0)
        self._seen_peers = len(peers)
        self._addresses = await transport.addresses()  # a relay may have been found, or lost
        twin = preflight.twin(peers, transport.peer_id, self._told, self._since, self._options.home / "identity")
        if twin != self._twin:
            log.warning("%s", twin or "the other peer with this identity is gone")
            self._twin = twin

    def _look_at_caps(self) -> None:
        o, v = self._options, self._volunteer
        self._month.look(self._p2pd_pid(), caps.this_month())
        why = self._month.over() or caps.over_disk(o.home / "blobs", o.disk_bytes) or self._courtesy.reason
        if why != v.policy.over_cap:
            log.warning("%s", f"paused: {why}" if why else "within its caps again")
            v.policy = msgspec.structs.replace(v.policy, over_cap=why)

    def _may_compute(self) -> bool:
        policy = self._volunteer.policy
        return not policy.paused and not policy.over_cap and within_hours(policy.hours, minute_of_day())

    def _state(self) -> Literal["free", "busy", "paused"]:
        if not self._may_compute():
            return "paused"
        return "busy" if self._volunteer.stages else "free"

    def _record(self) -> records.PeerRecord:
        where = self._addresses[:8] if self._pipes is None else self._pipes.addresses(self._addresses)
        self._told |= set(where)
        relay = self._options.relay_bytes_per_s if self._reach == "direct" else None
        return peer_record(
            self._volunteer, self._state(), where, self._reach, self._options.place,
            relay_mbps=(relay or 0) * 8 / 1e6, disk_bytes=self._options.disk_bytes or 0,
        )  # fmt: skip

    def _publish(self, board: Board) -> None:
        record = self._record()
        if record != self._published:
            self._published = record
            try:
                board.publish(record)
            except RecordError as error:  # of a name too long, say: trainers find this peer no more, but it serves
                log.warning("the board does not take this peer's record: %s", error)
        if not self._told_devices and all(d.flops_per_s > 0 for d in record.devices):
            self._told_devices = True
            self._say_ready("devices")

    def _publish_receipts(self, board: Board) -> None:
        now = {r.run: r for r in receipts(self._volunteer.peer_id, self._volunteer.stages)}
        for run in self._receipts.keys() - now.keys():
            board.withdraw(self._receipts[run])
        for run, receipt in now.items():
            if receipt != self._receipts.get(run):
                board.publish(receipt)
        self._receipts = now

    def _say_ready(self, event: Literal["joined", "devices"]) -> None:
        self._on_ready(Ready(event=event, peer=self._volunteer.peer_id, addresses=self._addresses, pid=os.getpid()))

    # --- the local socket

    async def _answer(self, command: Command, board: Board) -> PeerStatus:
        v = self._volunteer
        if command.command in ("pause", "resume"):
            v.policy = msgspec.structs.replace(v.policy, paused=command.command == "pause")
            if v.policy.paused:
                await v.evict("the volunteer was paused by its owner", GRACE_S)
            self._publish(board)
        if command.command == "leave":
            self.leave()
        if command.command == "invite":
            return msgspec.structs.replace(self.status(), invite=invite_line(self._addresses))
        return self.status()

    def status(self) -> PeerStatus:
        v, pipes, (fence, leader) = self._volunteer, self._pipes, self._stands()
        host = None if pipes is None else pipes.host
        rests_at = hosts_of(() if pipes is None else pipes.pipes.addresses())
        return PeerStatus(
            peer=v.peer_id, state=self._state(), addresses=self._addresses, name=self._options.name,
            uptime_s=time.monotonic() - self._started,
            devices=tuple(device_view(name, e) for name, e in v.executors.items()),
            stages=tuple(
                StageView(
                    run=run, name=s.spec.name, owner=s.spec.owner.hex(), stage=stage, device=s.assignment.device,
                    tick=s.status.tick if s.status else 0, waiting_for=s.status.waiting_for if s.status else "",
                    bytes_sent=sum(s.status.bytes_sent.values()) if s.status else 0,
                )
                for (run, stage), s in sorted(v.stages.items())
            ),
            peers=self._seen_peers, daemon_bytes=int(psutil.Process().memory_info().rss), hours=v.policy.hours,
            runs=v.policy.owners, fence=fence, leader=leader, reach=self._reach, rests_at=rests_at,
            pipes=0 if host is None else host.pipes, piped_bytes=0 if host is None else host.carried.total(),
            paused_for=v.policy.over_cap, warning=self._twin, swarm=os.environ.get("FUSION_SWARM_NAME", ""),
            private=bool(os.environ.get("FUSION_SWARM_KEY")),
        )  # fmt: skip

    def _stands(self) -> tuple[str, str]:
        stand = None if self._fencing is None else self._fencing.stand
        return ("", "") if stand is None or stand.fence == records.NO_FENCE else (stand.fence, stand.leader)


def _clear_old(folder: Path) -> None:
    """Snapshots of a peer that died long ago, and parts of ones never finished."""
    oldest = time.time() - BLOB_AGE_S
    for path in folder.iterdir():
        if path.name.startswith(".") or path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)

"""`Board`: the swarm's bulletin board in this process, on the caller's event loop.

    board = await Board.start(transport)
    board.publish(PeerRecord(...))            # stored now and again every 15 s until withdrawn; never blocks
    await board.peers(); await board.runs(); await board.run(run_id)

A hivemind `DHTNode` attached to the transport's p2pd. Never `hivemind.DHT`, which forks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dht import _guards, addresses, records
from dht._hivemind import node_parts
from dht.clock import SwarmClock, swarm_clock
from dht.errors import DhtError, InputError, SwarmUnreachable, TransportError
from dht.fence_records import LedLately
from dht.identity import peer_id_bytes, peer_id_text
from dht.p2p import P2PTransport
from dht.reads import BoardReads
from dht.receipts import Receipt
from dht.records import NO_FENCE, REFRESH_S, TTL_S, PeerRecord, Record, RunRecord, Signer
from dht.runs import RunView, split_run
from dht.storing import Replicas
from dht.validator import make_validator

log = logging.getLogger("dht.node")

STORE_TIMEOUT_S = 15.0
START_S = 60.0  # a peer that is not there costs a few seconds; the rest is for a machine that is very busy
_RPC_S = 3.0  # a silent node costs this much per look-up
AROUND_S = 360.0  # hivemind's own `refresh_timeout` does nothing, so a random id is looked up this often
_CLOCK_S = 300.0
_REMEMBERED = 32
_FIRST_TRIES = 3
_OTHERS_S = 8.0, 120.0  # between tries of bootstrap addresses that do not answer: at first, later
_MIN_INTERVAL_S = 1.0  # a record that changes faster is stored this often


@dataclass(slots=True)
class _Own:
    """A record that this board keeps on the swarm."""

    record: Record
    signer: Signer
    tried_at: float = float("-inf")  # loop time of the last store
    changed: bool = True


class Board(BoardReads):
    """Made by `Board.start`; the constructor only assigns."""

    def __init__(self, transport: P2PTransport, *, client_only: bool, clock: SwarmClock) -> None:
        self.transport, self.clock = transport, clock
        self._client_only = client_only
        self._own: dict[tuple[str, bytes], _Own] = {}
        self._known: dict[str, tuple[str, ...]] = {}  # peers seen connected, to come back to after an outage
        self._node: Any = None
        self._p2p: Any = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stored = asyncio.Condition()
        self._replaced = asyncio.Lock()
        self._replicas = Replicas()
        self._fences = LedLately()
        self._membership = (NO_FENCE, "", 0)
        self._nodes = 0  # known when last looked
        self._others_s, self._next_others = _OTHERS_S[0], float("-inf")

    @classmethod
    async def start(
        cls, transport: P2PTransport, *, client_only: bool = False, alone: bool = False, timeout_s: float = START_S
    ) -> Board:
        """Joins the board of the swarm that `transport` is connected to; alone if it has no bootstrap address, or if
        `alone` says that it may begin without the peers there.

        `client_only`: read, keep nothing for others. Raises SwarmUnreachable if the transport has bootstrap addresses
        and none of their peers answers on the board, TransportError if p2pd does not.
        """
        board = cls(transport, client_only=client_only, clock=swarm_clock)
        node_parts()  # loaded before the clock runs: seconds where many processes start at once
        try:
            async with asyncio.timeout(timeout_s):
                await board._attach(None)
                await board._meet_first(alone)
        except TimeoutError as error:
            await board.close()
            raise TransportError(f"the board of peer {transport.peer_id} did not start in {timeout_s:g} s") from error
        except (OSError, EOFError, node_parts().P2PDaemonError) as error:
            await board.close()
            raise TransportError(f"the p2pd of peer {transport.peer_id} gives no board a place: {error}") from error
        except BaseException:
            await board.close()
            raise
        transport.on_restart(board._reattach)
        board._task = asyncio.create_task(board._keep(), name="board")
        return board

    # --- writing

    def publish(self, record: Record, signer: Signer | None = None) -> None:
        """Keeps `record` on the board from now on, in place of the one at the same key and subject.

        `signer` None: this peer's identity. Returns at once; `flush` waits until it is stored. Raises RecordError for
        a record that others would refuse, InputError if this transport has no identity to sign with.
        """
        if signer is None:
            if self.transport.identity is None:
                raise InputError(
                    "a transport made by attach() has no identity; publish from the process that started it"
                )
            signer = Signer(self.transport.identity)
        now = self.clock.now()
        record = self._placed(_published(record, now))
        records.seal(record, signer, expiration=now + TTL_S)
        place = records.place(record)
        known = self._own.get(place)
        tried_at = float("-inf") if known is None else known.tried_at
        self._own[place] = _Own(record, signer, tried_at)
        self._wake.set()

    def set_membership(self, fence: str, leader: str, term: int) -> None:
        """This peer's fence (NO_FENCE for none): its PeerRecord is published there, and says who leads it."""
        if (fence, leader, term) == self._membership:
            return
        self._membership = (fence, leader, term)
        for place, own in list(self._own.items()):
            if isinstance(own.record, PeerRecord):
                del self._own[place]
                self.publish(own.record, own.signer)

    def _placed(self, record: Record) -> Record:
        if not isinstance(record, PeerRecord) or record.peer != self.transport.peer_id:
            return record
        fence, leader, term = self._membership
        return msgspec.structs.replace(record, fence=fence, leader=leader, term=term)

    def publish_run(self, view: RunView, signer: Signer) -> None:
        """Publishes a run's head and parts; parts of an earlier, larger plan are refreshed no longer."""
        new = split_run(view)
        places = {records.place(record) for record in new}
        subject = view.run.owner + bytes.fromhex(view.run.run)
        for place in [p for p in self._own if p[1].startswith(subject) and p not in places]:
            del self._own[place]
        for record in new:
            self.publish(record, signer)

    def withdraw(self, record: Record) -> None:
        """Refreshes `record` no longer; it is gone within a TTL (45 s). To leave at once publish state "left" first."""
        self._own.pop(records.place(self._placed(record)), None)

    async def flush(self, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Returns when everything published is stored at one replica at least; TransportError after `timeout_s`."""
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s), self._stored:
                await self._stored.wait_for(lambda: not any(own.changed for own in self._own.values()))
        except TimeoutError as error:
            waiting = ", ".join(key for (key, _), own in self._own.items() if own.changed)
            raise TransportError(f"not stored on the board after {timeout_s:g} s: {waiting}") from error

    def keep_nothing(self) -> None:
        """This peer cannot be dialled: from now on others are not told of its node, and forget it when it is silent."""
        self._client_only = True
        protocol = self._node.protocol
        protocol.client_mode, protocol.node_info = True, node_parts().dht_pb2.NodeInfo()

    def strangers(self, count: int) -> list[str]:
        """Some peers of the swarm at random, as this node's routing table knows them; they may have left."""
        known = [peer_id_text(p.to_bytes()) for p in self._node.protocol.routing_table.uid_to_peer_id.values()]
        return random.sample(known, min(count, len(known)))

    # --- lifecycle

    async def close(self) -> None:
        """Leaves the board; what was published expires. Does not close the transport."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._detach()

    async def _attach(self, storage: Any) -> None:
        parts = node_parts()
        path = self.transport.control_address
        self._p2p = await parts.P2P.replicate(parts.Multiaddr(path))
        control = self._p2p._client.control
        for task in (control._read_task, control._write_task):
            task.add_done_callback(_note_end)
        _guards.doors[peer_id_bytes(self.transport.peer_id)] = self.transport.door
        own_id = parts.DHTID(_guards.node_id_of(peer_id_bytes(self.transport.peer_id)))
        # hivemind's caches stay off: they answer with what was, and others could fill them. Blacklisting is constant:
        # its exponential form keeps a peer out for minutes after an outage.
        self._node = await parts.DHTNode.create(
            p2p=self._p2p,
            node_id=own_id,
            client_mode=self._client_only,
            record_validator=make_validator(parts.RecordValidatorBase, self.clock),
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_size=64,
            reuse_get_requests=False,
            wait_timeout=_RPC_S,
            blacklist_time=5.0,
            backoff_rate=1.0,
        )
        if storage is not None:
            self._node.protocol.storage = storage

    async def _detach(self) -> None:
        if self._node is not None and not self._client_only:
            with contextlib.suppress(Exception):  # hivemind raises many kinds here, and p2pd may be gone already
                async with asyncio.timeout(2.0):
                    await self._node.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()

    async def _reattach(self) -> None:
        """After p2pd came back: its unary handlers and our persistent connection died with it."""
        async with self._replaced:
            storage = self._node.protocol.storage
            self._node.is_alive = False
            self._replicas.forget()
            await self._p2p.shutdown()
            async with asyncio.timeout(15.0):
                await self._attach(storage)
            with contextlib.suppress(DhtError):
                await self._reach_out()
            await self._meet(required=False)
        for own in self._own.values():
            own.changed = True
        self._wake.set()

    async def _meet(self, *, required: bool) -> None:
        """Pings the peers that the transport is connected to, measures the clock, finds our neighbours."""
        parts = node_parts()
        connected = [parts.PeerID(peer_id_bytes(p)) for p in await self.transport.connected()]
        samples = await asyncio.gather(*(self._clock_sample(p) for p in connected[:8]))
        self.clock.correct([s for s in samples if s is not None])
        answers = await asyncio.gather(*(self._node.protocol.call_ping(p, validate=False) for p in connected))
        if not any(answers):
            if required and self.transport.bootstrap:
                names = ", ".join(self.transport.bootstrap)
                raise SwarmUnreachable(
                    f"connected, but nobody answers on the board at {names}; does another version run there, or a "
                    "swarm of another name or key (FUSION_SWARM_NAME, FUSION_SWARM_KEY)?"
                )
            return
        await self._node.find_nearest_nodes([self._node.node_id])

    async def _meet_first(self, alone: bool) -> None:
        """Peers that start at the same moment may have no board yet: they are asked again before it is an error."""
        for _ in range(_FIRST_TRIES - 1):
            with contextlib.suppress(SwarmUnreachable):
                return await self._meet(required=not alone)
            await asyncio.sleep(1.0)
        await self._meet(required=True)

    async def _clock_sample(self, peer: Any) -> float | None:
        """That peer's swarm time minus this machine's clock."""
        request = node_parts().dht_pb2.PingRequest(validate=False)
        raw = self.clock.now() - self.clock.offset_s
        try:
            response = await self._node.protocol.get_stub(peer).rpc_ping(request, timeout=_RPC_S)
        except Exception as error:  # hivemind raises many kinds here; the peer may have no board at all
            log.debug("no clock sample from %s: %s", peer, error)
            return None
        middle = (raw + self.clock.now() - self.clock.offset_s) / 2
        return float(response.dht_time) - middle if response.dht_time else None

    async def _keep(self) -> None:
        """Stores what changed, refreshes the rest, looks around now and then, comes back after an outage."""
        loop = asyncio.get_running_loop()
        next_look, next_clock = loop.time() + AROUND_S, loop.time() + _CLOCK_S
        while True:
            self._wake.clear()
            await self._guarded("listing connected peers", self._remember)
            await self._guarded("storing records", self._store_due)
            now = loop.time()
            await self._guarded("looking for the swarm", self._rejoin_if_alone)
            if now > next_look:
                next_look = now + AROUND_S
                await self._guarded("looking around", self._look_around)
            if now > next_clock:
                next_clock = now + _CLOCK_S
                await self._guarded("checking the clock", lambda: self._meet(required=False))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(loop.time())):
                    await self._wake.wait()
                    await asyncio.sleep(0.02)  # publishes of one moment go out together

    def _pause_s(self, now: float) -> float:
        due = [own.tried_at + (_MIN_INTERVAL_S if own.changed else REFRESH_S) - now for own in self._own.values()]
        return min(max(0.05, min(due, default=REFRESH_S)), REFRESH_S)

    async def _guarded(self, what: str, action: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(30.0):
                await action()
        except (DhtError, TimeoutError) as error:
            log.warning("%s: %s", what, error or "not done in 30 s")
        except Exception:  # the top of the board's task: it must not end because hivemind raised
            log.exception("%s failed", what)

    async def _rejoin_if_alone(self) -> None:
        if self._replaced.locked():
            return  # p2pd came back just now: `_reattach` sees to it
        if self._node.protocol.routing_table.uid_to_peer_id:
            await self._find_others()
            return
        await self._reach_out()
        await self._meet(required=False)

    async def _remember(self) -> None:
        """Whom to come back to when p2pd dies."""
        connected = await self.transport.connected()
        if connected and not self._replaced.locked():  # there are none right after it died
            self._known = dict(list(connected.items())[:_REMEMBERED])

    async def _find_others(self) -> None:
        """Swarms that met apart merge: addresses of the swarm that did not answer are tried again, often at first; and
        when far more nodes are known than before, the replicas are looked up anew."""
        now = asyncio.get_running_loop().time()
        nodes = len(self._node.protocol.routing_table.uid_to_peer_id)
        grown, self._nodes = nodes >= 1.25 * self._nodes + 1, nodes
        if now >= self._next_others:
            self._others_s = min(_OTHERS_S[1], 2 * self._others_s)
            self._next_others = now + self._others_s
            targets = [addresses.parse_swarm_address(a) for a in self.transport.bootstrap]
            missing = [t for t in targets if t.peer_id not in self._known and t.peer_id != self.transport.peer_id]
            tries = [self.transport.connect(t.peer_id, (t.transport,), timeout_s=5.0) for t in missing]
            results = await asyncio.gather(*tries, return_exceptions=True)
            grown = grown or any(r is None for r in results)
        if grown:
            self._replicas.forget()
            await self._meet(required=False)

    async def _reach_out(self) -> None:
        """Connects to the bootstrap addresses and to the peers known before, whichever answer."""
        tries = [self.transport.connect(peer, found, timeout_s=5.0) for peer, found in self._known.items()]
        results = await asyncio.gather(self.transport.join(timeout_s=5.0), *tries, return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        if len(failed) == len(results) or any(not isinstance(r, DhtError) for r in failed):
            raise failed[0]

    async def _look_around(self) -> None:
        random_id = node_parts().DHTID(int.from_bytes(secrets.token_bytes(20), "big"))
        await self._node.find_nearest_nodes([random_id])

    async def _store_due(self) -> None:
        now = asyncio.get_running_loop().time()
        due = {
            place: own
            for place, own in self._own.items()
            if now - own.tried_at >= (_MIN_INTERVAL_S if own.changed else REFRESH_S)
        }
        if not due:
            return
        for own in due.values():
            own.tried_at = now
        swarm_now = self.clock.now()
        expiration = swarm_now + TTL_S
        sealed = {
            place: records.seal(_published(own.record, swarm_now), own.signer, expiration=expiration)
            for place, own in due.items()
        }
        async with asyncio.timeout(STORE_TIMEOUT_S):
            stored = await self._replicas.store(self._node, sealed, expiration, keep_here=not self._client_only)
        for place, own in due.items():
            if place in stored:
                own.changed = False
        async with self._stored:
            self._stored.notify_all()


def _published(record: Record, now: float) -> Record:
    if isinstance(record, PeerRecord | RunRecord | Receipt):
        return msgspec.structs.replace(record, published=round(now, 2))
    return record


def _note_end(task: asyncio.Task[None]) -> None:
    """hivemind's connection tasks end with p2pd; nobody else looks at why."""
    if not task.cancelled() and task.exception() is not None:
        log.debug("hivemind's connection to p2pd ended: %r", task.exception())

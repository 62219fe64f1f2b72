"""What one open run holds on the network: p2pd, the board, this machine's own volunteer, the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht import p2p
from dht.control import socket_path
from dht.errors import DhtError
from dht.node import Board
from dht.p2p import P2PTransport
from fusion_p2p.ir import OpDag
from fusion_p2p.split import StageProgram
from peer.blobs import serve_blobs
from peer.channel_io import ChannelSettings
from peer.events import Happening, RunEvent, Sink
from peer.lab.local_swarm import OwnDevice
from peer.offers import SwarmLinks
from peer.pipe_service import REACH_S, PipeService, reach_of
from peer.ratelimit import Limiter
from peer.selfdial import SelfDial
from peer.signing import public_bytes
from peer.trainer import Trainer
from peer.trainer_adopt import Replay
from peer.trainer_live import TrainerOptions
from peer.trainer_publish import Publisher
from peer.trainer_session import Session
from peer.trainer_state import RunFolder
from peer.trainer_swarm import Swarm

log = logging.getLogger(__name__)

Initial: TypeAlias = Callable[[StageProgram], bytes]
WARNING = (
    "volunteers can see or reconstruct this run's data, labels and weights; allow_peers restricts it to those you trust"
)

NO_PIPE = (
    "this machine cannot be dialled and no peer offers a pipe: volunteers that cannot be dialled either are out of "
    "reach; one public peer with fusion-peer join --relay-mbps 50 would mend it, or a forwarded port here"
)
RESTED_S = 8.0


@dataclass(slots=True)
class SwarmSession:
    """Closes in the order opposite to opening."""

    trainer: Trainer
    publisher: Publisher
    swarm: Swarm
    stack: contextlib.AsyncExitStack

    async def close(self, phase: str) -> None:
        """Say on the board how it ended, free the volunteers, end our p2pd."""
        self.publisher.phase(phase)
        try:
            self.publisher.publish()
            await self.swarm.flush()
        except DhtError as error:
            log.warning("the board does not know that the run ended: %s", error)
        finally:
            await self.stack.aclose()


async def open_session(
    *,
    addresses: tuple[str, ...],
    loopback: bool,
    links: Callable[[], SwarmLinks | None],
    compute: bool,
    allow_peers: tuple[str, ...],
    folder: RunFolder,
    owner: Ed25519PrivateKey,
    dag: OpDag,
    options: TrainerOptions,
    initial: Initial,
    sink: Sink,
    total_steps: int,
    data_state: bytes,
    replay: Replay | None = None,
) -> SwarmSession:
    """Join the swarm and place the run. On failure everything opened is closed again. `links`: where they are known,
    what volunteers measure does not count."""
    async with contextlib.AsyncExitStack() as stack:
        transport = await p2p.start(
            folder.root / "trainer.key",
            host_addresses=p2p.LOOPBACK if loopback else p2p.ANY_ADDRESS,
            bootstrap=addresses,
        )
        dial = SelfDial(transport, socket_path(transport.control_address).parent)
        stack.push_async_callback(dial.close)
        board = await Board.start(transport)
        stack.push_async_callback(board.close)
        allowed = allow_peers
        if compute:
            own = await OwnDevice.start(addresses, public_bytes(owner).hex())
            stack.push_async_callback(own.stop)
            allowed = (*allow_peers, own.ready.peer) if allow_peers else ()
        signed_spec, spec = folder.spec()
        epoch = folder.next_epoch()
        swarm = Swarm(board, allow_peers=allowed, links=links)
        publisher = Publisher(swarm, folder, spec, owner, transport.peer_id, epoch)
        publisher.total = total_steps

        def hear(happening: Happening) -> None:
            publisher(happening)
            sink(happening)

        hear(RunEvent(kind="notice", text=WARNING, time_s=time.time()))
        session = Session(signed_spec=signed_spec, spec=spec, owner_key=owner, epoch=epoch, clock=time.time)
        where = (lambda: ()) if loopback else await _find_pipes(transport, board, dial, stack, hear)
        trainer = Trainer(
            transport=dial,
            own_addresses=where,
            swarm=swarm,
            session=session,
            folder=folder,
            dag=dag,
            options=options,
            initial=initial,
            sink=hear,
        )
        await serve_blobs(
            dial,
            folder.blobs,
            lambda peer, run, blob: run == spec.run and trainer.may_fetch(peer, blob),
            limiter=Limiter(None),
            settings=ChannelSettings(),
        )
        await stack.enter_async_context(trainer)
        trainer.spawn(publisher.serve())
        await trainer.start(data_state, replay)
        return SwarmSession(trainer, publisher, swarm, stack.pop_all())


async def _find_pipes(
    transport: P2PTransport, board: Board, dial: SelfDial, stack: contextlib.AsyncExitStack, hear: Sink
) -> Callable[[], tuple[str, ...]]:
    """What says where volunteers reach this trainer. If it cannot be dialled it rests at a pipe host first. While
    nobody is there who could try, it asks again and again beside the run; hosts are told when the answer comes."""
    service = await PipeService.start(transport, board, dial)
    stack.push_async_callback(service.close)
    own: tuple[str, ...] = ()

    async def look() -> bool:
        nonlocal own
        reach, own = await reach_of(transport)
        service.found(reach, own)
        if service.pipes.resting and not await service.pipes.until_rested(RESTED_S):
            hear(RunEvent(kind="notice", text=NO_PIPE, time_s=time.time()))
        return bool(reach)

    async def look_on() -> None:
        known = False
        while not known:
            await asyncio.sleep(REACH_S)
            try:
                known = await look()
            except DhtError as error:
                log.info("whether this trainer can be dialled: %s", error)

    if not await look():
        stack.callback(asyncio.create_task(look_on(), name="reach").cancel)
    return lambda: service.addresses(own)

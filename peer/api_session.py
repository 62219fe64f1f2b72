"""What one open run holds on the network: p2pd, the board, this machine's own volunteer, the trainer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht import p2p
from dht.errors import DhtError
from dht.node import Board
from fusion_p2p.ir import OpDag
from fusion_p2p.split import StageProgram
from peer.blobs import serve_blobs
from peer.channel_io import ChannelSettings
from peer.events import Happening, RunEvent, Sink
from peer.lab.local_swarm import OwnDevice
from peer.offers import SwarmLinks
from peer.ratelimit import Limiter
from peer.signing import public_bytes
from peer.trainer import Trainer
from peer.trainer_adopt import Replay
from peer.trainer_assembly import Session
from peer.trainer_live import TrainerOptions
from peer.trainer_publish import Publisher
from peer.trainer_state import RunFolder
from peer.trainer_swarm import Swarm

log = logging.getLogger(__name__)

Initial: TypeAlias = Callable[[StageProgram], bytes]
WARNING = (
    "volunteers can see or reconstruct this run's data, labels and weights; allow_peers restricts it to those you trust"
)


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
    links: SwarmLinks | None,
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
    """Join the swarm and place the run. On failure everything opened is closed again. `links`: known beforehand, so
    that what volunteers measure does not count."""
    async with contextlib.AsyncExitStack() as stack:
        transport = await p2p.start(
            folder.root / "trainer.key",
            host_addresses=p2p.LOOPBACK if loopback else p2p.ANY_ADDRESS,
            bootstrap=addresses,
        )
        stack.push_async_callback(transport.close)
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
        trainer = Trainer(
            transport=transport,
            swarm=swarm,
            session=session,
            folder=folder,
            dag=dag,
            options=options,
            initial=initial,
            sink=hear,
        )
        await serve_blobs(
            transport,
            folder.blobs,
            lambda peer, run, blob: run == spec.run and trainer.hosts_stage(peer),
            limiter=Limiter(None),
            settings=ChannelSettings(),
        )
        await stack.enter_async_context(trainer)
        trainer.spawn(publisher.serve())
        await trainer.start(data_state, replay)
        return SwarmSession(trainer, publisher, swarm, stack.pop_all())

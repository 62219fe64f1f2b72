"""A volunteer's control stream as the trainer holds it: one a peer, and no word of a volunteer's ends a run."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from dht.transport import Stream
from fusion_p2p.capture import capture
from fusion_p2p.settings import OptimizerSpec
from peer import signing
from peer.channel_io import ChannelSettings
from peer.control_io import MessageStream
from peer.protocol import CONTROL, PROTOCOL_VERSION, Hello, Refused, SessionCert, Signed, ToVolunteer, Welcome
from peer.trainer_assembly import Assembly
from peer.trainer_host import Host, HostLost, RunPaused
from peer.trainer_session import Session
from tests.memory_transport import Network
from tests.unit.test_links import run

OWNER = signing.new_session_key()
SPEC, SIGNED_SPEC = signing.make_run_spec(
    OWNER, name="r", opdag_hash="ab" * 32, seed=1, optimizer=OptimizerSpec(kind="sgd", lr=0.1), created=1.0
)
EPOCH = 3
CERT = SessionCert(run=SPEC.run, session_key=b"k" * 32, trainer_peer="t", epoch=EPOCH, expires=9e9)
CHANNELS = ChannelSettings()
DAG = capture(torch.nn.Linear(2, 1), (torch.ones(2, 2),), loss=lambda output, batch: output.sum()).opdag


def newer(**changes: object) -> SessionCert:
    return msgspec.structs.replace(CERT, **{"epoch": EPOCH + 1, **changes})


async def serve(network: Network, *words: msgspec.Struct) -> None:
    """Peer "v" welcomes each trainer and says `words`."""

    async def control(stream: Stream) -> None:
        messages: MessageStream[ToVolunteer] = MessageStream(
            stream.reader, stream.writer, msgspec.msgpack.Decoder(ToVolunteer)
        )
        assert isinstance(await messages.receive(timeout_s=60.0), Hello)
        for word in (Welcome(version=PROTOCOL_VERSION, peer="v", devices=("cpu",)), *words):
            await messages.send(word, timeout_s=60.0)
        await asyncio.Event().wait()

    await network.transport("v").serve(CONTROL, control)


@pytest.mark.parametrize(
    ("proof", "ends"),
    [
        (signing.sign(newer(), OWNER), RunPaused),
        (None, HostLost),
        (signing.sign(newer(), signing.new_session_key()), HostLost),
        (signing.sign(newer(run="00" * 16), OWNER), HostLost),
        (signing.sign(CERT, OWNER), HostLost),  # our own, shown back
        (signing.sign(newer(epoch=EPOCH - 1), OWNER), HostLost),
        (Signed(b"", b"", b""), HostLost),
    ],
)
def test_only_the_owners_newer_certificate_ends_the_session(proof: Signed | None, ends: type[Exception]) -> None:
    async def main() -> None:
        network = Network()
        await serve(network, Refused(code="lease", reason="led by another", cert=proof))
        transport = network.transport("t")
        host = Host(
            transport,
            "v",
            on_status=lambda *_: None,
            on_fault=lambda *_: None,
            is_successor=lambda cert: signing.is_successor(cert, SPEC, EPOCH),
            channels=CHANNELS,
        )
        await host.open(Hello(version=PROTOCOL_VERSION, spec=SIGNED_SPEC, cert=signing.sign(CERT, OWNER)))
        with pytest.raises(ends):
            await host.serve()
        host.close("test")
        await network.peers["v"].close()

    run(main())


def test_a_greeting_and_an_offer_share_one_stream() -> None:
    async def main() -> None:
        network = Network()
        await serve(network)
        tasks: set[asyncio.Task[None]] = set()
        assembly = Assembly(
            network.transport("t"),
            Session(signed_spec=SIGNED_SPEC, spec=SPEC, owner_key=OWNER, epoch=EPOCH, clock=lambda: 0.0),
            DAG,
            atoms=1,
            spawn=lambda work: tasks.add(asyncio.ensure_future(work)),
            on_lost=lambda *_: None,
            on_offer=lambda peers: None,
            on_fault=lambda *_: None,
            on_status=lambda *_: None,
            channels=CHANNELS,
        )
        await asyncio.gather(assembly.greet("v"), assembly.greet("v"), assembly.greet("v"))
        assert network.opened == 1 and assembly.linked == ("v",) and len(tasks) == 1
        await assembly.leave("test")
        await asyncio.wait(tasks)
        await network.peers["v"].close()

    run(main())

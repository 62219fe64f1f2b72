"""Streams of a peer to itself, over Unix sockets; to others through the transport inside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dht.errors import NoSuchProtocol
from dht.transport import Stream
from peer.selfdial import SelfDial
from tests.memory_transport import Network

pytestmark = pytest.mark.timeout(400)


def test_a_peer_reaches_itself_and_others(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        inner = network.transport("me")
        me, again = SelfDial(inner, tmp_path), SelfDial(inner, tmp_path)  # as two processes of one peer
        other = network.transport("other")

        async def echo(stream: Stream) -> None:
            stream.writer.write(f"{stream.remote}:".encode() + await stream.reader.readexactly(3))
            await stream.writer.drain()

        await me.serve("/a", echo)
        for transport, peer in ((again, "me"), (me, "me"), (other, "me")):
            stream = await transport.open_stream(peer, "/a")
            stream.writer.write(b"abc")
            assert await stream.reader.readexactly(6 if transport is not other else 9) in (b"me:abc", b"other:abc")
            stream.writer.close()
        await other.serve("/b", echo)
        assert (await me.open_stream("other", "/b")).remote == "other"
        await me.stop_serving("/a")
        with pytest.raises(NoSuchProtocol, match="/a"):
            await again.open_stream("me", "/a")
        await me.close()
        await again.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())

"""A transport's supervision lives on, whatever goes wrong while p2pd is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from dht.control import ControlClient
from dht.errors import TransportError
from dht.identity import Identity
from dht.p2p_transport import P2PTransport
from tests.simulated_time import simulate


class Flaky:
    """A p2pd that dies when told to, and comes back after `failures` were met."""

    def __init__(self, failures: list[Exception]) -> None:
        self.path = Path("/nowhere/control")
        self.failures = failures
        self.died = asyncio.Event()
        self.watching = asyncio.Event()

    async def watch(self) -> str:
        self.watching.set()
        await self.died.wait()
        self.died.clear()
        return "it ended"

    async def identify(self, *, timeout_s: float = 1.0) -> tuple[str, tuple[str, ...]]:
        if self.failures:
            raise self.failures.pop(0)
        return "", ()


@pytest.mark.parametrize(
    "failures", [[], [TransportError("not yet")], [OSError(24, "Too many open files"), RuntimeError("a defect")]]
)
def test_no_failure_ends_the_supervision(failures: list[Exception]) -> None:
    async def main() -> None:
        client = Flaky(list(failures))
        transport = P2PTransport(cast(ControlClient, client), Identity.generate().peer_id)
        back = asyncio.Event()

        async def on_restart() -> None:
            back.set()
            raise ValueError("a callback's defect")

        transport.on_restart(on_restart)
        transport.watch()
        for _ in range(2):  # also the next death is noticed
            await client.watching.wait()
            client.watching.clear()
            client.died.set()
            await back.wait()
            back.clear()
        assert not client.failures
        await transport.close()

    simulate(asyncio.wait_for(main(), 30))


def test_a_watch_that_fails_counts_as_a_death() -> None:
    async def main() -> None:
        client = Flaky([])
        calls = 0

        async def watch() -> str:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("a defect")
            return await Flaky.watch(client)

        client.watch = watch  # type: ignore[method-assign]
        transport = P2PTransport(cast(ControlClient, client), Identity.generate().peer_id)
        transport.watch()
        await client.watching.wait()
        assert calls == 2
        await transport.close()

    simulate(asyncio.wait_for(main(), 30))

"""A trainer with nothing here keeps its control stream while there are enough of them."""

from __future__ import annotations

import asyncio
import types

import pytest

from peer import daemon_session
from peer.daemon_session import TrainerSession
from peer.errors import WireError


class Silent:
    async def receive(self, *, timeout_s: float) -> None:
        await asyncio.Event().wait()

    async def send(self, message: object, *, timeout_s: float) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("holds", "crowded", "ends"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_an_idle_stream_ends_where_others_need_it(
    monkeypatch: pytest.MonkeyPatch, holds: bool, crowded: bool, ends: bool
) -> None:
    monkeypatch.setattr(daemon_session, "IDLE_S", 0.04)
    volunteer = types.SimpleNamespace(holds=lambda run: holds)
    session = TrainerSession(Silent(), types.SimpleNamespace(run="r"), None, None)  # type: ignore[arg-type]

    async def main() -> None:
        async with asyncio.timeout(5.0 if ends else 0.2):
            await session.run(volunteer, 1.0, 9.0, lambda: crowded)  # type: ignore[arg-type]

    with pytest.raises(ExceptionGroup if ends else TimeoutError) as caught:
        asyncio.run(main())
    if ends:
        assert caught.group_contains(WireError, match="nothing of its run here")

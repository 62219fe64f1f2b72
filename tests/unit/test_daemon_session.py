"""A trainer with nothing here keeps its control stream while there are enough of them."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Sequence

import pytest

from peer import daemon_session
from peer.daemon_session import TrainerSession
from peer.errors import WireError
from peer.protocol import Heartbeat, Renew, SessionCert, Signed
from peer.signing import new_session_key, public_bytes, sign
from tests.simulated_time import simulate


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
        simulate(main())
    if ends:
        assert caught.group_contains(WireError, match="nothing of its run here")


OWNER, KEY = new_session_key(), new_session_key()


def cert(expires: float, *, epoch: int = 1, signer: object = OWNER) -> Signed:
    body = SessionCert(run="r", session_key=public_bytes(KEY), trainer_peer="t", epoch=epoch, expires=expires)
    return sign(body, signer)  # type: ignore[arg-type]


def session_of(messages: Sequence[object], clock: Sequence[float]) -> tuple[TrainerSession, list[object]]:
    """A session until 100; `clock`: the time at each message."""
    times, left, heard = iter(clock), list(messages), list[object]()

    class Speaking(Silent):
        async def receive(self, *, timeout_s: float) -> object:  # type: ignore[override]
            return left.pop(0) if left else None

    first = cert(100.0)
    spec = types.SimpleNamespace(run="r", owner=public_bytes(OWNER))
    body = SessionCert(run="r", session_key=public_bytes(KEY), trainer_peer="t", epoch=1, expires=100.0)
    session = TrainerSession(Speaking(), spec, body, first, lambda: next(times))  # type: ignore[arg-type]
    volunteer = types.SimpleNamespace(heard=heard.append)
    simulate(session._receive(volunteer, 1.0))  # type: ignore[arg-type]
    return session, heard


def test_a_certificate_that_is_renewed_goes_on_and_one_that_is_not_ends() -> None:
    session, heard = session_of([Heartbeat(), Renew(cert=cert(200.0)), Heartbeat()], [10.0, 60.0, 150.0])
    assert session.cert.expires == 200.0 and len(heard) == 3
    with pytest.raises(WireError, match="run out"):
        session_of([Heartbeat(), Heartbeat()], [10.0, 150.0])


@pytest.mark.parametrize("bad", [cert(200.0, epoch=2), cert(200.0, signer=KEY)])
def test_a_certificate_of_another_session_renews_nothing(bad: Signed) -> None:
    with pytest.raises(WireError, match=r"another session|signed by"):
        session_of([Renew(cert=bad)], [10.0])

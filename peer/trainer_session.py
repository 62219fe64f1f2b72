"""Who speaks for a run in one trainer session, and what it signs: certificates, assignments (DESIGN section 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusion_p2p.plan import Plan, StagePlacement
from peer.protocol import PROTOCOL_VERSION, Assignment, Hello, RunSpec, SessionCert, Signed
from peer.signing import is_successor, new_session_key, public_bytes, sign

CERT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who speaks: the run, its owner, and this session's epoch."""

    signed_spec: Signed
    spec: RunSpec
    owner_key: Ed25519PrivateKey
    epoch: int
    clock: Callable[[], float]


class Credentials:
    """Signs for `session`, whose trainer is `peer`; its key lives in memory only."""

    def __init__(self, session: Session, peer: str, opdag_hash: str) -> None:
        self._session, self._peer, self._opdag_hash = session, peer, opdag_hash
        self._key = new_session_key()

    def hello(self) -> Hello:
        return Hello(version=PROTOCOL_VERSION, spec=self._session.signed_spec, cert=self.cert())

    def cert(self) -> Signed:
        """The owner's word for this session, for CERT_S from now on."""
        s = self._session
        cert = SessionCert(
            run=s.spec.run,
            session_key=public_bytes(self._key),
            trainer_peer=self._peer,
            epoch=s.epoch,
            expires=s.clock() + CERT_S,
        )
        return sign(cert, s.owner_key)

    def assignment(self, plan: Plan, p: StagePlacement) -> Signed:
        """This session's word that the stage is that peer's."""
        s = self._session
        assignment = Assignment(
            run=s.spec.run,
            epoch=s.epoch,
            plan=plan.number,
            stage=p.stage,
            replica=p.replica,
            incarnation=p.incarnation,
            opdag_hash=self._opdag_hash,
            target_peer=p.peer,
            device=p.device,
            expires=s.clock() + CERT_S,
        )
        return sign(assignment, self._key)

    def is_successor(self, cert: Signed) -> bool:
        """Whether another session of this run leads it now, by the owner's own word."""
        return is_successor(cert, self._session.spec, self._session.epoch)

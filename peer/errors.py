"""Typed errors of the peer room. Each carries the offending value and names the fix; users see `str(error)`."""

from __future__ import annotations

import errno

from fusion_p2p.errors import FusionError, InputError


class PeerError(FusionError):
    """Base of the errors of this room."""


class SignatureError(PeerError):
    """A signed record does not verify, has expired, or is bound to something else."""


class WireError(PeerError):
    """Bytes from another peer that are not what the protocol says; the stream ends."""


class StaleError(WireError):
    """A message of an epoch or incarnation below the highest one seen (fencing, DESIGN section 2)."""


class ResumeGap(PeerError):
    """The receiver asks for frames that the sender's outbox no longer holds: the sender must be restored too."""


class ChannelClosed(PeerError):
    """The channel was closed here; nothing more can be sent or received on it."""


class BlobError(PeerError):
    """A snapshot could not be had whole: no holder answered, or its bytes do not match their hash."""


class DiskFull(BlobError):
    """No room for a snapshot here: asking other holders is of no use. Exit code 4, as of a paused run."""

    exit_code = 4


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that a disk or a quota is used up."""
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))


class RefusedError(PeerError):
    """A volunteer refuses. `code` as in `protocol.Refused`; `needed` and `cap` in bytes for memory."""

    def __init__(self, code: str, reason: str, *, needed: int = 0, cap: int = 0) -> None:
        super().__init__(reason)
        self.code, self.needed, self.cap = code, needed, cap


class ExecutorDied(PeerError):
    """The executor process of a device ended; its stages are gone, the daemon stays."""


class ControlError(InputError):
    """No running volunteer answers on the local control socket, or it refuses the command."""

"""Typed errors of the science room. Each carries the offending value; users see `str(error)` as one line."""

from __future__ import annotations


class FusionError(Exception):
    """Base of every error a user may see; `exit_code` is the process's."""

    exit_code = 1


class InputError(FusionError):
    """Bad input: one clear line that names the fix. Exit code 2."""

    exit_code = 2


class CaptureError(InputError):
    """The model cannot be captured exactly; says where (file:line) and the way round."""


class AdmissionError(FusionError):
    """An OP-DAG from the network is refused."""


class FrameError(FusionError):
    """A tensor frame does not fit its edge's declared shape, type, order or bound.

    `src`: the endpoint that sent it, where that is known: not who received it is to blame.
    """

    src: int | None = None


class EndsDiffer(FrameError):
    """Nobody's fault: a frame goes by a mask or by axes that its other end made before this end was computed again on
    hardware that rounds otherwise. Both ends must be computed again, from one set."""

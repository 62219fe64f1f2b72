"""On the PYTHONPATH of a test's volunteers this makes one executor a liar, once: no such thing is shipped.

FUSION_TEST_LIE names a file that holds a tick. The first executor with an activation of that tick to send takes the
file away and sends NaN in its place.
"""

from __future__ import annotations

import os
import sys

if "peer.executor" in sys.orig_argv and "FUSION_TEST_LIE" in os.environ:
    import msgspec

    from fusion_p2p.frame import Frame, Kind
    from peer.channel import Outbox

    honest = Outbox.push
    wanted = os.environ["FUSION_TEST_LIE"]
    with open(wanted) as file:
        tick = int(file.read())

    def push(self: Outbox, frame: Frame) -> None:
        if frame.kind is Kind.ACT and frame.tick == tick and frame.micro_batch == 1:
            try:
                os.unlink(wanted)
            except FileNotFoundError:
                pass
            else:
                frame = msgspec.structs.replace(frame, payload=frame.payload[:-64] + b"\xff" * 64)
        honest(self, frame)

    Outbox.push = push  # type: ignore[method-assign]

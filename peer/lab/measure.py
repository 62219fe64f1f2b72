"""What each link of a lab delivers, measured with TCP before anything runs on it.

Both directions of a pair at once, and the acknowledgements of the other one's stream count as delivered: 2% of a link.
Where one direction is much faster than the other, each by itself: acknowledgements that wait in a full queue for a
fifth of the rate hold their stream back, which says nothing of the link.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peer.lab.bed import MTU, PAYLOAD, Bed, LabLink, LabPeer
from peer.lab.netns import Lab

RAMP_S, MEASURE_S = 4.0, 3.0  # BBR takes seconds to find a slow link's rate
TOLERANCE = 0.05
PIECE = 1 << 16
UNLIKE = 2.0  # times as fast, from which two directions are measured after each other
LEAST_FRAMES = 500  # a lost packet holds back those behind it: a few are no measurement
# tcpi_bytes_received and tcpi_segs_in in Linux's struct tcp_info, the end of what is asked for.
INFO_BYTES, RECEIVED_AT, SEGMENTS_AT = 144, 128, 140
ACK_BYTES = 66  # with its headers: Ethernet, IP, TCP and a timestamp
WAIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """`src` and `dst` name peers; `of_configured` is 1.0 where the link delivers what the testbed says."""

    link: LabLink
    src: str
    dst: str
    bits_per_s: float

    @property
    def of_configured(self) -> float:
        return self.bits_per_s / self.link.bits_per_s

    @property
    def holds(self) -> bool:
        return abs(self.of_configured - 1) <= TOLERANCE


def measure(lab: Lab, *, seconds: float = MEASURE_S) -> list[Delivered]:
    """Every link of the bed."""
    found = []
    for group in _groups(lab.bed):
        flows = [_Flow(lab, *_ends(lab.bed, link), link.bits_per_s, seconds) for link in group]
        for flow in flows:
            flow.thread.start()
        for flow in flows:
            flow.thread.join()  # each of its waits is bounded
        acks = {(flow.dst.name, flow.src.name): flow.acks_per_s * ACK_BYTES * 8 * PAYLOAD / MTU for flow in flows}
        for link, flow in zip(group, flows, strict=True):
            if flow.error is not None:
                raise flow.error
            both = flow.bits_per_s + acks.get((flow.src.name, flow.dst.name), 0.0)
            found.append(Delivered(link=link, src=flow.src.name, dst=flow.dst.name, bits_per_s=both))
    return found


def _groups(bed: Bed) -> list[list[LabLink]]:
    """What is measured at once: slow pairs together, each fast one alone, since a busy machine must not count as a slow
    link; of a pair whose directions are unlike the one after the other."""
    pairs: dict[tuple[int, int], list[LabLink]] = {}
    for link in bed.links:
        pairs.setdefault((min(link.src, link.dst), max(link.src, link.dst)), []).append(link)
    turns: list[list[LabLink]] = []
    for links in pairs.values():
        rates = [x.bits_per_s for x in links]
        turns += [[x] for x in links] if max(rates) > UNLIKE * min(rates) else [links]
    slow, groups, load = list[LabLink](), list[list[LabLink]](), 0.0
    for links in sorted(turns, key=lambda p: max(x.bits_per_s for x in p)):
        rate = sum(x.bits_per_s for x in links)
        if slow and (load + rate > 200e6 or any({x.src, x.dst} == {y.src, y.dst} for x in slow for y in links)):
            groups.append(slow)
            slow, load = [], 0.0
        slow, load = slow + links, load + rate
    return [*groups, slow] if slow else groups


def _ends(bed: Bed, link: LabLink) -> tuple[LabPeer, LabPeer]:
    """A peer at each end; inside a site the first two."""
    inside = link.src == link.dst
    return bed.of_site(link.src)[0], bed.of_site(link.dst)[1 if inside else 0]


class _Flow:
    """Sends from one peer to the other as fast as it goes; counts what arrives after the ramp, and what comes back."""

    def __init__(self, lab: Lab, src: LabPeer, dst: LabPeer, bits_per_s: float, seconds: float) -> None:
        self.src, self.dst = src, dst
        self._seconds = max(seconds, LEAST_FRAMES * 8 * PAYLOAD / bits_per_s)
        self.bits_per_s = self.acks_per_s = 0.0
        self.error: OSError | None = None
        with lab.listen(dst.name, dst.address) as server:
            server.settimeout(WAIT_S)
            port = server.getsockname()[1]
            self._out = lab.at(src.name, lambda: socket.create_connection((dst.address, port), WAIT_S))
            self._in, _ = server.accept()
        for end in (self._out, self._in):
            end.settimeout(WAIT_S)
        self.thread = threading.Thread(target=self._count, name=f"{src.name} to {dst.name}")

    def _count(self) -> None:
        sender = threading.Thread(target=self._send, name=f"{self.src.name} sends")
        sender.start()
        try:
            self._receive()
        except OSError as error:
            self.error = error
        finally:
            self._in.close()
            sender.join(WAIT_S)
            self._out.close()

    def _receive(self) -> None:
        """Read on; the kernel's own count says what had come at which moment, however late this thread runs."""
        buffer, begin = bytearray(PIECE), time.perf_counter()
        first: tuple[float, int, int] | None = None
        while (now := time.perf_counter()) - begin < RAMP_S + self._seconds:
            self._in.recv_into(buffer)
            if first is None and now - begin >= RAMP_S:
                first = time.perf_counter(), *self._counts()
        last = time.perf_counter(), *self._counts()
        if first is not None and last[0] > first[0]:
            self.bits_per_s = 8 * (last[1] - first[1]) / (last[0] - first[0])
            self.acks_per_s = (last[2] - first[2]) / (last[0] - first[0])

    def _counts(self) -> tuple[int, int]:
        """Bytes that have come, and acknowledgements that have come back."""
        there, back = (end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES) for end in (self._in, self._out))
        received = int.from_bytes(there[RECEIVED_AT : RECEIVED_AT + 8], sys.byteorder)
        return received, int.from_bytes(back[SEGMENTS_AT : SEGMENTS_AT + 4], sys.byteorder)

    def _send(self) -> None:
        piece = bytes(PIECE)
        with contextlib.suppress(OSError):  # the receiver closes when it has seen enough
            while True:
                self._out.sendall(piece)


def table(found: Sequence[Delivered]) -> list[str]:
    """One line a link."""
    return [
        f"{d.src:>4} -> {d.dst:4} {d.link.bits_per_s / 1e6:9.4g} Mbps configured, {d.of_configured:.3f} of it delivered"
        f"{'' if d.holds else f'  (outside {TOLERANCE:.0%})'}"
        for d in found
    ]

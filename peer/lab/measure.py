"""What each link of a lab delivers, measured with TCP before anything runs on it, both directions of a pair at once."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peer.lab.bed import PAYLOAD, Bed, LabLink, LabPeer
from peer.lab.netns import Lab

RAMP_S, MEASURE_S = 4.0, 3.0  # BBR takes seconds to find a slow link's rate
TOLERANCE = 0.05
PIECE = 1 << 16
LEAST_FRAMES = 500  # a lost packet holds back those behind it: a few are no measurement
INFO_BYTES, RECEIVED_AT = 136, 128  # tcpi_bytes_received in Linux's struct tcp_info, the end of what is asked for
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
    """Every link of the bed, those of different pairs of sites after each other, the two directions of one together."""
    found = []
    for group in _groups(lab.bed):
        flows = [_Flow(lab, *_ends(lab.bed, link), link.bits_per_s, seconds) for link in group]
        for flow in flows:
            flow.thread.start()
        for flow in flows:
            flow.thread.join()  # each of its waits is bounded
        for link, flow in zip(group, flows, strict=True):
            if flow.error is not None:
                raise flow.error
            found.append(Delivered(link=link, src=flow.src.name, dst=flow.dst.name, bits_per_s=flow.bits_per_s))
    return found


def _groups(bed: Bed) -> list[list[LabLink]]:
    """Slow pairs together, each fast one alone: a busy machine must not count as a slow link."""
    pairs: dict[tuple[int, int], list[LabLink]] = {}
    for link in bed.links:
        pairs.setdefault((min(link.src, link.dst), max(link.src, link.dst)), []).append(link)
    slow, groups, load = list[LabLink](), list[list[LabLink]](), 0.0
    for links in sorted(pairs.values(), key=lambda p: max(x.bits_per_s for x in p)):
        rate = sum(x.bits_per_s for x in links)
        if slow and load + rate > 200e6:
            groups.append(slow)
            slow, load = [], 0.0
        slow, load = slow + links, load + rate
    return [*groups, slow] if slow else groups


def _ends(bed: Bed, link: LabLink) -> tuple[LabPeer, LabPeer]:
    """A peer at each end; inside a site the first two."""
    inside = link.src == link.dst
    return bed.of_site(link.src)[0], bed.of_site(link.dst)[1 if inside else 0]


class _Flow:
    """Sends from one peer to the other as fast as it goes; counts what arrives after the ramp."""

    def __init__(self, lab: Lab, src: LabPeer, dst: LabPeer, bits_per_s: float, seconds: float) -> None:
        self.src, self.dst = src, dst
        self._seconds = max(seconds, LEAST_FRAMES * 8 * PAYLOAD / bits_per_s)
        self.bits_per_s = 0.0
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
        first: tuple[float, int] | None = None
        while (now := time.perf_counter()) - begin < RAMP_S + self._seconds:
            self._in.recv_into(buffer)
            if first is None and now - begin >= RAMP_S:
                first = time.perf_counter(), self._received()
        last = time.perf_counter(), self._received()
        if first is not None and last[0] > first[0]:
            self.bits_per_s = 8 * (last[1] - first[1]) / (last[0] - first[0])

    def _received(self) -> int:
        info = self._in.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        return int.from_bytes(info[RECEIVED_AT : RECEIVED_AT + 8], sys.byteorder)

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

"""Latency, loss and cuts for a lab, in user space: this kernel may have no netem.

`python -m peer.lab.delay OUT IN` runs beside a site's uplink, between two interfaces: what comes in on OUT (from the
site) goes to IN after the delay of its destination, what comes in on IN goes to OUT at once, so that each direction of
a pair of sites has its own figures. Standard input steers it, a JSON line at a time: see `Rules`. Frames keep their
offload header, so checksums and segments are the kernel's business. Good for 100 Mbps on a machine that is not full.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from peer.lab.bed import Command

_ETH_ALL, _SOL_PACKET = 3, 263
_ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING = 1, 15, 23
_PROMISCUOUS = 1
_VNET_BYTES, _MOST_BYTES = 10, 1 << 17
_TYPE_AT, _DST_AT = _VNET_BYTES + 12, _VNET_BYTES + 30
_IPV4 = b"\x08\x00"
MOST_FRAMES = 20_000  # in flight; more are dropped, as a router would
READY_S = 60.0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """By destination site (third byte of the address): one-way seconds, the share of frames lost, cut or not."""

    delay_s: dict[int, float] = {}
    loss: dict[int, float] = {}
    cut: tuple[int, ...] = ()


class Line:
    """Frames on their way. Pure: the clock and the dice are passed in."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules = rules
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, bytes]] = []
        self._count = 0
        self.dropped = 0

    def push(self, frame: bytes, now_s: float) -> None:
        """A frame enters; it may be lost. Frames to one site leave in the order in which they came."""
        site = site_of(frame)
        r = self.rules
        if site in r.cut or len(self._queue) >= MOST_FRAMES or self._random.random() < r.loss.get(site, 0.0):
            self.dropped += 1
            return
        heapq.heappush(self._queue, (now_s + r.delay_s.get(site, 0.0), self._count, frame))
        self._count += 1

    def due(self, now_s: float) -> list[bytes]:
        """Those that have arrived by now."""
        out = []
        while self._queue and self._queue[0][0] <= now_s:
            out.append(heapq.heappop(self._queue)[2])
        return out

    def wait_s(self, now_s: float) -> float | None:
        """Until the next arrives; None: nothing is on its way."""
        return max(0.0, self._queue[0][0] - now_s) if self._queue else None


def site_of(frame: bytes) -> int:
    """Third byte of an IPv4 destination in 10.77.x.y; -1 for all else, which is never delayed."""
    if frame[_TYPE_AT : _TYPE_AT + 2] == _IPV4 and frame[_DST_AT : _DST_AT + 2] == b"\x0a\x4d":
        return frame[_DST_AT + 2]
    return -1


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_ALL))
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    member = struct.pack("iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    end.bind((interface, _ETH_ALL))
    end.setblocking(False)
    return end


def relay(out: str, into: str, seed: int) -> None:
    """Until standard input ends."""
    site, core = _open(out), _open(into)
    line = Line(Rules(), seed)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([site, core, sys.stdin], [], [], line.wait_s(time.monotonic()))
        if sys.stdin in readable:
            said = sys.stdin.readline()
            if not said:
                return
            line.rules = msgspec.json.decode(said, type=Rules)
            print("done", flush=True)
        if core in readable:
            _pass(core, lambda frame: _put(site, frame))
        if site in readable:
            _pass(site, lambda frame: line.push(frame, time.monotonic()))
        for frame in line.due(time.monotonic()):
            _put(core, frame)


def _pass(end: socket.socket, take: Callable[[bytes], None], most: int = 64) -> None:
    for _ in range(most):
        try:
            frame = end.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        take(frame)


def _put(end: socket.socket, frame: bytes) -> None:
    try:
        end.send(frame)
    except OSError:  # a full queue drops, as the network does
        return


class Delays:
    """The relays of a lab's sites: started with `command` in front, steered with `set`, ended with `close`."""

    def __init__(self) -> None:
        self._relays: dict[int, subprocess.Popen[str]] = {}
        self._rules: dict[int, Rules] = {}

    def start(self, site: int, before: Command, out: str, into: str, rules: Rules) -> None:
        """OSError if the relay does not get ready."""
        command = [*before, sys.executable, "-m", "peer.lab.delay", out, into, str(site)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._relays[site] = process
        self._expect(process, "ready")
        self.set(site, rules)

    def set(self, site: int, rules: Rules) -> None:
        """From now on these hold for what leaves `site`. KeyError for a site without a relay."""
        process = self._relays[site]
        assert process.stdin is not None
        process.stdin.write(json.dumps(msgspec.to_builtins(rules, str_keys=True)) + "\n")
        process.stdin.flush()
        self._expect(process, "done")
        self._rules[site] = rules

    def rules(self, site: int) -> Rules:
        return self._rules[site]

    def close(self) -> None:
        """Idempotent."""
        for process in self._relays.values():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._relays.clear()

    @staticmethod
    def _expect(process: subprocess.Popen[str], word: str) -> None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], READY_S)
        if not ready or process.stdout.readline().strip() != word:
            raise OSError(f"the delay element of a site is not {word} after {READY_S:.0f} s")


def delays(latency_s: Mapping[tuple[int, int], float], least_s: float) -> dict[int, Rules]:
    """Rules by source site for every site that has a link of at least `least_s`; shorter ones are the kernel's own."""
    sites = {s for (s, t), seconds in latency_s.items() if s != t and seconds >= least_s}
    return {
        s: Rules(delay_s={t: x for (a, t), x in latency_s.items() if a == s and t != s and x >= least_s})
        for s in sorted(sites)
    }


def main(argv: Sequence[str]) -> None:
    relay(argv[0], argv[1], int(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Where it can be placed: devices and the directed links between them. Units: bytes, seconds, FLOP. No sockets here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion_p2p.errors import InputError
from fusion_p2p.planner.workload import Floats, Workload

LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S = 4e9, 1e-5  # between processes of one machine
MEMORY_SHARE = 0.9  # of a device's memory that a stage may fill; the rest is fragmentation and the allocator's


@dataclass(frozen=True, kw_only=True, eq=False)
class AtomTimes:
    """Seconds of each atom on one device for one micro-batch, as the estimator knows them."""

    forward_s: Floats
    backward_s: Floats  # recomputation included


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """One device of one peer. `times` (measured) overrides the prior from rates; `shape`, times of its own operators,
    only says how what the rates promise divides over the atoms. `correction` scales any of them.

    site: peers said to be close (a label, may be ""); node: the machine; `upload_bytes_per_step` None: no cap;
    `accepts` False: the peer refuses stages; `confirmed` False: a newcomer that has not passed its canary yet.
    """

    peer: str
    device: str = "cpu"
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    site: str = ""
    node: str = ""
    kernel_s: float = 8e-6  # launch overhead of one operator, forward; the backward launches two
    disk_bytes: float = float("inf")
    upload_bytes_per_step: float | None = None
    accepts: bool = True
    confirmed: bool = True
    correction: float = 1.0
    times: AtomTimes | None = None
    shape: AtomTimes | None = None

    @property
    def name(self) -> str:
        return self.peer if self.device == "cpu" else f"{self.peer}/{self.device}"

    def check(self) -> None:
        for field in ("flops_per_s", "memory_bytes_per_s", "memory_bytes", "correction"):
            v = getattr(self, field)
            if not (np.isfinite(v) and v > 0):
                raise InputError(f"peer {self.name}: {field} is {v}; measure it again with `fusion-peer bench`")

    def atom_times(self, w: Workload) -> AtomTimes:
        """Seconds per atom: max(work/rate, traffic/bandwidth) plus launches, unless measured."""
        for known in (self.times, self.shape):
            if known is not None and len(known.forward_s) != w.atoms:
                raise InputError(f"peer {self.name}: {len(known.forward_s)} measured atoms, model has {w.atoms}")
        t = self.times or self._promised(w)
        factor = self.correction if w.heavier is None else self.correction * w.heavier
        return AtomTimes(forward_s=t.forward_s * factor, backward_s=t.backward_s * factor)

    def _promised(self, w: Workload) -> AtomTimes:
        moved_s = w.forward_bytes / self.memory_bytes_per_s
        fwd = np.maximum(w.forward_flops / self.flops_per_s, moved_s) + self.kernel_s * w.kernels
        bwd = np.maximum(w.backward_flops / self.flops_per_s, 2 * moved_s) + 2 * self.kernel_s * w.kernels
        if w.recompute:
            bwd = bwd + fwd
        if self.shape is None:
            return AtomTimes(forward_s=fwd, backward_s=bwd)
        of = float(fwd.sum() + bwd.sum()) / float(self.shape.forward_s.sum() + self.shape.backward_s.sum())
        return AtomTimes(forward_s=self.shape.forward_s * of, backward_s=self.shape.backward_s * of)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction as one end measured it."""

    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float  # one way


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """`bandwidth_bytes_per_s[i, j]` and `latency_s[i, j]`: from device i to device j, (D, D). The diagonal is ignored.

    `fences`: elected groups of device indices, or None where none is elected yet (clustering stands in).
    """

    devices: tuple[Device, ...]
    bandwidth_bytes_per_s: Floats
    latency_s: Floats
    fences: tuple[tuple[int, ...], ...] | None = None
    name: str = "swarm"

    def __len__(self) -> int:
        return len(self.devices)

    def check(self) -> None:
        """Raises InputError naming the device or link at fault and its value."""
        if not self.devices:
            raise InputError(f"network {self.name} has no devices; let a volunteer join first")
        names = [d.name for d in self.devices]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise InputError(f"network {self.name} names device {twice} twice")
        for d in self.devices:
            d.check()
        off = ~np.eye(len(self), dtype=bool)
        for what, a, ok in (
            ("bandwidth", self.bandwidth_bytes_per_s, self.bandwidth_bytes_per_s > 0),
            ("latency", self.latency_s, np.isfinite(self.latency_s) & (self.latency_s >= 0)),
        ):
            if a.shape != (len(self), len(self)):
                raise InputError(f"network {self.name}: {what} is {a.shape}, expected {(len(self), len(self))}")
            bad = np.argwhere(off & ~ok)
            if len(bad):
                i, j = bad[0]
                unit = (
                    "bytes/s; it must be positive" if what == "bandwidth" else "s; it must be finite and not negative"
                )
                raise InputError(f"link {names[i]} -> {names[j]}: {what} is {a[i, j]} {unit}")

    def subset(self, keep: Sequence[int]) -> Network:
        """The network of these devices only, in this order."""
        ix = np.asarray(keep, dtype=np.int64)
        where = {int(d): k for k, d in enumerate(ix)}
        fences = None
        if self.fences is not None:
            fences = tuple(g for f in self.fences if (g := tuple(where[d] for d in f if d in where)))
        return Network(
            devices=tuple(self.devices[i] for i in keep),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s[np.ix_(ix, ix)],
            latency_s=self.latency_s[np.ix_(ix, ix)],
            fences=fences,
            name=self.name,
        )


def from_measurements(
    devices: Iterable[Device],
    links: Iterable[Link],
    *,
    fences: Iterable[Iterable[str]] | None = None,
    name: str = "swarm",
) -> Network:
    """A network from partial measurements of peers (by peer id). Several figures for a direction: the lower counts.

    A pair nobody measured gets the median of what was measured between its two fences (or sites), else of all links,
    halved: unknown links should be measured before they are leaned on. With no figure at all, InputError.
    """
    devs = tuple(devices)
    of_peer: dict[str, list[int]] = {}
    for k, d in enumerate(devs):
        of_peer.setdefault(d.peer, []).append(k)
    bw = np.full((len(devs), len(devs)), np.nan)
    lat = np.full((len(devs), len(devs)), np.nan)
    for ln in links:
        if ln.bandwidth_bytes_per_s <= 0 or ln.latency_s < 0:
            raise InputError(
                f"link {ln.src} -> {ln.dst}: {ln.bandwidth_bytes_per_s} bytes/s, {ln.latency_s} s is impossible"
            )
        for i in of_peer.get(ln.src, []):
            for j in of_peer.get(ln.dst, []):
                bw[i, j] = np.fmin(bw[i, j], ln.bandwidth_bytes_per_s)
                lat[i, j] = np.fmax(lat[i, j], ln.latency_s)
    groups = None
    if fences is not None:
        groups = tuple(tuple(k for p in f for k in of_peer.get(p, [])) for f in fences)
        groups = tuple(g for g in groups if g)
    label = np.arange(len(devs))
    for n, group in enumerate(groups or ()):
        label[list(group)] = len(devs) + n
    if groups is None:
        sites = {d.site: n for n, d in enumerate(devs) if d.site}
        label = np.array([sites.get(d.site, -1 - k) for k, d in enumerate(devs)])
    for members in of_peer.values():
        bw[np.ix_(members, members)], lat[np.ix_(members, members)] = LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S
    _fill(bw, lat, label, devs)
    net = Network(devices=devs, bandwidth_bytes_per_s=bw, latency_s=lat, fences=groups, name=name)
    net.check()
    return net


def _fill(bw: Floats, lat: Floats, label: npt.NDArray[np.int64], devs: Sequence[Device]) -> None:
    """Fill unmeasured pairs in place: the other direction, else between the two groups, else all links halved."""
    off = ~np.eye(len(devs), dtype=bool)
    known = np.isfinite(bw) & off
    for a in (bw, lat):
        a[:] = np.where(np.isfinite(a), a, a.T)
    between: dict[tuple[int, int], tuple[float, float]] = {}
    ks = np.argwhere(np.isfinite(bw) & off)
    sums: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i, j in ks:
        sums.setdefault((int(label[i]), int(label[j])), []).append((float(bw[i, j]), float(lat[i, j])))
    for key, v in sums.items():
        between[key] = (float(np.median([x[0] for x in v])), float(np.median([x[1] for x in v])))
    missing = np.argwhere(off & ~np.isfinite(bw))
    if len(missing) and not known.any():
        i, j = missing[0]
        raise InputError(f"no link of the swarm is measured yet ({devs[i].name} -> {devs[j].name}); wait a few seconds")
    fallback = (float(np.nanmedian(bw[off])) / 2, float(np.nanmedian(lat[off])) * 2) if len(missing) else (0.0, 0.0)
    for i, j in missing:
        bw[i, j], lat[i, j] = between.get((int(label[i]), int(label[j])), fallback)

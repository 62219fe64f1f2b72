"""A testbed as Linux will carry it: who is where, at which address, and the commands that build it. Pure.

Every peer has a network namespace of its own, and so has the trainer. The peers of a site share a bridge in the site's
namespace; sites meet in a core that routes. What leaves a peer for its own site is shaped on the peer's interface, what
leaves a site for another on the site's uplink, one queue per direction and pair of sites, as a planner counts links.
The trainer hangs at the core unshaped: rivals read their data where they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner import Network, load_testbed
from fusion_p2p.planner.testbed import testbed_names

CORES = 1.2  # of this machine, shared out among the peers, where the testbed does not say
CORE, TRAINER = "core", "trainer"
MTU, PAYLOAD = 1514, 1448  # bytes of a full frame as HTB counts it, and what of it a TCP stream delivers
MOST_SITES, MOST_PEERS = 200, 250
SMALL_SHARE = 0.1  # of a link that acknowledgements and heartbeats are sure of, ahead of bulk
SMALL_MASK = "0xff80"  # of the length field: packets below 128 bytes
LEAST_DELAY_S = 1e-3
QUEUE_S = 0.1  # of bulk that may wait at a link before packets are dropped
LEAST_QUEUE = 16  # frames, of a slow link
LEAST_BPS, MOST_BPS, MOST_DELAY_S = 8e3, 1e11, 10.0  # what tc and a run can do with
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")  # of a namespace: a file's name, and a word of commands
_OURS = re.compile(rf"{CORE}|{TRAINER}|site-\d+")
Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPeer:
    """`cores`: its share of this machine. `site` indexes `Bed.sites`; `name` is the planner's."""

    name: str
    site: int
    address: str
    cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLink:
    """One direction between two sites, or inside one; `bits_per_s` is what a TCP stream is to deliver.

    `latency_s`, one way: from LEAST_DELAY_S on it is kept by `lab.delay`, below it is what the kernel takes.
    """

    src: int
    dst: int
    bits_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """`network` has the same devices in the same order as `peers`, its rates those of `links`."""

    name: str
    sites: tuple[str, ...]
    peers: tuple[LabPeer, ...]
    links: tuple[LabLink, ...]
    network: Network

    def link(self, src: int, dst: int) -> LabLink:
        return next(x for x in self.links if (x.src, x.dst) == (src, dst))

    def of_site(self, site: int) -> list[LabPeer]:
        return [p for p in self.peers if p.site == site]

    def is_delayed(self, site: int) -> bool:
        """Whether anything that leaves it for another site is held up."""
        return any(x.src == site != x.dst and x.latency_s >= LEAST_DELAY_S for x in self.links)


def load_bed(path: Path, name: str | None = None, *, rate_scale: float = 1.0) -> Bed:
    """The testbed of a file, its rates times `rate_scale`. InputError for what cannot be built on one machine."""
    names = testbed_names(path)
    if name is None and len(names) != 1:
        raise InputError(f"{path} has several testbeds; name one: {path}:{names[0]} (of {', '.join(names)})")
    name = name or names[0]
    if not 0 < rate_scale <= 1e6:
        raise InputError(f"rate scale {rate_scale:g} must be above 0")
    network = load_testbed(path, name)
    cores = json.loads(path.read_text())["testbeds"][name].get("cores", CORES)
    if not isinstance(cores, int | float) or not 0 < cores <= 1024:
        raise InputError(f"{path}: testbed {name}: cores = {cores!r} must be above 0")
    return bed_of(scaled(network, rate_scale), cores=float(cores))


def scaled(network: Network, rate_scale: float) -> Network:
    """The same network with every bandwidth times `rate_scale`; latencies stay."""
    return replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * rate_scale)


def bed_of(network: Network, *, cores: float = CORES) -> Bed:
    """Sites, addresses, shares of `cores` and links of a planner's network. InputError where a pair of sites, or one
    site, has links of different rates: one queue carries them."""
    devices = network.devices
    sites = tuple(dict.fromkeys(d.site for d in devices))
    if len(sites) > MOST_SITES or len(devices) > MOST_PEERS:
        raise InputError(f"testbed {network.name}: a lab holds {MOST_SITES} sites and {MOST_PEERS} peers at most")
    for d in devices:
        if not _NAME.fullmatch(d.peer) or _OURS.fullmatch(d.peer):
            raise InputError(
                f"testbed {network.name}: {d.peer!r} cannot be a peer's name in a lab; name sites with letters, "
                f"digits, - and _, as in Oregon"
            )
    total = sum(d.flops_per_s for d in devices)
    seen: dict[int, int] = {}
    peers = []
    for d in devices:
        site = sites.index(d.site)
        seen[site] = seen.get(site, 1) + 1
        share = cores * d.flops_per_s / total
        peers.append(LabPeer(name=d.peer, site=site, address=f"10.77.{site}.{seen[site]}", cores=share))
    rates: dict[tuple[int, int], set[float]] = {}
    latency: dict[tuple[int, int], float] = {}
    for i, a in enumerate(peers):
        for j, b in enumerate(peers):
            if i != j:
                rate = 8 * float(network.bandwidth_bytes_per_s[i, j])
                rates.setdefault((a.site, b.site), set()).add(rate)
                latency[a.site, b.site] = max(latency.get((a.site, b.site), 0.0), float(network.latency_s[i, j]))
    for (s, t), found in rates.items():
        if len(found) > 1 or not np.isfinite(max(found)):
            text = ", ".join(f"{r / 1e6:g}" for r in sorted(found))
            raise InputError(f"testbed {network.name}: links {sites[s]} to {sites[t]} have {text} Mbps; give them one")
        rate, delay_s = max(found), latency[s, t]
        if not LEAST_BPS <= rate <= MOST_BPS or not 0 <= delay_s <= MOST_DELAY_S:
            raise InputError(
                f"testbed {network.name}: the link {sites[s]} to {sites[t]} has {rate / 1e6:g} Mbps and {delay_s:g} s; "
                f"a lab carries {LEAST_BPS / 1e6:g} to {MOST_BPS / 1e6:g} Mbps and {MOST_DELAY_S:g} s at most"
            )
    links = tuple(
        LabLink(src=s, dst=t, bits_per_s=found.pop(), latency_s=latency[s, t])
        for (s, t), found in sorted(rates.items())
    )
    return Bed(name=network.name, sites=sites, peers=tuple(peers), links=links, network=network)


# --- commands


def namespace(prefix: str, name: str) -> str:
    """The namespace of a peer, of site k ("site-k"), of the core or of the trainer."""
    return f"{prefix}{name}"


def namespaces(bed: Bed) -> list[str]:
    """Names without a prefix, in the order in which they are made."""
    return [CORE, TRAINER, *(f"site-{k}" for k in range(len(bed.sites))), *(p.name for p in bed.peers)]


def commands(bed: Bed, prefix: str) -> list[Command]:
    """What builds the bed, in order; every namespace's name begins with `prefix`."""
    return [*_spaces(bed, prefix), *_wires(bed, prefix), *_queues(bed, prefix)]


def _spaces(bed: Bed, prefix: str) -> Iterator[Command]:
    for name in namespaces(bed):
        yield "ip", "netns", "add", prefix + name
        yield "ip", "-n", prefix + name, "link", "set", "lo", "up"
    for name in (CORE, *(f"site-{k}" for k in range(len(bed.sites)))):
        yield "ip", "netns", "exec", prefix + name, "sysctl", "-qw", "net.ipv4.ip_forward=1"
    # Only the interface that has an address answers for it: else the ends of a delay element do, and are passed by.
    yield "ip", "netns", "exec", prefix + CORE, "sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1"


def _wires(bed: Bed, prefix: str) -> Iterator[Command]:
    yield from _veth(prefix + TRAINER, "eth0", prefix + CORE, TRAINER)
    yield from _address(prefix + TRAINER, "eth0", "10.79.0.2/24", "10.79.0.1")
    yield from _address(prefix + CORE, TRAINER, "10.79.0.1/24")
    for k in range(len(bed.sites)):
        site = prefix + f"site-{k}"
        yield "ip", "-n", site, "link", "add", "br0", "type", "bridge"
        yield from _address(site, "br0", f"10.77.{k}.1/24")
        if bed.is_delayed(k):  # between the two ends `lab.delay` passes frames on
            yield from _veth(site, "wan", prefix + CORE, f"d{k}")
            yield from _veth(prefix + CORE, f"e{k}", prefix + CORE, f"s{k}")
            for name in (f"d{k}", f"e{k}"):
                yield "ip", "-n", prefix + CORE, "link", "set", name, "up"
        else:
            yield from _veth(site, "wan", prefix + CORE, f"s{k}")
        yield from _address(site, "wan", f"10.78.{k}.2/24", f"10.78.{k}.1")
        yield from _address(prefix + CORE, f"s{k}", f"10.78.{k}.1/24")
        yield "ip", "-n", prefix + CORE, "route", "add", f"10.77.{k}.0/24", "via", f"10.78.{k}.2"
    for n, p in enumerate(bed.peers):
        site = prefix + f"site-{p.site}"
        yield from _veth(prefix + p.name, "eth0", site, f"p{n}")
        yield "ip", "-n", site, "link", "set", f"p{n}", "master", "br0", "up"
        yield from _address(prefix + p.name, "eth0", f"{p.address}/24", f"10.77.{p.site}.1")


def _veth(space: str, name: str, other: str, other_name: str) -> Iterator[Command]:
    yield "ip", "link", "add", "name", name, "netns", space, "type", "veth", "peer", "name", other_name, "netns", other


def _address(space: str, name: str, address: str, gateway: str | None = None) -> Iterator[Command]:
    yield "ip", "-n", space, "address", "add", address, "dev", name
    yield "ip", "-n", space, "link", "set", name, "up"
    if gateway is not None:
        yield "ip", "-n", space, "route", "add", "default", "via", gateway


def queues(bed: Bed, link: LabLink) -> list[tuple[str, str, str]]:
    """(namespace without prefix, interface, HTB class) of what carries a link: one queue, inside a site one a peer."""
    if link.src == link.dst:
        return [(p.name, "eth0", "1:10") for p in bed.of_site(link.src)]
    to = [x.dst for x in bed.links if x.src == link.src and x.dst != link.src]
    return [(f"site-{link.src}", "wan", f"1:{_class(to.index(link.dst)):x}")]


def _class(position: int) -> int:
    return 0x10 * (position + 1)


def _queues(bed: Bed, prefix: str) -> Iterator[Command]:
    for k in range(len(bed.sites)):
        out = [x for x in bed.links if x.src == k and x.dst != k]
        if out:
            yield from _shape(prefix + f"site-{k}", "wan", [(f"10.77.{x.dst}.0/24", x.bits_per_s) for x in out])
    for p in bed.peers:
        inside = [x for x in bed.links if (x.src, x.dst) == (p.site, p.site)]
        rates = [x.bits_per_s for x in bed.links if x.src == p.site]
        if inside:
            yield from _shape(prefix + p.name, "eth0", [(f"10.77.{p.site}.0/24", inside[0].bits_per_s)])
        if rates:  # a burst of one packet as large as a slow link's second would hold up all else
            yield "ip", "-n", prefix + p.name, "link", "set", "eth0", "gso_max_size", str(burst_bytes(min(rates)))


def burst_bytes(bits_per_s: float) -> int:
    """How much may go at once: 2 ms of the link, at least a full frame and at most what the kernel makes of one."""
    return int(min(65536, max(2 * MTU, bits_per_s / 8 * 0.002)))


def _shape(space: str, device: str, targets: list[tuple[str, float]]) -> Iterator[Command]:
    """HTB: a class per target network, in it small packets first, then bulk; all else passes unshaped."""
    tc = "tc", "-n", space
    yield *tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "0"
    for k, (network, wanted) in enumerate(targets):
        base = _class(k)
        yield from _classes("add", space, device, base, wanted)
        match = (*tc, "filter", "add", "dev", device, "parent", "1:", "protocol", "ip")
        to = ("u32", "match", "ip", "dst", network)
        yield *match, "prio", "1", *to, "match", "u16", "0x0000", SMALL_MASK, "at", "2", "flowid", f"1:{base + 1:x}"
        yield *match, "prio", "2", *to, "flowid", f"1:{base + 2:x}"


def _classes(verb: str, space: str, device: str, base: int, wanted: float) -> Iterator[Command]:
    """What lets `wanted` bits a second pass in all, under class number `base`."""
    tc, rate = ("tc", "-n", space), wanted * MTU / PAYLOAD
    burst = "burst", str(burst_bytes(wanted)), "cburst", str(burst_bytes(wanted))
    most = ("ceil", f"{rate:.0f}bit", *burst, "quantum", str(2 * MTU))
    where = (*tc, "class", verb, "dev", device, "parent")
    yield *where, "1:", "classid", f"1:{base:x}", "htb", "rate", f"{rate:.0f}bit", *most
    for leaf, share, order in ((base + 1, SMALL_SHARE, "0"), (base + 2, 1 - SMALL_SHARE, "1")):
        own = "htb", "rate", f"{share * rate:.0f}bit", *most, "prio", order
        yield *where, f"1:{base:x}", "classid", f"1:{leaf:x}", *own
        limit = max(LEAST_QUEUE * MTU, int(wanted / 8 * QUEUE_S))
        yield *tc, "qdisc", verb, "dev", device, "parent", f"1:{leaf:x}", "bfifo", "limit", str(limit)


def rate_commands(bed: Bed, prefix: str, link: LabLink, bits_per_s: float) -> list[Command]:
    """What gives a link of a bed that is built another rate. InputError for a rate that no lab carries."""
    if not LEAST_BPS <= bits_per_s <= MOST_BPS:
        raise InputError(f"a lab carries {LEAST_BPS / 1e6:g} to {MOST_BPS / 1e6:g} Mbps, not {bits_per_s / 1e6:g}")
    found: list[Command] = []
    for space, device, number in queues(bed, link):
        base = int(number.removeprefix("1:"), 16)
        found += _classes("change", prefix + space, device, base, bits_per_s)
    return found

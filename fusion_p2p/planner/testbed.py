"""Testbed and OP-DAG summary files (`examples/testbeds/*.json`) as planner inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fusion_p2p.errors import InputError
from fusion_p2p.planner.network import Device, Network
from fusion_p2p.planner.workload import Workload, workload

MBPS = 1e6 / 8  # bytes/s
COLUMNS = {
    "f": "forward_flops",
    "b": "backward_flops",
    "mem": "forward_bytes",
    "P": "parameters",
    "stash": "stash_bytes",
    "kern": "kernels",
    "cut": "cut_bytes",
}
MOST_DEVICES = 4096  # a plan looks at every pair of them
MOST_BYTES = 64 << 20  # of a file
MOST_NAME = 64
_MISSTATED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise InputError(f"{path} is no testbed or OP-DAG summary file: it has more than {MOST_BYTES} bytes")
        data = json.loads(text)
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}; give a testbed or OP-DAG summary file") from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data


def load_workload(path: str | Path, name: str) -> tuple[Workload, int]:
    """(workload, micro-batches) of model `name` in an OP-DAG summary file; units as in its `_meta.fields`."""
    path = Path(path)
    data = _load(path)
    if name not in data or name.startswith("_"):
        known = ", ".join(sorted(k for k in data if not k.startswith("_")))
        raise InputError(f"{path} has no model {name!r}; it has {known}")
    entry = data[name]
    try:
        settings = data.get("_meta", {}).get("settings", {}).get(name, {})
        columns = {ours: [float(x) for x in entry[theirs]] for theirs, ours in COLUMNS.items()}
        samples, micro_batches = int(entry.get("samples", 1)), int(settings.get("M", 16))
        recompute = bool(settings.get("recompute", False))
    except _MISSTATED as e:
        raise InputError(f"{path}: model {name!r} lacks or misstates column {e}") from e
    if samples < 1:
        raise InputError(f"{path}: model {name!r} has {samples} samples a micro-batch; at least 1")
    w = workload(name, columns, recompute=recompute, wire_bytes_per_element=2.0, samples=samples)
    return w, micro_batches


def testbed_names(path: str | Path) -> tuple[str, ...]:
    """Names of the testbeds in a file."""
    beds = _load(Path(path)).get("testbeds")
    if not isinstance(beds, dict) or not beds:
        raise InputError(f'{path} has no "testbeds" object')
    return tuple(beds)


def load_testbed(path: str | Path, name: str) -> Network:
    """Testbed `name` of a testbeds file: its `rule` gives every pair's bandwidth and latency. A missing pair is
    refused."""
    path = Path(path)
    data = _load(path)
    names = testbed_names(path)
    if name not in names:
        raise InputError(f"{path} has no testbed {name!r}; it has {', '.join(names)}")
    try:
        return _build(name, data, data["testbeds"][name])
    except _MISSTATED as e:
        raise InputError(f"{path}: testbed {name!r} lacks or misstates {type(e).__name__} {e}") from e


def _build(name: str, data: Mapping[str, Any], bed: Mapping[str, Any]) -> Network:
    gpus = data["gpus"]
    devices: list[Device] = []
    sites: list[Mapping[str, Any]] = []
    seen: dict[str, int] = {}
    for site in bed["sites"]:
        if site["gpu"] not in gpus:
            raise InputError(f"testbed {name}: site {site['name']} has unknown gpu {site['gpu']!r}")
        if not isinstance(site["name"], str) or not site["name"].isprintable() or len(site["name"]) > MOST_NAME:
            raise InputError(f"testbed {name}: a site's name is at most {MOST_NAME} letters, not {site['name']!r:.99}")
        tflops, gbps, gb = gpus[site["gpu"]]
        count = site["count"]
        if not isinstance(count, int) or not 1 <= count <= MOST_DEVICES - len(devices):
            raise InputError(
                f"testbed {name}: site {site['name']} has count {count!r:.40}; there are 1 to {MOST_DEVICES} devices"
            )
        for _ in range(count):
            k = seen.get(site["name"], 0)
            seen[site["name"]] = k + 1
            devices.append(
                Device(
                    peer=f"{site['name']}{k}",
                    device="cuda:0",
                    flops_per_s=tflops * 1e12,
                    memory_bytes_per_s=gbps * 1e9,
                    memory_bytes=gb * 1e9,
                    site=site["name"],
                    node=f"{site['name']}/{site['gpu']}/{k // max(1, int(site.get('per_node', 1)))}",
                )
            )
            sites.append(site)
    if not devices:
        raise InputError(f"testbed {name} has no devices")
    links = _Links(name, bed, data)
    pairs = [[links.between(a, b, devices[i], devices[j]) for j, b in enumerate(sites)] for i, a in enumerate(sites)]
    table = np.asarray(pairs, dtype=np.float64)
    net = Network(devices=tuple(devices), bandwidth_bytes_per_s=table[..., 0], latency_s=table[..., 1], name=name)
    net.check()
    return net


class _Links:
    """The file's rule: same node, same site, given pair, else the least of uplink, downlink and region."""

    def __init__(self, name: str, bed: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        self.name, self.bed = name, bed
        self.inter: Mapping[str, Any] = bed.get("inter", {})
        regions = bed.get("regions")
        if isinstance(regions, str):
            if regions not in data.get("regions", {}):
                raise InputError(f"testbed {name} names unknown regions {regions!r}")
            regions = data["regions"][regions]
        self.regions: Mapping[str, Any] | None = regions
        self.same_region = data.get("same_region")
        self.known: dict[tuple[str, str], tuple[float, float]] = {}

    def between(self, a: Mapping[str, Any], b: Mapping[str, Any], i: Device, j: Device) -> tuple[float, float]:
        """(bytes/s, seconds) from device i of site a to device j of site b."""
        if i is j:
            return float("inf"), 0.0
        if i.site == j.site:
            mbps, ms = self.bed["intra_node"] if i.node == j.node else self.bed["intra_site"]
            return float(mbps) * MBPS, float(ms) / 1e3
        key = (i.site, j.site)
        if key not in self.known:
            self.known[key] = self._sites(a, b)
        return self.known[key]

    def _sites(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[float, float]:
        given = self.inter.get(f"{a['name']}-{b['name']}") or self.inter.get(f"{b['name']}-{a['name']}")
        if given is not None:
            return float(given[0]) * MBPS, float(given[1]) / 1e3
        mbps = min(float(a.get("up", "inf")), float(b.get("down", "inf")))
        ms = float(a.get("lat", 0.0)) + float(b.get("lat", 0.0))
        if self.regions is not None:
            region = self._region(str(a.get("region", "")), str(b.get("region", "")))
            if region is not None:
                mbps, ms = min(mbps, region[0]), ms + region[1]
        if mbps == float("inf"):
            raise InputError(
                f'testbed {self.name}: no link between sites {a["name"]} and {b["name"]}; add it to "inter"'
            )
        return mbps * MBPS, ms / 1e3

    def _region(self, a: str, b: str) -> tuple[float, float] | None:
        own = self.same_region if a == b else None
        given = own or (self.regions or {}).get(f"{a}-{b}") or (self.regions or {}).get(f"{b}-{a}")
        return None if given is None else (float(given[0]), float(given[1]))

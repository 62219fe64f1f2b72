"""How long operators take: a prior from FLOPs and bytes, then each distinct call timed once on the device.

FusionLLM section 3.3. A call's signature is its operator, plain arguments, shapes, types, and which inputs want a
gradient; GPT-2 of any depth has about twenty. The table is kept per device and torch build (`load_table`), so a second
run times only what is new. Moving averages of real stage times correct the whole device: `planner.replan.corrected`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from fusion_p2p.cost import flops, moved_bytes, spec_bytes, workspace_bytes
from fusion_p2p.errors import FusionError
from fusion_p2p.flow import Flow, analyse, is_float
from fusion_p2p.interp import BY_MODE, Program
from fusion_p2p.ir import Arg, BatchInt, ListArg, Node, OpDag, Ref, refs
from fusion_p2p.opset import OPS, dtype_of
from fusion_p2p.planner.network import AtomTimes
from fusion_p2p.seeded import RngKey
from fusion_p2p.workload import atoms

TABLE_VERSION = 2
MAX_ENTRIES = 20_000  # the oldest go first; about 3 MB on disk
MOST_WHAT = 120
Clock = Callable[[], float]

# What an operator class reaches of a device's matmul rate, before anything is timed.
EFFICIENCY: Mapping[str, float] = {
    "linear": 1.0,
    "matmul": 0.8,
    "addmm": 1.0,
    "sdpa": 0.5,
    "conv": 0.5,
    "conv_t": 0.3,
    "conv_any": 0.4,
}
ELEMENTWISE = 0.05


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one call: the least of the repeats. `what`: the operator and the shapes that it was called with."""

    forward_s: float
    backward_s: float
    what: str = ""


class OpTable(msgspec.Struct, kw_only=True):
    """Signature -> seconds, on one device and torch build. `hardware`: the device's own name."""

    version: int = TABLE_VERSION
    device: str
    hardware: str = ""
    build: str
    times: dict[str, OpTime] = {}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer's record says of its device."""

    flops_per_s: float
    memory_bytes_per_s: float
    call_s: float = 8e-6  # launching one operator


def table_name(device: str) -> str:
    """File name of a device's table: device, processor count in use, torch build."""
    return _safe(f"ops-{device}-{torch.get_num_threads()}-{torch.__version__}") + ".json"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def load_table(folder: Path, device: str, hardware: str = "") -> OpTable:
    """The table kept for this device, empty if there is none, it is not readable as one, or of another device."""
    empty = OpTable(device=device, hardware=hardware, build=str(torch.__version__))
    table = _read(folder / table_name(device))
    if table is None:
        return empty
    fits = (table.version, table.device, table.hardware, table.build) == (
        empty.version, empty.device, empty.hardware, empty.build,
    )  # fmt: skip
    return table if fits else empty


def kept_tables(folder: Path, device: str, hardware: str) -> list[OpTable]:
    """Every table that is kept of a device: one for each count of processors in use and each torch build."""
    paths = sorted(folder.glob(_safe(f"ops-{device}-") + "*.json")) if folder.is_dir() else []
    found = [t for p in paths if (t := _read(p)) is not None]
    return [t for t in found if (t.version, t.device, t.hardware) == (TABLE_VERSION, device, hardware)]


def _read(path: Path) -> OpTable | None:
    try:
        table = msgspec.json.decode(path.read_bytes(), type=OpTable)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    sane = all(0 <= t.forward_s < 1e4 and 0 <= t.backward_s < 1e4 for t in table.times.values())
    return table if sane and len(table.times) <= MAX_ENTRIES else None


def save_table(table: OpTable, folder: Path) -> None:
    """Written beside and renamed, so that a crash leaves the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / table_name(table.device)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(table))
    new.replace(path)


def signature(dag: OpDag, node: Node, grad: Sequence[bool], batch: int) -> str:
    """Hex name of everything that decides how long a call takes."""

    def plain(a: Arg) -> object:
        if isinstance(a, Ref):
            return ["v", list(dag.values[a.id].at(batch)), dag.values[a.id].dtype, grad[a.id]]
        if isinstance(a, BatchInt):
            return a.at(batch)
        if isinstance(a, ListArg):
            return [plain(i) for i in a.items]
        return a

    said = [node.op, [plain(a) for a in node.args], {k: plain(a) for k, a in sorted(node.kwargs.items())}]
    return hashlib.blake2b(msgspec.json.encode(said), digest_size=12).hexdigest()


def measure(
    dag: OpDag,
    batch: int,
    table: OpTable,
    *,
    clock: Clock,
    timer: Clock | None = None,
    repeats: int = 5,
    budget_s: float = 60.0,
    most_bytes: float = math.inf,
) -> OpTable:
    """Time every signature of the model's training pass that `table` lacks; `table` is filled in place and returned.

    Inputs are made up in the declared shapes; integers within their range. What is left when `budget_s` is over, or
    would take more than `most_bytes` of memory, keeps the prior. `timer` times the calls, by default `clock`, which
    bounds the whole. FusionError if an operator fails on its shapes.
    """
    flow = analyse(dag)
    device = torch.device(table.device)
    end = clock() + budget_s
    made = _Inputs(dag, flow, batch, device)
    for key, node in _missing(dag, flow, batch, table).items():
        if clock() < end and _bytes(dag, node, batch) <= most_bytes:
            while len(table.times) >= MAX_ENTRIES:
                del table.times[next(iter(table.times))]
            table.times[key] = _time(node, made, timer or clock, repeats)
    return table


def is_whole(dag: OpDag, batch: int, table: OpTable) -> bool:
    """Whether every call of the model's training pass was timed."""
    return not _missing(dag, analyse(dag), batch, table)


def _missing(dag: OpDag, flow: Flow, batch: int, table: OpTable) -> dict[str, Node]:
    """Signatures that the table lacks, each with a node of it."""
    timed = (dag.nodes[n] for n in flow.order)
    nodes = (n for n in timed if n.op != BY_MODE and OPS[n.op].cost != "view")
    of = {signature(dag, node, flow.grad, batch): node for node in nodes}
    return {key: node for key, node in of.items() if key not in table.times}


def _bytes(dag: OpDag, node: Node, batch: int) -> int:
    """Of a call's values, their gradients and one more copy, and what its kernel takes."""
    values = (*refs(node.args), *refs(node.kwargs), *(o for o in node.outs if o >= 0))
    return 3 * sum(spec_bytes(dag.values[v], batch) for v in values) + workspace_bytes(node, dag.values, batch)


class _Inputs:
    """Tensors in the declared shapes, leaves where training wants a gradient."""

    def __init__(self, dag: OpDag, flow: Flow, batch: int, device: torch.device) -> None:
        self.dag, self.flow, self.batch, self.device = dag, flow, batch, device
        self.random = torch.Generator().manual_seed(0)

    def of(self, node: Node) -> dict[int, torch.Tensor]:
        return {v: self._made(v) for v in dict.fromkeys(refs(node.args) + refs(node.kwargs))}

    def _made(self, v: int) -> torch.Tensor:
        spec = self.dag.values[v]
        shape, dtype = spec.at(self.batch), dtype_of(spec.dtype)
        if is_float(spec.dtype):
            t = torch.rand(shape, generator=self.random).add_(0.5).to(self.device, dtype)  # positive: logs, roots
            return t.requires_grad_(self.flow.grad[v])
        return torch.zeros(shape, dtype=dtype, device=self.device)


def _time(node: Node, made: _Inputs, clock: Clock, repeats: int) -> OpTime:
    program = Program([node])
    inputs = made.of(node)
    leaves = [t for t in inputs.values() if t.requires_grad]
    forward: list[float] = []
    backward: list[float] = []
    try:
        for _ in range(repeats + 1):
            env = dict(inputs)
            start = _now(clock, made.device)
            program(env, batch=made.batch, training=True, rng=RngKey(), device=made.device)
            forward.append(_now(clock, made.device) - start)
            outs = [env[o] for o in node.outs if o >= 0 and env[o].requires_grad]
            if outs and leaves:
                seeds = [torch.ones_like(o) for o in outs]
                start = _now(clock, made.device)
                torch.autograd.grad(outs, leaves, seeds, allow_unused=True)
                backward.append(_now(clock, made.device) - start)
    except (RuntimeError, ValueError, IndexError) as error:
        raise FusionError(f"{node.op} fails on its declared shapes: {str(error).splitlines()[0]}") from error
    # The first run finds memory and picks kernels; of the others the least counts: who shares the core only adds.
    shapes = " ".join(str(list(t.shape)).replace(" ", "") for t in inputs.values())
    back_s = min(backward[1:], default=0.0)
    return OpTime(min(forward[1:]), back_s, f"{node.op} {shapes}"[:MOST_WHAT])


def _now(clock: Clock, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def prior(dag: OpDag, node: Node, batch: int, rates: Rates) -> OpTime:
    """Seconds from FLOPs and bytes: the slower of arithmetic at the class's efficiency and memory traffic."""
    cost = OPS[node.op].cost
    if cost == "view":
        return OpTime(0.0, 0.0)
    rate = rates.flops_per_s * EFFICIENCY.get(cost, ELEMENTWISE)
    moved = moved_bytes(node, dag.values, batch) / rates.memory_bytes_per_s
    forward = max(flops(node, dag.values, batch) / rate, moved)
    return OpTime(forward + rates.call_s, 2 * forward + 2 * rates.call_s)


def atom_times(dag: OpDag, batch: int, table: OpTable | None, rates: Rates, *, recompute: bool = False) -> AtomTimes:
    """Seconds per atom for one micro-batch of `batch` samples: timed calls where the table has them, else the prior."""
    flow = analyse(dag)
    known = table.times if table is not None else {}
    forward, backward = [], []
    for atom in atoms(dag, batch):
        f = b = 0.0
        for n in atom.nodes:
            node = dag.nodes[n]
            if node.op == BY_MODE:
                continue
            t = known.get(signature(dag, node, flow.grad, batch)) or prior(dag, node, batch, rates)
            f += t.forward_s
            if any(o >= 0 and flow.grad[o] for o in node.outs):
                b += t.backward_s
        forward.append(f)
        backward.append(b + (f if recompute else 0.0))
    return AtomTimes(forward_s=np.array(forward), backward_s=np.array(backward))

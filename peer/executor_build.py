"""From an offer to a stage that works: admission, split, the state's bytes, the trial step. Runs on the compute thread.

What does not fit in memory is refused with figures; what is not admitted never runs.
"""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path

import msgspec
import torch

from fusion_p2p.admit import Caps, admit
from fusion_p2p.compute import Compute
from fusion_p2p.errors import FusionError
from fusion_p2p.guard import Guard
from fusion_p2p.ir import OpDag
from fusion_p2p.plan import Numerics
from fusion_p2p.snapshot import from_bytes
from fusion_p2p.split import StageProgram, split
from fusion_p2p.stage import Stage
from fusion_p2p.trial import TrialTimes, trial
from fusion_p2p.workload import atoms
from peer.errors import RefusedError
from peer.executor_memory import MemoryLimit, asked_bytes, gib, is_out_of_memory, let_go
from peer.executor_protocol import HostStage
from peer.op_times import shape_of
from peer.protocol import AtomSeconds

OPERATORS_S = 2.0  # for one offer's operators that are not in the table yet; the next offer goes on


class Built(msgspec.Struct, frozen=True):
    """`memory_bytes`: what the stage took at its peak, the trial step included. `stage_flops`: of a whole micro-batch,
    forward and backward, by stage; neighbours' work is counted with it. `atoms`: how long each atom of the model takes
    here, () while that is not known of all."""

    stage: Stage
    memory_bytes: int
    times: TrialTimes
    stage_flops: dict[int, float]
    atoms: tuple[AtomSeconds, ...] = ()


def framework_compute(framework: str) -> type[Compute]:
    """What runs operators in "torch" or "jax". JAX is loaded here; InputError where it is not installed."""
    if framework == "jax":
        from fusion_p2p.jax_stage import JaxCompute

        return JaxCompute
    return Compute


def build(
    host: HostStage, state_path: Path, limit: MemoryLimit, threads: int, compute: type[Compute], operators: Path
) -> Built:
    """RefusedError (admission, policy, memory, state) if this executor cannot or will not host the stage."""
    if host.numerics.threads > threads:
        raise RefusedError(
            "policy", f"the run computes with {host.numerics.threads} threads, the cap here is {threads}"
        )
    wanted = limit.device.partition(":")[0]
    if host.numerics.device_class != wanted:
        raise RefusedError("policy", f"the run computes on {host.numerics.device_class}, this device is {limit.device}")
    before = limit.held()
    limit.reset_peak()
    try:
        return _build(host, state_path, limit, before, compute, operators)
    except (FusionError, RuntimeError, MemoryError) as error:
        refusal = _refusal(error, host.assignment.stage, limit)
        let_go(error)
        if refusal is None:
            raise
    finally:
        _release_memory()
    raise refusal


def _refusal(error: Exception, stage: int, limit: MemoryLimit) -> RefusedError | None:
    """None: not the offer's fault."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, FusionError):
        return RefusedError("admission", f"stage {stage} is refused: {error}")
    if is_out_of_memory(error):
        return out_of_memory(stage, max(limit.peak(), limit.held()) + asked_bytes(error), limit.cap_bytes)
    return None


def _build(
    host: HostStage, state_path: Path, limit: MemoryLimit, before: int, compute: type[Compute], operators: Path
) -> Built:
    stage = host.assignment.stage
    dag = admit(host.opdag, caps=Caps(batch=host.numerics.micro_batch_size, value_bytes=limit.cap_bytes))
    if dag.hash != host.assignment.opdag_hash:
        raise RefusedError("admission", f"the OP-DAG has hash {dag.hash[:16]}, signed was {host.spec.opdag_hash[:16]}")
    programs = split(dag, host.numerics.cuts)
    if not 0 <= stage < len(programs):
        raise RefusedError("admission", f"stage {stage} of {len(programs)}")
    program = programs[stage]
    needed = before + least_bytes(host)
    if needed > limit.cap_bytes:
        raise out_of_memory(stage, needed, limit.cap_bytes)
    torch.set_num_threads(host.numerics.threads)
    state = from_bytes(state_path.read_bytes())
    times = TrialTimes(0.0, 0.0, 0.0)
    if host.trial:
        times = _trial(host, program, dag, state, limit, compute)
    made = Stage(
        program, dag, host.numerics, host.spec.optimizer, host.spec.seed, state,
        first_tick=host.first_tick, window=host.window, device=limit.device, clock=time.monotonic,
        compute=compute,
        guard=Guard(host.watched),
    )  # fmt: skip
    peak = max(limit.peak(), limit.held())
    if peak > limit.cap_bytes:
        raise out_of_memory(stage, peak, limit.cap_bytes)
    own = _operators(host, dag, limit, operators) if host.trial and compute is Compute else ()
    return Built(made, max(0, peak - before), times, stage_flops(dag, host.numerics), own)


def stage_flops(dag: OpDag, numerics: Numerics) -> dict[int, float]:
    """FLOPs of one full micro-batch, forward and backward, by stage."""
    chain = atoms(dag, numerics.micro_batch_size)
    bounds = (0, *numerics.cuts, len(chain))
    return {
        stage: float(sum(a.forward_flops + a.backward_flops for a in chain[start:stop]))
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
    }


def _trial(
    host: HostStage,
    program: StageProgram,
    dag: OpDag,
    state: dict[str, torch.Tensor],
    limit: MemoryLimit,
    compute: type[Compute],
) -> TrialTimes:
    times = trial(
        program, dag, host.numerics, host.spec.optimizer, host.spec.seed, state,
        window=host.window, device=limit.device, clock=time.monotonic, compute=compute,
    )  # fmt: skip
    _release_memory()
    return times


def _operators(host: HostStage, dag: OpDag, limit: MemoryLimit, folder: Path) -> tuple[AtomSeconds, ...]:
    """The model's atoms by this device's table, which is filled as far as time and memory allow."""
    n = host.numerics
    if n.dtype != "float32":  # operators are timed in the types that the OP-DAG declares
        return ()
    room = max(0, limit.cap_bytes - limit.held()) // 2
    try:
        t = shape_of(
            dag, n.micro_batch_size, folder, OPERATORS_S, device=limit.device, most_bytes=room, recompute=n.recompute
        )
    except MemoryError:
        t = None
    _release_memory()
    if t is None:
        return ()
    return tuple(AtomSeconds(*s) for s in zip(t.forward_s.tolist(), t.backward_s.tolist(), strict=True))


def least_bytes(host: HostStage) -> int:
    """What no execution can do without: the state's bytes beside the tensors made of them."""
    return 2 * host.state.size


def out_of_memory(stage: int, needed: int, cap: int) -> RefusedError:
    return RefusedError("memory", f"stage {stage} needs {gib(needed)}, cap {gib(cap)}", needed=needed, cap=cap)


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""What `peer.api.Run` stands on once it is open, and how a run begins: captured and signed, or read from its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht.home import home, last_swarm
from fusion_p2p.capture import Loss, capture, feed
from fusion_p2p.errors import InputError
from fusion_p2p.ir import OpDag
from fusion_p2p.optim import AdamW, check, from_torch
from fusion_p2p.planner import AtomTimes
from fusion_p2p.settings import OptimizerSpec
from fusion_p2p.snapshot import initial_state, to_bytes
from fusion_p2p.split import StageProgram
from peer.api_loop import LoopThread
from peer.api_session import Initial, SwarmSession
from peer.channel_io import ChannelSettings
from peer.data import Source
from peer.devices import OPERATORS
from peer.errors import SignatureError
from peer.lab.local_swarm import LocalSwarm
from peer.op_times import shape_of
from peer.signing import check_own, make_run_spec
from peer.trainer_adopt import Replay
from peer.trainer_ladder import LadderProbe
from peer.trainer_state import Manifest, RunFolder


@dataclass(frozen=True, slots=True)
class Begun:
    """The checked OP-DAG, its constants, what makes the first snapshot of a stage, what measures its codecs, and how
    its time divides over its atoms."""

    dag: OpDag
    constants: Mapping[str, Any]
    initial: Initial
    probe: LadderProbe | None = None
    shape: AtomTimes | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """What an open run holds."""

    loop: LoopThread
    session: SwarmSession
    folder: RunFolder
    begun: Begun
    source: Source


def created(
    folder: RunFolder,
    source: Source,
    owner: Ed25519PrivateKey,
    *,
    model: torch.nn.Module | None,
    loss: Loss | None,
    name: str,
    description: str,
    seed: int,
    optimizer: OptimizerSpec,
    micro_batch_size: int,
    probe_s: float,
) -> Begun:
    """Capture `model` and sign the run's spec into `folder`. Raises InputError, CaptureError.

    `probe_s`: seconds in which its operators, and later its codecs, may be timed here; 0: they are not.
    """
    if folder.exists:
        raise InputError(f"{folder.root} holds a run already; continue it with: fusion-run resume {folder.root}")
    if model is None:
        raise InputError("a new run needs a model; to continue one use Run.resume(run_dir, data=...)")
    start = source.state_dict()
    example = source.next_batch(micro_batch_size)
    source.load_state_dict(start)
    captured = capture(model, example, loss=loss, seed=seed)
    _, signed = make_run_spec(
        owner,
        name=name,
        opdag_hash=captured.opdag.hash,
        seed=seed,
        optimizer=optimizer,
        created=time.time(),
        description=description,
    )
    folder.create(signed, captured.opdag.to_bytes())
    state = {name: t.detach().clone() for name, t in captured.state.items()}
    measure = LadderProbe(
        captured=captured,
        example=example,
        optimizer=optimizer,
        micro_batch_size=micro_batch_size,
        seed=seed,
        folder=folder.root,
        limit_s=probe_s,
    )
    return Begun(
        captured.opdag,
        captured.constants,
        lambda program: to_bytes(initial_state(state, program)),
        measure if probe_s > 0 and measure.fits else None,
        shape_of(captured.opdag, micro_batch_size, home() / OPERATORS, probe_s) if probe_s > 0 else None,
    )


def reopened(
    folder: RunFolder, source: Source, owner: Ed25519PrivateKey, tell: Callable[[str], None]
) -> tuple[Begun, Manifest]:
    """The run in `folder`, `source` at its newest complete set's position. `tell` hears what had to be mended."""
    try:
        check_own(folder.spec()[0], owner)
    except SignatureError as error:
        raise InputError(f"{folder.root}: {error}") from None
    for line in folder.mend():
        tell(line)
    dag = msgspec.json.decode(folder.opdag(), type=OpDag)
    manifest = folder.manifest()
    source.load_state_dict(msgspec.json.decode(manifest.data_state))
    return Begun(dag, {}, _no_initial), manifest


def replay_of(source: Source, dag: OpDag, newest: Manifest) -> Replay:
    """The training batches from the set `newest` on, once more, for stages that went on beyond it."""
    samples = newest.numerics.micro_batches * newest.numerics.micro_batch_size
    at = msgspec.json.decode(newest.data_state)
    return Replay(draw=lambda: feed(dag, source.next_batch(samples), {}), rewind=lambda: source.load_state_dict(at))


def addresses_of(swarm: LocalSwarm | str | Sequence[str] | None) -> tuple[str, ...]:
    """Where the swarm is: as given, else $FUSION_SWARM, else the swarm joined last. Raises InputError."""
    if isinstance(swarm, LocalSwarm):
        return tuple(swarm.addresses)
    given = (swarm,) if isinstance(swarm, str) else tuple(swarm or ())
    found = given or tuple(os.environ.get("FUSION_SWARM", "").split()) or last_swarm()
    if not found:
        raise InputError("no swarm: pass swarm=ADDRESS or a LocalSwarm, set FUSION_SWARM, or run fusion-peer join")
    return found


def wanted_peers(swarm: object, allow_peers: Sequence[str]) -> int:
    """How many volunteers are worth waiting for before the plan is made."""
    there = swarm.peers if isinstance(swarm, LocalSwarm) else 1
    return min(there, len(allow_peers) or there)


def optimizer_of(
    given: OptimizerSpec | torch.optim.Optimizer | None, model: torch.nn.Module | None, clip_norm: float | None
) -> OptimizerSpec:
    """The optimizer as data; a torch optimizer is translated."""
    spec = from_torch(given, model) if isinstance(given, torch.optim.Optimizer) else given or AdamW(3e-4)
    return spec if clip_norm is None else check(msgspec.structs.replace(spec, clip_norm=clip_norm))


def channels_of(swarm: object) -> ChannelSettings:
    """Heartbeats as the volunteers of a local swarm have them."""
    return (
        ChannelSettings(beat_s=swarm.beat_s, dead_s=swarm.dead_s)
        if isinstance(swarm, LocalSwarm)
        else ChannelSettings()
    )


def position(source: Source) -> bytes:
    """Where the data is now, for a set."""
    return msgspec.json.encode(source.state_dict())


def _no_initial(program: StageProgram) -> bytes:
    raise InputError(f"the run folder lacks the first snapshot of stage {program.stage}; start a new run")

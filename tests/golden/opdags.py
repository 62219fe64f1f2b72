"""Checked-in OP-DAGs of the survey's hand-written models, and what they compute from numbers that never change.

`python -m tests.golden.opdags` writes them anew, after a change of the opset that is meant.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import torch

from fusion_p2p import seeded
from fusion_p2p.interp import Program
from fusion_p2p.ir import OpDag, ValueSpec
from fusion_p2p.ops_table import OPSET, TABLE
from fusion_p2p.opset import dtype_of
from fusion_p2p.seeded import RngKey
from fusion_p2p.selfcheck import constants
from tests import model_zoo

FOLDER = pathlib.Path(__file__).parent / "opdags"
FIGURES = FOLDER / "figures.json"
NAMES = (
    "mixed",
    "random_in_forward",
    "in_place",
    "dropouts",
    "unet",
    "fourier",
    "gru",
    "frozen",
    "structures",
    "running_buffer",
    "uint8_images",
)
BATCH = 3


def cases() -> list[model_zoo.Case]:
    return [c for c in model_zoo.HAND_WRITTEN if c.name in NAMES]


def path(name: str) -> pathlib.Path:
    return FOLDER / f"{name}.json"


def table_blake2b() -> str:
    """Of every operator's name, arguments and cost."""
    return hashlib.blake2b(f"{OPSET}\n{TABLE}".encode(), digest_size=16).hexdigest()


def _normal(value: int, spec: ValueSpec) -> torch.Tensor:
    shape, dtype = spec.at(BATCH), dtype_of(spec.dtype)
    x = seeded.randn(RngKey(7), value, shape, torch.float32)
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


def figures(dag: OpDag) -> dict[str, float]:
    """Losses in both modes, the norms of all gradients and of all buffers' updates."""
    env: dict[int, Any] = constants(dag, torch.device("cpu"))
    for i in dag.inputs:
        spec = dag.values[i.value]
        if dtype_of(spec.dtype).is_floating_point:
            env[i.value] = _normal(i.value, spec)
        else:
            low, high = i.vmin or 0, 9 if i.vmax is None else i.vmax
            env[i.value] = seeded.randint(
                RngKey(7), i.value, spec.at(BATCH), max(low, 0), high + 1, dtype_of(spec.dtype)
            )
    leaves = {p.value: (_normal(p.value, dag.values[p.value]) * 0.3).requires_grad_(p.trainable) for p in dag.params}
    for b in dag.buffers:
        x = _normal(b.value, dag.values[b.value])
        env[b.value] = x.abs() + 0.5 if x.is_floating_point() else x * 0
    updates = [b.update for b in dag.buffers if b.update is not None]
    out = {}
    for mode, training in (("train", True), ("eval", False)):
        now = env | leaves
        program = Program(dag.nodes, [dag.loss, *updates])
        program(now, batch=BATCH, training=training, rng=RngKey(1, 2, 3))
        out[f"{mode} loss"] = float(now[dag.loss].detach())
        if training:
            wanted = [x for x in leaves.values() if x.requires_grad]
            grads = torch.autograd.grad(now[dag.loss], wanted, allow_unused=True)
            out["gradient norm"] = sum(float(g.abs().double().square().sum()) for g in grads if g is not None) ** 0.5
            out["update norm"] = sum(float(now[u].detach().double().square().sum()) for u in updates) ** 0.5
    return out


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, Any] = {"operator table": table_blake2b()}
    for case in cases():
        dag = model_zoo.sample(case).captured.opdag
        path(case.name).write_bytes(dag.to_bytes())
        found[case.name] = figures(dag)
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""On a CUDA device: the same bits for every cut and each time, near the CPU; bf16; a refusal instead of a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_p2p.codec import FrameKey, parse
from fusion_p2p.plan import Numerics
from peer.errors import RefusedError
from tests.cluster.test_peer_control import OWNER, run, serving, trainer
from tests.cluster.volunteer_process import Peer
from tests.unit import stage_models as models

STEPS = 8
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def as_executors_compute() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(before)


def trained(case: models.Case, stages: int, **options: Any) -> tuple[list[float], str, dict[str, torch.Tensor]]:
    pipeline = case.pipeline(stages, device="cuda:0", **options)
    losses = [pipeline.train_step(case.batch(step)) for step in range(STEPS)]
    return losses, pipeline.weights_blake2b(), pipeline.state_dict()


@pytest.mark.parametrize("name", ["gpt2", "resnet", "skip_net"])
def test_cuts_and_repetition_do_not_change_a_bit_and_the_cpu_is_near(name: str) -> None:
    case: models.Case = getattr(models, name)()
    losses, weights, state = trained(case, 1)
    for stages in (2, 4, 4):
        again = trained(case, stages)
        assert again[0] == losses
        assert again[1] == weights
    cpu = case.pipeline(1)
    assert losses == pytest.approx([cpu.train_step(case.batch(step)) for step in range(STEPS)], rel=1e-4)
    assert all(t.dtype == state[n].dtype for n, t in cpu.state_dict().items())


@pytest.mark.parametrize(
    "name", ["int8", "topk:0.1", "topk-masked:0.1", "rotated:4/2", "subspace:16/4", "transform:2/1"]
)
def test_codecs_on_the_device_say_what_they_say_on_the_cpu(name: str) -> None:
    """Frames go both ways between a CUDA end and a CPU end; what both decode is the same but for rounding."""
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1)).pow(3)
    key, shape = FrameKey(seed=1, step=0, micro_batch=0, value=2), (4, 64, 64)
    sender, here, there = parse(name, "cuda:0"), parse(name), parse(name, "cuda:0")
    payload, sent = sender.encode_forward(x.cuda(), key)
    y, got = here.decode_forward(payload, shape, x.dtype, key)
    on_device, _ = there.decode_forward(payload, shape, x.dtype, key)
    assert on_device.device.type == "cuda"
    torch.testing.assert_close(on_device.cpu(), y, rtol=1e-4, atol=1e-4)
    back = sender.decode_backward(here.encode_backward(x, got, key), shape, x.dtype, sent, key)
    assert back.device.type == "cuda" and bool(torch.isfinite(back).all())
    mine, _ = parse(name).encode_forward(x, key)
    assert abs(len(mine) - len(payload)) < 0.02 * len(mine) + 8


def test_seeded_dropout_is_the_cpus() -> None:
    """Masks are a function of the seed, not of the device: otherwise the losses would differ in the second digit."""
    case = models.gpt2(0.1)
    losses, _, _ = trained(case, 2)
    cpu = case.pipeline(2)
    assert losses == pytest.approx([cpu.train_step(case.batch(step)) for step in range(STEPS)], rel=1e-4)


def test_bfloat16_stays_near_float32() -> None:
    case = models.gpt2()
    exact, rounded = trained(case, 2), trained(case, 2, dtype="bfloat16")
    assert rounded[0] != exact[0]
    assert rounded[0] == pytest.approx(exact[0], rel=1e-2)
    assert rounded[1] == trained(case, 1, dtype="bfloat16")[1]
    assert all(t.dtype == torch.float32 for t in rounded[2].values())


def test_too_little_vram_is_a_refusal_with_figures_and_the_next_stage_is_taken(tmp_path: Path) -> None:
    owner = OWNER.public_key().public_bytes_raw().hex()
    process = Peer(tmp_path / "peer", "--runs", owner, "--device", "cuda:0", "--vram", "256MiB", memory="12GiB")
    try:
        peer = process.event("joined")
        process.event("devices")
        executor = process.executor().pid

        async def main() -> None:
            async with trainer(tmp_path, peer, width=256) as t:
                host = await t.host(peer)
                async with serving(host):
                    with pytest.raises(RefusedError, match=r"cap 0\.25 GiB") as caught:
                        await host.offer(t.offer(peer["peer"], numerics=cuda(200_000), device="cuda:0"), 0)
                    assert caught.value.code == "memory"
                    assert caught.value.needed > caught.value.cap == 256 << 20
                    with pytest.raises(RefusedError, match="computes on cpu") as caught:
                        await host.offer(t.offer(peer["peer"], device="cuda:0"), 0)
                    assert caught.value.code == "policy"
                    accepted = await host.offer(t.offer(peer["peer"], numerics=cuda(4), device="cuda:0"), 0)
                    assert accepted.trial_backward_s > 0

        run(main())
        assert process.executor().pid == executor
        assert process.end() == 0
    finally:
        process.close()


def cuda(batch: int) -> Numerics:
    return Numerics(cuts=(), micro_batches=2, micro_batch_size=batch, device_class="cuda")

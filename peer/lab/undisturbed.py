"""What a run's weights would be had nothing happened: the same numerics, data and seed in this process, no swarm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fusion_p2p.capture import Loss, capture
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.plan import NumericLogEntry, Numerics
from fusion_p2p.settings import OptimizerSpec
from peer.data import Source


def undisturbed_weights(
    model: torch.nn.Module,
    source: Source,
    *,
    numerics: Numerics,
    optimizer: OptimizerSpec,
    steps: int,
    seed: int = 0,
    loss: Loss | None = None,
    log: Sequence[NumericLogEntry] = (),
) -> str:
    """`weights_blake2b` after `steps` steps of `model` as it is now, from the present position of `source` on.

    `numerics`: of the first step; `log`: entries of a numeric log, whose cuts and codecs hold from their steps on.
    """
    samples = numerics.micro_batches * numerics.micro_batch_size
    start = source.state_dict()
    example = source.next_batch(numerics.micro_batch_size)
    source.load_state_dict(start)
    with _as_in_an_executor(numerics.threads):
        pipeline = LocalPipeline(
            capture(model, example, loss=loss, seed=seed),
            optimizer=optimizer,
            micro_batches=numerics.micro_batches,
            micro_batch_size=numerics.micro_batch_size,
            cuts=numerics.cuts,
            codecs=numerics.codecs,
            seed=seed,
            dtype=numerics.dtype,
            recompute=numerics.recompute,
            device=numerics.device_class,
        )
        later = {e.first_step: e.numerics for e in log}
        for step in range(steps):
            if step in later and later[step] != pipeline.numerics:
                pipeline.change(later[step].cuts, later[step].codecs)
            pipeline.train_step(source.next_batch(samples))
        return pipeline.weights_blake2b()


@contextlib.contextmanager
def _as_in_an_executor(threads: int) -> Iterator[None]:
    """Threads and kernels change bits, so they are an executor's."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])

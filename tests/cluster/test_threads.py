"""`--threads` measured from outside: among how many threads of a volunteer's executor the work of real steps goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusion_p2p
from peer.api import Run
from tests.cluster import plain
from tests.cluster.outside import busy_threads, thread_seconds
from tests.cluster.volunteer_process import Peer

pytestmark = pytest.mark.timeout(900)
STEPS, SAMPLES = 3, 32


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_compute_as_were_given(here: Path, threads: int) -> None:
    process = Peer(here / "peer", threads=threads)
    try:
        joined = process.event("joined")
        process.event("devices")
        executor = process.executor()
        with Run(
            plain.gpt2(layers=2, width=512), data=plain.token_batches(STEPS, SAMPLES), swarm=list(joined["addresses"]),
            run_dir=here / "run", stages=1, compute=False, micro_batches=1, micro_batch_size=SAMPLES, threads=threads,
            optimizer=fusion_p2p.SGD(lr=0.1), save_every=0,
        ) as run:  # fmt: skip
            before = thread_seconds(executor)
            assert len(list(run.steps(STEPS))) == STEPS
            after = thread_seconds(executor)
        took = sorted((round(s - before.get(t, 0.0), 2) for t, s in after.items()), reverse=True)
        print(f"--threads {threads}: CPU seconds of the executor's threads: {took[:4]}")
        assert busy_threads(before, after) == threads
    finally:
        process.close()

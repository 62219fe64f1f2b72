"""A volunteer that computes in JAX hosts a stage of GPT-2 between two that compute in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fusion_p2p
from peer.api import Run
from tests.cluster import plain
from tests.cluster.volunteer_process import Peer

pytest.importorskip("jax", reason="the JAX executor is an extra: pip install 'fusion-p2p[jax]'")

STEPS, MICRO_BATCHES, SIZE = 6, 2, 2


@pytest.mark.timeout(1800)
def test_two_torch_peers_and_a_jax_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "home"))
    torch.set_num_threads(1)
    batches = plain.token_batches(1, MICRO_BATCHES * SIZE) * STEPS
    peers = [Peer(tmp_path / "first")]
    try:
        [address, *_] = peers[0].event("joined")["addresses"]
        peers.append(Peer(tmp_path / "second", address))
        peers.append(Peer(tmp_path / "jax", "--framework", "jax", address, memory="2GiB"))
        in_jax = peers[2].event("joined")["peer"]
        peers[1].event("joined")
        for peer in peers:
            peer.event("devices")
        sgd = fusion_p2p.SGD(lr=0.3, momentum=0.9, clip_norm=1.0)
        options = {
            "micro_batches": MICRO_BATCHES,
            "micro_batch_size": SIZE,
            "save_every": 0,
            "stages": 3,
            "compute": False,
            "compression": "none",
        }
        with Run(plain.gpt2(dropout=0.0), data=batches, swarm=address, optimizer=sgd, **options) as run:
            losses = [s.loss for s in run.steps(STEPS)]
            hosts = [p["peer"] for p in run.report()["plan"]["placement"]]
            state = run.state_dict()
        assert len(hosts) == 3 and in_jax in hosts
        reference = plain.gpt2(dropout=0.0)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=0.9)
        expected = plain.train(reference, batches, optimizer, micro_batch_size=SIZE, clip_norm=1.0)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < losses[0] - 0.05, "it learns"
        assert 1e-9 < plain.difference(state, reference.state_dict()) < 1e-5
        assert [peer.end() for peer in peers] == [0, 0, 0]
    finally:
        for peer in peers:
            peer.close()

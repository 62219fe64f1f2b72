"""What a real trainer and real volunteers publish is what the monitor shows: stage times, links, counted work."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
import uvloop

from dht.monitor_observer import Observer, reading_board
from dht.monitor_views import Picture
from dht.receipts import Counted
from dht.web.history import History
from peer.api import LocalSwarm, Run
from tests.cluster import plain

LONG_S = 600.0


async def watch(address: str, seen: list[Picture], counted: list[Counted], done: threading.Event) -> None:
    """Until the run's stage times, link rates and receipts have all been read."""
    try:
        async with asyncio.timeout(LONG_S), reading_board((address,)) as board:
            observer = Observer(board, 1.0)
            with contextlib.closing(History(None)) as history:
                async for sight in observer.pictures():
                    history.keep(sight)
                    counted += sight.credits
                    for run in sight.picture.runs:
                        timed = run.stages and all(s.compute_s is not None for s in run.stages)
                        if timed and any(k.bytes_per_s for k in run.links if k.src >= 0) and counted:
                            seen.append(sight.picture)
                            assert [c.peer for c in history.leaderboard()]
                            return
    finally:
        done.set()


@pytest.mark.timeout(1800)
def test_a_real_run_is_seen_with_its_bottleneck_and_counted_work(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path_factory.mktemp("home")))
    seen: list[Picture] = []
    counted: list[Counted] = []
    done = threading.Event()
    with LocalSwarm(peers=2, dead_s=60.0) as swarm:
        watching = threading.Thread(target=lambda: uvloop.run(watch(swarm.addresses[0], seen, counted, done)))
        batches = plain.token_batches(20, 8)
        with Run(plain.gpt2(), data=batches, swarm=swarm, stages=2, micro_batches=4, micro_batch_size=2) as run:
            watching.start()
            while not done.is_set():
                run.train(10)
        watching.join(LONG_S)
    assert seen, f"stage times, link rates and receipts were not all seen within {LONG_S:g} s"
    (shown,) = seen[-1].runs
    assert len(shown.stages) == 2 and shown.step > 0 and shown.loss is not None
    assert {(k.src, k.dst) for k in shown.links} >= {(0, 1), (1, 0)}
    assert shown.why is not None and shown.why.kind != "unknown"
    hosts = {s.peer: s.stage for s in shown.stages}
    for c in counted:
        assert hosts[c.peer] == c.stage and c.issuer != c.peer and c.issuer in hosts
        assert c.frames > 0 and c.bytes_accepted > 0 and c.flops > 0

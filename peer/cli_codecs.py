"""`fusion-run codecs CONFIG`: the bytes/loss ladder of a user's model, measured here in a short probe."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from fusion_p2p.adatopk import allowed_loss, ladder_of, pareto
from fusion_p2p.capture import capture
from fusion_p2p.planner.ladder import Ladder
from fusion_p2p.probe import Measured, probe
from peer.config import load
from peer.data import slice_rows
from peer.data_open import open_data
from peer.models import build_model, context_of


def measure(config_path: Path, steps: int = 8) -> tuple[Measured, ...]:
    """Every codec of the default ladder on the model and data of a configuration, at two cuts, on one thread."""
    config = load(config_path)
    batch = config.batch
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(config, Path(folder), context_of(config))
        model = build_model(config, data)
        samples = batch.micro_batches * batch.micro_batch_size
        batches = [data.train.next_batch(samples) for _ in range(steps)]
        first = slice_rows(batches[0], 0, batch.micro_batch_size)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return probe(
                capture(model, first, seed=config.run.seed),
                batches,
                optimizer=config.optimizer_spec(),
                micro_batches=batch.micro_batches,
                micro_batch_size=batch.micro_batch_size,
                clock=time.perf_counter,
                seed=config.run.seed,
            )
        finally:
            torch.set_num_threads(threads)


def _ladder(measured: tuple[Measured, ...], compression: str) -> tuple[str, Ladder]:
    """The rule of `compression`, AdaTopK's own where that names another, and what it may choose from."""
    rule = compression if allowed_loss(compression) is not None else "adatopk"
    return rule, ladder_of(rule, pareto([m.rung for m in measured]))


def rows(measured: tuple[Measured, ...], compression: str = "adatopk") -> list[dict[str, Any]]:
    """For scripts: `Measured`'s fields, whether AdaTopK chooses from it, and below which rate it pays (None: any)."""
    rungs = {r.codec for r in _ladder(measured, compression)[1].rungs}
    return [
        msgspec.to_builtins(m)
        | {
            "ratio": m.ratio,
            "on_ladder": m.codec in rungs,
            "pays_below_bytes_per_s": m.break_even_bytes_per_s if math.isfinite(m.break_even_bytes_per_s) else None,
        }
        for m in measured
    ]


def table(measured: tuple[Measured, ...], compression: str = "adatopk") -> list[str]:
    """Lines for people: one codec each; a star marks the rungs that AdaTopK chooses from under `compression`, a plus
    those that cost more of the loss than that allows."""
    rule, chosen = _ladder(measured, compression)
    marks = {r.codec: "*" for r in chosen.rungs} | {r.codec: "+" for r in chosen.dearer}
    head = ("true bytes", "ratio", "enc+dec", "error", "loss", "pays below")
    lines = ["  {:18} {:>12} {:>7} {:>10} {:>8} {:>8} {:>12}".format("codec", *head)]
    for m in measured:
        mark = marks.get(m.codec, " ")
        sent = m.forward_bytes + m.backward_bytes
        time_ns = 1e9 * (m.encode_s_per_element + m.decode_s_per_element)
        even_mbps = m.break_even_bytes_per_s * 8 / 1e6
        lines.append(
            f"{mark} {m.codec:18} {sent:>12,.0f} {m.ratio:>6.1f}x {time_ns:>7.2f} ns {m.error:>8.2g} "
            f"{100 * m.loss_cost:>+7.2f}% {even_mbps:>7,.0f} Mbps"
        )
    lines.append("true bytes: a micro-batch, both directions; enc+dec: a dense element, one thread")
    lines.append(f"*: {rule} chooses from these, for slow links only, and takes the least loss that is fast enough")
    if chosen.dearer:
        cost = 100 * chosen.dearer[0].loss_cost
        lines.append(
            f"+: cost more than {100 * (allowed_loss(rule) or 0):g}% of the loss, so a link too slow for the others "
            f'stays slow; compression = "adatopk:{math.ceil(cost)}" allows {chosen.dearer[0].codec}'
        )
    return lines

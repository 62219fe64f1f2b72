"""OP-DAG: interpreter against eager, capture and admission time, bytes per node, what crosses an 8-way split.

Times are CPU seconds of this process on one thread, both sides in turn, so that other processes disturb little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fusion_p2p import seeded
from fusion_p2p.admit import admit
from fusion_p2p.capture import Captured, capture
from fusion_p2p.compute import Compute, MicroBatch
from fusion_p2p.errors import AdmissionError
from fusion_p2p.seeded import RngKey
from fusion_p2p.split import split
from fusion_p2p.workload import atoms
from tests.bench.rows import Row, arguments, at_most, report

Model = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2(layers: int, width: int, vocab: int, length: int, batch: int, heads: int = 8) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=vocab, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, vocab, (batch, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def resnet50(side: int, batch: int) -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    images = torch.randn(batch, 3, side, side)
    model = ResNetForImageClassification(ResNetConfig(num_labels=10))
    return model, {"pixel_values": images, "labels": torch.randint(0, 10, (batch,))}


def bert() -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    ids = torch.randint(0, 100, (2, 16))
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def t5() -> Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2, num_decoder_layers=2, d_model=64, d_kv=16, d_ff=128, num_heads=4, vocab_size=100,
        decoder_start_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.randint(0, 100, (2, 16))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def vit() -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=4, intermediate_size=128, image_size=32,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.arange(2)}


def cpu_s(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def interpreter_over_eager(case: str, model: nn.Module, batch: dict[str, torch.Tensor], repeats: int) -> Row:
    """CPU time of one forward and backward through a whole-model stage, over the module's own; the least of each."""
    model.train()
    captured = capture(model, batch)
    (program,) = split(captured.opdag, ())
    compute = Compute(captured.opdag, program, dtype="float32", device=torch.device("cpu"), recompute=False)
    held = captured.state
    compute.weights = {p.value: held[p.name].clone() for p in captured.opdag.params}
    compute.buffers = {b.value: held[b.name].clone() for b in captured.opdag.buffers if b.name in program.buffers}
    size = len(next(iter(batch.values())))
    micro_batch = MicroBatch(size, True, RngKey(), captured.feed(batch))

    def ours() -> None:
        compute.begin_tick({})
        compute.forward(0, micro_batch, {})
        compute.backward(0, {}, 1.0)
        compute.end_tick()

    def eager() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    for _ in range(2):
        ours(), eager()
    times = [(cpu_s(ours), cpu_s(eager)) for _ in range(repeats)]
    best = [min(side) for side in zip(*times, strict=True)]
    return at_most(f"interpreter over eager, {case}", best[0] / best[1], 1.05)


def structure(case: str, captured: Captured) -> Iterator[Row]:
    """Bytes per node, and edges of an 8-way split that carry no floats."""
    dag = captured.opdag
    yield at_most(f"OP-DAG bytes a node, {case}", captured.report.opdag_bytes / captured.report.nodes, 200, " B")
    count = len(atoms(dag))
    cuts = tuple(count * k // 8 for k in range(1, 8))
    edges = [e for p in split(dag, cuts) for e in p.edges_out]
    odd = [e for e in edges if not dag.values[e.value].dtype.startswith(("float", "bfloat"))]
    yield at_most(f"integer or constant edges of {len(edges)} in an 8-way split, {case}", len(odd), 0)


def capture_time(quick: bool) -> Iterator[Row]:
    """Capture with its self-check on two threads; GPT-2 small. Wall time, or CPU time where others held it up."""
    model, batch = gpt2(2, 128, 1000, 64, 2) if quick else gpt2(12, 768, 50257, 64, 2, heads=12)
    torch.set_num_threads(2)
    wall, cpu = time.perf_counter(), time.process_time()
    captured = capture(model, batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    torch.set_num_threads(1)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    both = f"wall {wall:.1f} s, CPU {cpu:.1f} s"
    yield at_most(f"capture with self-check, GPT-2 {size:.0f}M ({both})", min(wall, cpu), 60, " s")
    raw = captured.opdag.to_bytes()
    yield from admission_time(raw)


def mask_cost() -> Row:
    """A dropout's seeded mask over the one PyTorch draws, for 3 million elements; the least of each."""
    shape = (4, 1024, 768)
    like = torch.empty(shape)
    ours = min(cpu_s(lambda: seeded.bernoulli(RngKey(1, 2, 3), 4, shape, 0.9)) for _ in range(9))
    theirs = min(cpu_s(lambda: like.bernoulli_(0.9)) for _ in range(9))
    return at_most("seeded dropout mask over PyTorch's", ours / theirs, 0.2)


def admission_time(raw: bytes) -> Iterator[Row]:
    start = time.perf_counter()
    try:
        admit(raw)
    except AdmissionError as error:
        yield Row(f"admission of {len(raw)} bytes", str(error), "admitted", False)
        return
    yield at_most(f"admission of {len(raw)} bytes", time.perf_counter() - start, 1, " s")


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case, made in (("GPT-2", gpt2(4, 64, 100, 16, 2)), ("BERT", bert()), ("T5", t5()), ("ViT", vit())):
        yield from structure(case, capture(*made))
    yield from capture_time(quick)
    yield mask_cost()
    repeats = 4 if quick else 12
    small = gpt2(2, 128, 1000, 64, 4) if quick else gpt2(6, 512, 1024, 128, 4)
    yield interpreter_over_eager("GPT-2 2x128" if quick else "GPT-2 6x512", *small, repeats)
    yield interpreter_over_eager("ResNet-50", *resnet50(64 if quick else 112, 2 if quick else 4), repeats)


def main(args: list[str]) -> int:
    options = arguments(__doc__ or "", "small models and few repetitions").parse_args(args)
    return report(rows(options.quick), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

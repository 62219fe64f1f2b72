"""Fine-tune a LoRA adapter on a swarm, and keep only the adapter.

python examples/finetune_lora.py                      two volunteers on this machine
python examples/finetune_lora.py --base FOLDER        a model that `save_pretrained` wrote, byte tokens
python examples/finetune_lora.py --swarm /ip4/…       volunteers elsewhere

Frozen weights take no gradient, no optimizer memory and no traffic; volunteers that host only frozen layers skip the
backward pass, so with an adapter on the upper layers nothing but a few bytes a step travels back to them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fusion_p2p

CONTEXT = 64
TEXT = "She sells sea shells by the sea shore; the shells she sells are sea shells, I am sure. " * 50


def batches(text: str, batch_size: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Random windows of bytes, for ever."""
    data = torch.tensor(list(text.encode()))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (batch_size,), generator=generator)
        ids = torch.stack([data[s : s + CONTEXT] for s in starts])
        yield {"input_ids": ids, "labels": ids}


def base_model(folder: str | None) -> nn.Module:
    """The model to adapt. Without a folder: a small Llama of random weights, so that the example needs no download."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            use_cache=False,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="FOLDER", help="model to adapt (default: a small random Llama)")
    parser.add_argument("--swarm", help="address of a peer of the swarm")
    parser.add_argument("--peers", type=int, default=2, help="volunteers to start here without --swarm (default 2)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter (default 8)")
    parser.add_argument("--out", default="lora-shells", help="folder of the adapter")
    args = parser.parse_args()

    torch.manual_seed(0)
    base = base_model(args.base)
    layers = base.config.num_hidden_layers
    adapter = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(range(layers // 2 + 1, layers)),  # the lower layers stay as they are
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, adapter)
    model.print_trainable_parameters()
    with fusion_p2p.Run(
        model,
        data=batches(TEXT, batch_size=16),
        name="lora-shells",
        optimizer=fusion_p2p.AdamW(lr=1e-2, schedule=fusion_p2p.Cosine(warmup=5)),
        micro_batches=4,
        micro_batch_size=4,
        clip_norm=1.0,
        swarm=args.swarm or fusion_p2p.LocalSwarm(peers=args.peers),
    ) as run:
        print(run.plan().explain())
        for step in run.steps(args.steps):
            if step.step % 20 == 0 or step.step + 1 == args.steps:
                print(f"step {step.step}: loss {step.loss:.4f}, {step.step_time_s:.2f} s")
        sent = run.report()["bytes_sent"]
        run.export(args.out, adapter=True)
    for link, count in sorted(sent.items()):
        print(f"bytes from stage {link}: {count:,}")
    print(f"the adapter is in {args.out}; PeftModel.from_pretrained(base, {args.out!r}) loads it")


if __name__ == "__main__":
    main()

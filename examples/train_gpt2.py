"""Train a GPT-2 on a swarm from Python: any nn.Module, any iterable of batches.

python examples/train_gpt2.py                      four volunteers on this machine
python examples/train_gpt2.py --swarm /ip4/…       volunteers elsewhere
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fusion_p2p

CONTEXT = 64
TEXT = "How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 50


def batches(text: str, batch_size: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Random windows of bytes, for ever. What goes to `model(**batch)`; transformers shifts the labels itself."""
    data = torch.tensor(list(text.encode()))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (batch_size,), generator=generator)
        ids = torch.stack([data[s : s + CONTEXT] for s in starts])
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swarm", help="address of a peer of the swarm")
    parser.add_argument("--peers", type=int, default=4, help="volunteers to start here without --swarm (default 4)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--out", default="gpt2-woodchuck", help="folder of the exported model")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    with fusion_p2p.Run(
        model,
        data=batches(TEXT, batch_size=16),
        name="gpt2-woodchuck",
        optimizer=fusion_p2p.AdamW(lr=3e-3, schedule=fusion_p2p.Cosine(warmup=20)),
        micro_batches=4,
        micro_batch_size=4,
        clip_norm=1.0,
        swarm=args.swarm or fusion_p2p.LocalSwarm(peers=args.peers),
    ) as run:
        print(run.plan().explain())
        for step in run.steps(args.steps):
            if step.step % 20 == 0 or step.step + 1 == args.steps:
                print(f"step {step.step}: loss {step.loss:.4f}, {step.step_time_s:.2f} s")
        run.export(args.out)
        model.load_state_dict(run.state_dict(), strict=True)
    print(f"the model is in {args.out}; transformers' from_pretrained loads it")


if __name__ == "__main__":
    main()

"""A LoRA model: what is frozen costs nothing on the way, and the adapter alone is what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusion_p2p.capture import capture
from fusion_p2p.errors import InputError
from fusion_p2p.frame import Frame, Kind
from fusion_p2p.optim import AdamW
from fusion_p2p.pipeline import LocalPipeline
from fusion_p2p.snapshot import OPTIM, PARAM
from fusion_p2p.workload import atoms
from peer import checkpoint, cli_run
from peer.export import export, load_weights

VOCAB = 24


def base() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=8, use_cache=False, **settings)
    return LlamaForCausalLM(config)


def adapted() -> nn.Module:
    """LoRA on the last of three layers."""
    import peft

    model = base()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=[2], lora_dropout=0.1)
    )


def data() -> tuple[list[dict[str, torch.Tensor]], None]:
    return [batch(0)], None


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Trained:
    """Three steps over four stages; every frame between stages."""

    def __init__(self) -> None:
        self.model = adapted()
        self.before = {n: t.clone() for n, t in self.model.state_dict().items()}
        captured = capture(self.model, batch(0))
        count = len(atoms(captured.opdag))
        self.frames: list[Frame] = []
        self.pipeline = LocalPipeline(
            captured,
            optimizer=AdamW(lr=1e-2, weight_decay=0.1),
            micro_batches=2,
            micro_batch_size=2,
            cuts=[count * k // 4 for k in (1, 2, 3)],
            on_frame=self.frames.append,
        )
        for step in range(3):
            self.pipeline.train_step(batch(step))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


def test_frozen_weights_take_no_gradient_no_optimizer_memory_no_traffic(trained: Trained) -> None:
    frozen_stages = [p.stage for p in trained.pipeline.programs if not p.backward]
    assert frozen_stages == [0, 1], "the adapter is in the upper half"
    gradients = [f for f in trained.frames if f.kind is Kind.GRAD]
    assert gradients and not [f for f in gradients if f.dst in frozen_stages]
    assert not [f for f in trained.frames if f.kind in (Kind.WEIGHT, Kind.WGRAD)]
    for stage in trained.pipeline.stages:
        held = stage.snapshot()
        moments = {k.split("/", 2)[2] for k in held if k.startswith(OPTIM)}
        assert moments == {k.removeprefix(PARAM) for k in held if k.startswith(PARAM) and "lora_" in k}
    states = [stage.snapshot() for stage in trained.pipeline.stages]
    nbytes = {k: t.nbytes for held in states for k, t in held.items()}
    adapter = sum(size for k, size in nbytes.items() if k.startswith(PARAM) and "lora_" in k)
    moments = sum(size for k, size in nbytes.items() if k.startswith(OPTIM) and "exp_avg" in k)
    assert moments == 2 * adapter < 0.1 * sum(size for k, size in nbytes.items() if k.startswith(PARAM))
    after = trained.pipeline.state_dict()
    changed = {n for n, t in after.items() if not torch.equal(t, trained.before[n])}
    assert changed == {n for n in after if "lora_" in n}


def test_the_adapter_alone_and_merged(trained: Trained, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    load_weights(trained.model, trained.pipeline.state_dict(), "the pipeline")
    trained.model.eval()
    want = trained.model(**batch(9)).logits
    assert (want - base().eval()(**batch(9)).logits).abs().max() > 1e-4
    assert "adapter_model.safetensors" in export(trained.model, tmp_path / "adapter", adapter=True)
    assert sum(p.stat().st_size for p in (tmp_path / "adapter").glob("*.safetensors")) < 4000
    again = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter")).eval()
    assert torch.equal(again(**batch(9)).logits, want)
    export(trained.model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(**batch(9)).logits, want, rtol=1e-4, atol=1e-6)
    assert torch.equal(trained.model(**batch(9)).logits, want), "exporting changed the model"


def test_export_adapter_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "cats"
    run.mkdir(parents=True)
    here = f"{__name__}:"
    (run / "config.toml").write_text(
        f'[model]\nfunction = "{here}adapted"\n[data]\nkind = "function"\npath = "{here}data"\n'
    )
    weights = adapted().state_dict()
    checkpoint.save(run / "checkpoints", weights, run="r", name="cats", step=2, loss=5.0, keep=2)

    def call(*arguments: str) -> Any:
        return cli_run.execute(arguments), capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    code, said = call("export", "cats", "out", "--adapter")
    assert code == 0 and "adapter_config.json" in said.out
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_model_without_an_adapter_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="LlamaForCausalLM has no adapter"):
        export(base(), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()

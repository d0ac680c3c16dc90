"""Adapters of peft in a pipeline that moves: no bit differs; checkpoints and folders of peft carry them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")

from dynpipe_ds import DynamicPipelineModule  # noqa: E402
from tests.distributed.configs import TORCH_ADAMW  # noqa: E402
from tests.distributed.models import Block, Embed, Head, Run, base_config, loss_fn  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.distributed.test_shapes import Case, Outcome, train  # noqa: E402
from tests.hf import tiny  # noqa: E402
from tests.hf.on_ranks import (  # noqa: E402
    BF16_ZERO1,
    Job,
    Runs,
    check_same_bits,
    check_written,
    logits_by,
    train_all,
)

ZERO1 = {**TORCH_ADAMW, "zero_optimization": {"stage": 1}}
ALL = {"target_modules": "all-linear", "init_lora_weights": "gaussian", "lora_dropout": 0.1}


def job(root: Path, name: str, stages: int, settings: dict[str, Any], **changes: Any) -> Job:
    folder = tiny.write(name, root / name, **changes)
    last = {"gpt2": 8, "llama": 6, "qwen3": 6, "gemma2": 7, "mixtral": 6}[name] + ("tie_word_embeddings" in changes)
    between = () if stages == 2 else (3,)
    moves = {1: (0, 2, *between, last), 3: (0, *between, last - 1, last)}
    # Experts are one stack each in transformers, which peft gives target_parameters; attention has adapters.
    adapter = {"target_modules": ["q_proj", "v_proj"]} if name == "mixtral" else ALL
    return Job(folder, stages, moves, settings, padded=name != "gpt2", save_to=root / "saved" / name, adapter=adapter,
               checkpoint_interval=1 if name == "gemma2" else 0)  # fmt: skip


def check(one: Job, runs: Runs) -> None:
    """Losses, weights and optimizer state are equal in all runs; peft computes the logits from what was saved."""
    check_same_bits(one, runs)
    check_written(one, runs)
    kept = [layer for rank in runs for layer in rank["static"].gradients]
    size = 2 if "bf16" in one.settings else 4
    assert any(trained for trained, _, _ in kept), "no adapters are among them"
    for trained, elements, gradient_bytes in kept:  # a profile knows that frozen weights have no gradients
        assert gradient_bytes == trained * size and trained < elements
    logits, further = (runs[-1][way].logits for way in ("moved", "further"))
    assert logits is not None and further is not None and torch.equal(logits, further)
    assert one.save_to is not None and not (one.save_to / "model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(base_of(one), one.save_to, autocast_adapter_dtype=False)
    assert torch.equal(logits_by(model, one), logits)
    assert not torch.equal(logits_by(base_of(one), one), logits), "the adapters have learned nothing"


def base_of(one: Job) -> Any:
    import transformers

    dtype = torch.bfloat16 if "bf16" in one.settings else torch.float32
    return transformers.AutoModelForCausalLM.from_pretrained(one.folder, dtype=dtype)


def test_adapters_move_with_equal_bits(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "llama", 2, TORCH_ADAMW, tie_word_embeddings=True),
        job(tmp_path, "gpt2", 2, BF16_ZERO1),
        job(tmp_path, "gemma2", 2, ZERO1),
    ]
    results = run_ranks(train_all, 2, jobs, timeout_s=300)
    for index, one in enumerate(jobs):
        check(one, [rank[0][index] for rank in results])


# -- live modules that peft has wrapped -------------------------------------------------------


def on_blocks() -> Any:
    return peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights="gaussian", lora_dropout=0.1)


class Wrapping(nn.Module):
    """Builds a model of peft inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = peft.get_peft_model(Block(32), on_blocks())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def wrapped_layers() -> list[Any]:
    """A live ``PeftModel``, one inside a layer, and a live module that has got adapters."""
    return [
        LayerSpec(Embed), peft.get_peft_model(Block(16), on_blocks()), LayerSpec(Wrapping),
        peft.inject_adapter_in_model(on_blocks(), Block(24)), LayerSpec(Block, 40), LayerSpec(Head),
    ]  # fmt: skip


WRAPPED = Case(wrapped_layers, 2, (0, 3, 6), {1: (0, 1, 6), 2: (0, 5, 6), 4: (0, 2, 6)}, num_batches=5)


def train_wrapped(_rank: int) -> tuple[Outcome, Outcome, str, int]:
    outcomes = train(WRAPPED, {}), train(WRAPPED, WRAPPED.moves)
    module = DynamicPipelineModule(wrapped_layers(), num_stages=2, loss_fn=loss_fn)
    refused = ""
    try:
        deepspeed.initialize(
            model=peft.get_peft_model(module, on_blocks()), config=base_config(Run(num_stages=2), 1)
        )
    except ValueError as error:
        refused = str(error)
    return *outcomes, refused, sum("lora_" in name for name, _ in module.named_parameters())


def test_live_layers_that_peft_has_wrapped_move() -> None:
    """Such a layer is one like any other; the pipeline as a whole can't be wrapped."""
    by_rank = run_ranks(train_wrapped, 2)
    whole = [{k: v for rank in by_rank for k, v in rank[way].digest.items()} for way in (0, 1)]
    static, moved = by_rank[0][:2]
    assert static.losses == moved.losses and len(set(static.losses)) == WRAPPED.num_batches
    assert whole[0] == whole[1] and len(whole[0]) == 6
    assert by_rank[0][0].digest.keys() != by_rank[0][1].digest.keys(), "nothing has moved"
    for *_, refused, adapters in by_rank:
        assert adapters > 0
        assert refused.startswith("PeftModel around DynamicPipelineModule is no pipeline for DeepSpeed")
        assert "wrap layers one by one before it gets them" in refused


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "stages", "ranks", "settings", "changes"), [
    ("llama", 3, 3, TORCH_ADAMW, {}),
    ("llama", 3, 3, ZERO1, {"tie_word_embeddings": True}),
    ("gpt2", 3, 3, BF16_ZERO1, {}),
    ("mixtral", 2, 4, BF16_ZERO1, {}),
    ("qwen3", 2, 4, ZERO1, {}),
])  # fmt: skip
def test_more_adapters(
    tmp_path: Path, name: str, stages: int, ranks: int, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    one = job(tmp_path, name, stages, settings, **changes)
    check(one, [rank[0][0] for rank in run_ranks(train_all, ranks, [one], timeout_s=300)])

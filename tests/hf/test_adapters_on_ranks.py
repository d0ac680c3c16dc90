"""Adapters of peft in a pipeline that moves: no bit differs; checkpoints and folders of peft carry them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")

from tests.distributed.configs import TORCH_ADAMW  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
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

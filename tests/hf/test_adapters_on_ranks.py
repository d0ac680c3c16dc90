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
from tests.hf.adapters_on_ranks import Adapted, train_adapters  # noqa: E402
from tests.hf.on_ranks import BF16_ZERO1, Job  # noqa: E402

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


def check(one: Job, ranks: list[dict[str, Adapted]]) -> None:
    """Losses, weights and optimizer state are equal in all runs; peft computes the logits from what was saved."""
    runs = {way: [rank[way] for rank in ranks] for way in ranks[0]}
    static = runs["static"][0].losses
    assert len(set(static)) == one.num_batches
    for way, first in (("static", 0), ("moved", 0), ("resumed", 3)):
        assert all(rank.losses == static[first:] for rank in runs[way]), way
    layers = {way: {item for rank in ran for item in rank.layers.items()} for way, ran in runs.items()}
    assert layers["static"] == layers["moved"] == layers["resumed"]
    assert len(layers["static"]) == len(one.layers()), "replicas have different weights"
    held = [[rank.layers.keys() for rank in runs[way]] for way in ("static", "moved")]
    assert held[0] != held[1], "adapters have moved"
    kept = [layer for rank in runs["static"] for layer in rank.kept_bytes]
    size = 2 if "bf16" in one.settings else 4
    assert any(trained for trained, _, _ in kept), "adapters are among them"
    for trained, elements, gradient_bytes in kept:  # a profile knows that frozen weights have no gradients
        assert gradient_bytes == trained * size and trained < elements
    logits = runs["moved"][-1].logits
    assert logits is not None and one.save_to is not None
    assert torch.equal(logits, saved_logits(one))
    further = runs["further"][-1].logits
    assert further is not None and torch.equal(logits, further)
    assert not (one.save_to / "model.safetensors").exists() and (one.save_to / "tokenizer_config.json").is_file()


def saved_logits(one: Job) -> torch.Tensor:
    """What peft computes with the model's own folder and the adapters that were saved."""
    import transformers

    dtype = torch.bfloat16 if "bf16" in one.settings else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(one.folder, dtype=dtype)
    model = peft.PeftModel.from_pretrained(base, one.save_to, autocast_adapter_dtype=False).eval()
    # The engine hands back the output of the last of the three micro-batches.
    inputs, _ = [pair for _, pair in zip(range(3), tiny.batches(9, padded=one.padded), strict=False)][-1]
    named = dict(zip(("input_ids", "attention_mask", "position_ids"), inputs, strict=True)) if one.padded else {
        "input_ids": inputs
    }
    with torch.no_grad():
        logits = model(**named).logits.float()
        with model.disable_adapter():
            assert not torch.equal(model(**named).logits.float(), logits), "the adapters have learned nothing"
    found: torch.Tensor = logits
    return found


def test_adapters_move_with_equal_bits(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "llama", 2, TORCH_ADAMW, tie_word_embeddings=True),
        job(tmp_path, "gpt2", 2, BF16_ZERO1),
        job(tmp_path, "gemma2", 2, ZERO1),
    ]
    results = run_ranks(train_adapters, 2, jobs, timeout_s=300)
    for index, one in enumerate(jobs):
        check(one, [rank[index] for rank in results])


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
    check(one, [rank[0] for rank in run_ranks(train_adapters, ranks, [one], timeout_s=300)])

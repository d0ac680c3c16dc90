"""Several ranks: each reads its own stage, layers move without a trace, the model is saved as one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from dynpipe_ds.hf import causal_lm_layers  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.hf import tiny  # noqa: E402
from tests.hf.on_ranks import ADAMW, BF16_ZERO1, Job, Trained, train_all  # noqa: E402

TO = {"gpt2": 8, "llama": 7, "mixtral": 7, "llama_moe": 7}

Runs = list[tuple[Trained, Trained]]


def moves(name: str, stages: int) -> dict[int, tuple[int, ...]]:
    last = TO[name]
    if stages == 2:
        return {1: (0, 2, last), 3: (0, last - 1, last)}
    return {1: (0, 2, 3, last), 3: (0, 3, last - 1, last)}


def check(job: Job, runs: Runs) -> None:
    """No bit differs between the runs; each rank has read the bytes of its own layers and no other."""
    static, moved = [rank[0] for rank in runs], [rank[1] for rank in runs]
    for rank in (*static, *moved):
        assert rank.losses == static[0].losses and rank.evaluated == static[0].evaluated
        assert rank.bytes_read == rank.own_bytes
    assert len(set(static[0].losses)) == job.num_batches
    assert min(static[0].losses[-2:]) < static[0].losses[0]
    layers = [{item for rank in run for item in rank.layers.items()} for run in (static, moved)]
    assert layers[0] == layers[1]
    assert len(layers[0]) == len(causal_lm_layers(job.folder)), "replicas have different weights"
    replicas = len(runs) // job.stages
    whole = sum(spec.build().num_bytes() for spec in causal_lm_layers(job.folder))
    assert sum(rank.bytes_read for rank in static) == replicas * whole
    assert max(rank.bytes_read for rank in static) < 0.7 * whole
    loads = [[{item for rank in run for item in loads_of(rank, batch)} for batch in range(job.num_batches)]
             for run in (static, moved)]  # fmt: skip
    assert loads[0] == loads[1]


def loads_of(rank: Trained, batch: int) -> set[tuple[int, tuple[int, ...]]]:
    return {(layer, tuple(load)) for layer, load in rank.loads[batch].items()}


def check_saved(job: Job, runs: Runs, dtype: torch.dtype) -> None:
    """Transformers loads what was saved, and computes the logits that the pipeline did."""
    import transformers

    assert job.save_to is not None
    model, info = transformers.AutoModelForCausalLM.from_pretrained(job.save_to, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == dtype
    # The engine hands back the output of the last of the three micro-batches.
    inputs, _ = [pair for _, pair in zip(range(3), tiny.batches(9, padded=job.padded), strict=False)][-1]
    named = dict(zip(("input_ids", "attention_mask", "position_ids"), inputs, strict=True)) if job.padded else {
        "input_ids": inputs
    }
    logits = runs[-1][1].logits
    assert logits is not None
    with torch.no_grad():
        assert torch.equal(model.eval()(**named).logits.float(), logits)
    assert (job.save_to / "tokenizer_config.json").is_file()
    assert not list(job.save_to.parent.glob(".*.partial"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def trained(root: Path) -> tuple[list[Job], list[Runs]]:
    """Mixtral in fp32 with activation checkpointing, and tied GPT-2 with dropout in bf16, on one start of two ranks."""
    jobs = [
        Job(tiny.write("mixtral", root / "mixtral"), 2, moves("mixtral", 2), checkpoint_interval=1,
            save_to=root / "saved" / "mixtral"),
        Job(tiny.write("gpt2", root / "gpt2"), 2, moves("gpt2", 2), BF16_ZERO1, save_to=root / "saved" / "gpt2"),
    ]  # fmt: skip
    results = run_ranks(train_all, 2, jobs)
    return jobs, [[rank[i] for rank in results] for i in range(len(jobs))]


def test_stages_load_and_move_without_a_trace(trained: tuple[list[Job], list[Runs]]) -> None:
    for job, runs in zip(*trained, strict=True):
        check(job, runs)
    for batch in trained[1][0][0][1].loads:
        assert all(sum(load) == 3 * 2 * 2 * tiny.LENGTH for load in batch.values()) and batch


def test_transformers_loads_what_was_saved(trained: tuple[list[Job], list[Runs]]) -> None:
    for job, runs, dtype in zip(*trained, (torch.float32, torch.bfloat16), strict=True):
        check_saved(job, runs, dtype)
    assert trained[0][1].save_to is not None
    index = json.loads((trained[0][1].save_to / "model.safetensors.index.json").read_text())
    names = index["weight_map"]
    assert len(set(names.values())) >= 2 and "lm_head.weight" not in names
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in set(names.values())
        for tensor in safetensors.load_file(trained[0][1].save_to / file).values()
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "stages", "ranks", "settings", "padded"),
    [
        ("llama", 3, 3, ADAMW, True),
        ("mixtral", 3, 3, ADAMW, True),
        ("gpt2", 3, 3, ADAMW, True),
        ("mixtral", 2, 4, BF16_ZERO1, True),
        ("llama_moe", 2, 4, {**ADAMW, "zero_optimization": {"stage": 1}}, False),
        ("llama_moe", 3, 3, ADAMW, True),
    ],
)
def test_more_shapes(
    tmp_path: Path, name: str, stages: int, ranks: int, settings: dict[str, Any], padded: bool
) -> None:
    model = tmp_path / name
    folder = tiny.write_llama_moe(model) if name == "llama_moe" else tiny.write(name, model)
    save_to = None if name == "llama_moe" else tmp_path / "saved"
    job = Job(folder, stages, moves(name, stages), settings, padded, 2, save_to)
    runs = [rank[0] for rank in run_ranks(train_all, ranks, [job])]
    check(job, runs)
    if save_to is not None:
        check_saved(job, runs, torch.bfloat16 if "bf16" in settings else torch.float32)

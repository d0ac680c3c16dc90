"""Several ranks: each reads its own stage, layers move without a trace, the model is saved as one folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from dynpipe_ds.hf import PretrainedFolder, causal_lm_layers  # noqa: E402
from scenarios.pretrained import PretrainedModel  # noqa: E402
from tests.distributed.configs import TORCH_ADAMW  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.hf import tiny  # noqa: E402
from tests.hf.on_ranks import (  # noqa: E402
    BF16_ZERO1,
    Job,
    Runs,
    Trained,
    check_same_bits,
    check_written,
    logits_by,
    train_all,
)
from tests.scenarios import exactness  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
TO = {"gpt2": 8, "llama": 6, "mixtral": 6, "llama_moe": 6, "qwen2": 6, "qwen3": 6, "gemma2": 7, "gemma3_text": 7}

def moves(name: str, stages: int) -> dict[int, tuple[int, ...]]:
    last = TO[name]
    if stages == 2:
        return {1: (0, 2, last), 3: (0, last - 1, last)}
    return {1: (0, 2, 3, last), 3: (0, 3, last - 1, last)}


def check(job: Job, runs: Runs) -> None:
    """No bit differs between the runs; each rank has read the bytes of its own layers and no other."""
    check_same_bits(job, runs)
    static = [rank["static"] for rank in runs]
    assert all(run.bytes_read == run.own_bytes for rank in runs for run in rank.values())
    replicas = len(runs) // job.stages
    whole = sum(spec.build().num_bytes() for spec in causal_lm_layers(job.folder))
    assert sum(rank.bytes_read for rank in static) == replicas * whole
    assert max(rank.bytes_read for rank in static) < 0.7 * whole
    loads = [[{item for rank in runs for item in loads_of(rank[way], batch)} for batch in range(job.num_batches)]
             for way in ("static", "moved")]  # fmt: skip
    assert loads[0] == loads[1]


def loads_of(rank: Trained, batch: int) -> set[tuple[int, tuple[int, ...]]]:
    return {(layer, tuple(load)) for layer, load in rank.loads[batch].items()}


def check_saved(job: Job, runs: Runs, dtype: torch.dtype) -> None:
    """Transformers loads what was saved, and computes the logits that the pipeline did."""
    import transformers

    check_written(job, runs)
    assert job.save_to is not None
    before, after = (weights_in(folder) for folder in (job.folder, job.save_to))
    kept = [name for name, weight in after.items() if torch.equal(weight, before[name].to(weight.dtype))]
    assert len(kept) < len(after) / 10, "little was trained"  # norms keep 1 in bf16
    if job.folder.name == "llama_moe":
        check_saved_llama_moe(job)
        return
    model, info = transformers.AutoModelForCausalLM.from_pretrained(job.save_to, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == dtype
    logits = runs[-1]["moved"].logits
    assert logits is not None and torch.equal(logits_by(model, job), logits)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = [safetensors.load_file(file) for file in folder.glob("*.safetensors")]
    return {name: weight for held in files for name, weight in held.items()}


def check_saved_llama_moe(job: Job) -> None:
    """Its own code is not at hand: names, shapes and configuration are those of the folder it came from."""
    assert job.save_to is not None
    before, after = PretrainedFolder(job.folder), PretrainedFolder(job.save_to)
    assert set(after.names()) == set(before.names())
    assert after.shapes(after.names()) == before.shapes(before.names())
    assert after.config.to_dict() == before.config.to_dict()
    assert tiny.build(causal_lm_layers(after))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@dataclass(frozen=True)
class Everything:
    """What two ranks trained, started once."""

    jobs: list[Job]
    runs: list[Runs]
    scenario: list[tuple[exactness.Trained, exactness.Trained]]


def write_example(root: Path) -> tuple[str, ...]:
    """The script of docs/huggingface.md and its arguments: a GPT-2 with a tokenizer of bytes, and a text."""
    script, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (root / "train.py").write_text(script, encoding="utf-8")
    tiny.write_with_bytes(root / "bytes")
    (root / "text.txt").write_text("\n".join(f"{n} and {n} is {2 * n}" for n in range(20)))
    return tuple(str(root / part) for part in ("train.py", "bytes", "text.txt", "tuned"))


@pytest.fixture(scope="module")
def trained(root: Path) -> Everything:
    """Halves of Mixtral and Gemma 2 with activation checkpointing, tied GPT-2 with dropout in bf16, Qwen 3 with
    padding, Mixtral as a scenario."""
    jobs = [
        Job(tiny.write("mixtral", root / "mixtral"), 2, {1: (0, 3, 10), 3: (0, 9, 10)}, checkpoint_interval=1,
            save_to=root / "saved" / "mixtral", split_blocks=True),
        Job(tiny.write("gpt2", root / "gpt2"), 2, moves("gpt2", 2), BF16_ZERO1, save_to=root / "saved" / "gpt2"),
        Job(tiny.write("gemma2", root / "gemma2"), 2, {1: (0, 2, 11), 3: (0, 8, 11)}, checkpoint_interval=1,
            save_to=root / "saved" / "gemma2", split_blocks=True),
        Job(tiny.write("qwen3", root / "qwen3"), 2, moves("qwen3", 2), padded=True, save_to=root / "saved" / "qwen3"),
    ]  # fmt: skip
    model: Any = PretrainedModel(path=str(root / "mixtral"), seq_len=16)
    scenario = exactness.Job("moe_continual", {"aux_weight": 0.1}, model=model)
    results = run_ranks(train_all, 2, jobs, scenario, write_example(root), timeout_s=240)
    return Everything(jobs, [[rank[0][i] for rank in results] for i in range(len(jobs))], [rank[1] for rank in results])


def test_stages_load_and_move_without_a_trace(trained: Everything) -> None:
    for job, runs in zip(trained.jobs, trained.runs, strict=True):
        check(job, runs)
    for batch in trained.runs[0][0]["moved"].loads:
        assert all(sum(load) == 3 * 2 * 2 * tiny.LENGTH for load in batch.values()) and batch


def test_continual_training_as_a_scenario(trained: Everything) -> None:
    """The routers' load is reported, their loss is part of the loss, and moving changes nothing."""
    (static, moved), *others = trained.scenario
    for run in (moved, *(run for pair in others for run in pair)):
        assert (run.losses, run.reports) == (static.losses, static.reports)
    layers = [{item for pair in trained.scenario for item in pair[i].layers.items()} for i in (0, 1)]
    assert layers[0] == layers[1] and len(layers[0]) == 6
    rows = 2 * 3 * 2 * 16  # experts a token, micro-batches, samples, tokens
    assert all([sum(row) for row in r["tokens per expert"]] == [0, *[rows] * 4, 0] for r in static.reports)
    assert static.reports[0]["busiest expert"].endswith(" of mean")
    # Uniform guesses cost log(64) nats; a balanced router adds 2 times its weight of 0.1.
    assert abs(static.losses[0] - 4.16 - 0.2) < 0.1


def test_transformers_loads_what_was_saved(trained: Everything) -> None:
    for job, runs in zip(trained.jobs, trained.runs, strict=True):
        check_saved(job, runs, torch.bfloat16 if "bf16" in job.settings else torch.float32)
    save_to = trained.jobs[1].save_to
    assert save_to is not None
    index = json.loads((save_to / "model.safetensors.index.json").read_text())
    names = index["weight_map"]
    assert len(set(names.values())) >= 2 and "lm_head.weight" not in names
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in set(names.values())
        for tensor in safetensors.load_file(save_to / file).values()
    )  # fmt: skip


def test_the_example_of_the_page(trained: Everything, root: Path) -> None:
    """What it saves is a model with its tokenizer that has learned the text."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tuned")
    tokens = tokenizer("7 and 7 is 14", return_tensors="pt")
    losses = []
    for folder in ("bytes", "tuned"):
        model = transformers.AutoModelForCausalLM.from_pretrained(root / folder).eval()
        with torch.no_grad():
            losses.append(float(model(**tokens, labels=tokens["input_ids"]).loss))
    assert model.dtype == torch.bfloat16
    assert losses[1] < losses[0] - 0.1


def test_the_page_lists_the_families() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows[1:]) == sorted(TO)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_freezing_fits_a_folder(tmp_path: Path, name: str) -> None:
    """Also where what routers add up comes with a frozen stream."""
    model: Any = PretrainedModel(path=str(tiny.write(name, tmp_path / name)), seq_len=16)
    settings = {"batches": (2, 5), "frozen": (2, 4)}
    static = exactness.assert_same_bits(exactness.Job("freezing", settings, model=model), 2)
    assert static.reports[-1] != static.reports[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "stages", "ranks", "settings", "padded"),
    [
        ("llama", 3, 3, TORCH_ADAMW, True),
        ("mixtral", 3, 3, TORCH_ADAMW, True),
        ("gpt2", 3, 3, TORCH_ADAMW, True),
        ("qwen2", 3, 3, TORCH_ADAMW, True),
        ("gemma3_text", 3, 3, TORCH_ADAMW, True),
        ("gemma2", 2, 4, BF16_ZERO1, True),
        ("mixtral", 2, 4, BF16_ZERO1, True),
        ("llama_moe", 2, 4, {**TORCH_ADAMW, "zero_optimization": {"stage": 1}}, False),
        ("llama_moe", 3, 3, TORCH_ADAMW, True),
    ],
)
def test_more_shapes(
    tmp_path: Path, name: str, stages: int, ranks: int, settings: dict[str, Any], padded: bool
) -> None:
    model = tmp_path / name
    folder = tiny.write_llama_moe(model) if name == "llama_moe" else tiny.write(name, model)
    job = Job(folder, stages, moves(name, stages), settings, padded, 2, tmp_path / "saved")
    runs = [rank[0][0] for rank in run_ranks(train_all, ranks, [job])]
    check(job, runs)
    check_saved(job, runs, torch.bfloat16 if "bf16" in settings else torch.float32)

"""Experts that a model folder brings, shared out by replicas: the same bits wherever they are computed, whole in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from scenarios.pretrained import PretrainedModel  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.distributed.splitting import Way  # noqa: E402
from tests.hf import tiny  # noqa: E402
from tests.matrix import mostly  # noqa: E402
from tests.scenarios.exactness import Job  # noqa: E402
from tests.scenarios.sharded_jobs import Placement, Seen, _train, build_placed, seen_of  # noqa: E402


def tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a model folder."""
    return {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()
    }


def job_of(folder: Path, **changes: Any) -> Job:
    model: Any = PretrainedModel(path=str(folder), seq_len=16)
    return replace(Job("moe_continual", {"aux_weight": 0.1}, model=model, num_batches=4), **changes)


def write(name: str, root: Path) -> Path:
    return tiny.write_llama_moe(root / name) if name == "llama_moe" else tiny.write(name, root / name)


def train_and_export(
    _rank: int, job: Job, placements: list[Placement], moves: bool, way: Way, folder: str
) -> list[Seen]:
    """Train with each placement, and save the model before and after."""
    from dynpipe_ds.hf import save_pretrained

    found = []
    for placement in placements:
        run = build_placed(job, placement, way)
        save_pretrained(run.engine, Path(folder) / f"{placement}-before", max_shard_bytes=20_000)
        found.append(_train(run, job, moves))
        save_pretrained(run.engine, Path(folder) / f"{placement}-after", source=job.model.path)
    return found

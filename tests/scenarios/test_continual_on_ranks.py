"""Experts that a model folder brings, shared out by replicas: the same bits anywhere, and whole ones in files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from scenarios.moe.placing import Lanes  # noqa: E402
from scenarios.pretrained import PretrainedModel  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.distributed.splitting import Way  # noqa: E402
from tests.hf import tiny  # noqa: E402
from tests.matrix import mostly  # noqa: E402
from tests.scenarios.exactness import Job  # noqa: E402
from tests.scenarios.sharded_jobs import Placement, Seen, build_placed, seen_of, train_run  # noqa: E402

NUM_EXPERTS, TOLERANCE = 4, 1e-6


def write(name: str, root: Path) -> Path:
    """The folder of a tiny model."""
    return tiny.write_llama_moe(root / name) if name == "llama_moe" else tiny.write(name, root / name)


def job_of(folder: Path, *, split_blocks: bool = False, **changes: Any) -> Job:
    model: Any = PretrainedModel(path=str(folder), seq_len=16, split_blocks=split_blocks)
    return replace(Job("moe_continual", {"aux_weight": 0.1}, model=model, num_batches=3), **changes)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a model folder."""
    return {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()
    }


def assert_same_weights(one: Path, other: Path, within: float = 0.0) -> None:
    """Fail unless two model folders hold the same names and values."""
    found, expected = tensors(one), tensors(other)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=within), name


# -- whole trainings ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained under several placements.

    Attributes:
        family: of the model.
        ranks: world size.
        changes: of the job.
        placements: the first one is the reference.
        way: how backwards are ordered.
    """

    family: str
    ranks: int
    changes: dict[str, Any]
    placements: tuple[Placement, ...] = ("static", "local", "random")
    way: Way = None


ONE_STAGE: dict[str, Any] = {"stages": 1}
BF16 = {"optimizer": "bf16_zero1", "batch": {"communication_data_type": "fp32"}}
CASES = {
    "mixtral-DP2": Case("mixtral", 2, ONE_STAGE, ("static", "random", None)),
    "llama_moe-DP2": Case("llama_moe", 2, ONE_STAGE, ("static", "random", None)),
    "mixtral-PP2xDP2": Case("mixtral", 4, {"num_batches": 5}, ("static", "local", "random", "lanes", None)),
    "llama_moe-PP2xDP2": Case("llama_moe", 4, {"num_batches": 5}, ("static", "local", "random", "pro_prophet", None)),
    "mixtral-DP4": Case("mixtral", 4, ONE_STAGE),
    "mixtral-zero1-halves": Case("mixtral", 4, {"optimizer": "zero1_adamw", "split_blocks": True}),
    "llama_moe-bf16": Case("llama_moe", 4, BF16),
    "mixtral-bf16-planned": Case("mixtral", 4, BF16, ("static", "random"), "planned"),
}


def train_and_export(_rank: int, job: Job, placements: tuple[Placement, ...], way: Way, out: Path) -> list[Seen]:
    """Train with each placement, layers moving if there are stages, and save the model before and after."""
    from dynpipe_ds.hf import save_pretrained

    found = []
    for placement in placements:
        run = build_placed(job, placement, way)
        if placement == placements[0]:
            save_pretrained(run.engine, out / "before", max_shard_bytes=20_000)
        found.append(train_run(run, job, moves=True))
        save_pretrained(run.engine, out / str(placement), source=str(out / "source"))
    return found


@pytest.mark.parametrize("name", mostly(CASES, ["llama_moe-DP2"]))
def test_shared_experts_have_the_same_bits_anywhere(name: str, tmp_path: Path) -> None:
    """They begin with the folder's weights, and what is saved is whole, whoever has computed what."""
    case = CASES[name]
    folder = write(case.family, tmp_path)
    results = run_ranks(
        train_and_export, case.ranks, job_of(folder, **case.changes), case.placements, case.way, tmp_path,
        timeout_s=500,
    )  # fmt: skip
    is_bf16 = case.changes.get("optimizer") == "bf16_zero1"
    before = tensors(tmp_path / "before")
    source = {n: t.bfloat16() if is_bf16 else t for n, t in tensors(folder).items()}
    assert set(before) == set(source)
    assert all(torch.equal(before[n], tensor) for n, tensor in source.items())
    reference = results[0][0]
    for placement, found in zip(case.placements, zip(*results, strict=True), strict=True):
        if placement is None:
            compare_replicated(case, reference, found[0], tmp_path)
            continue
        assert all(seen.losses == reference.losses and seen.layers == reference.layers for seen in found), placement
        assert all(seen.reports == found[0].reports for seen in found), "all ranks report the same"
        assert_same_weights(tmp_path / str(placement), tmp_path / "static")
        assert [r["tokens per expert"] for r in found[0].reports] == [
            r["tokens per expert"] for r in reference.reports
        ], placement
    assert any(not torch.equal(t, source[n]) for n, t in tensors(tmp_path / "static").items() if "experts" in n)


def compare_replicated(case: Case, reference: Seen, found: Seen, out: Path) -> None:
    """LLaMA-MoE's own experts multiply the same matrices, Mixtral's add gradients up in another order."""
    assert found.reports[0]["tokens per expert"] == reference.reports[0]["tokens per expert"]
    if case.family == "llama_moe":
        assert found.losses == reference.losses
        assert_same_weights(out / "None", out / "static")
        return
    assert found.losses[0] == reference.losses[0], "forwards have the same bits"
    assert found.losses == pytest.approx(reference.losses, abs=TOLERANCE)
    assert_same_weights(out / "None", out / "static", within=TOLERANCE)


# -- what a run says and keeps --------------------------------------------------------------------


def save_and_go_on(_rank: int, folder: Path, out: Path) -> tuple[Any, Any, int]:
    """A whole run, and one that goes on from its middle in another cut; bytes of experts that this rank holds."""
    job = job_of(folder, num_batches=4)
    whole = build_placed(job, "random")
    list(whole.train_window([0, 1], timed=False))
    whole.save(out, "middle")
    before = dict(whole.scenario._balancing._lanes)
    list(whole.train_window([2, 3], timed=False))
    later = build_placed(job, "random")
    later.engine.repartition((0, 2, 6))
    later.load(out, "middle")
    assert later.scenario._balancing._lanes == before, "placements go on"
    list(later.train_window([2, 3], timed=False))
    held = sum(
        parameter.nbytes for layer in later.engine.local_layers().values()
        for name, parameter in layer.named_parameters() if ".experts." in name
    )  # fmt: skip
    return seen_of(whole), seen_of(later), held


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["mixtral", "llama_moe"])
def test_a_run_that_goes_on_has_the_same_bits(family: str, tmp_path: Path) -> None:
    folder = write(family, tmp_path)
    ranks = run_ranks(save_and_go_on, 4, folder, tmp_path / "out", timeout_s=300)
    for whole, later, _ in ranks:
        assert later == replace(whole, reports=later.reports)
        assert later.reports[-1] == whole.reports[-1]
        assert {"busiest expert", "tokens per expert"} <= set(whole.reports[-1])
    sizes = [tensor.nbytes for name, tensor in tensors(folder).items() if ".experts." in name]
    assert sum(held for *_, held in ranks) == sum(sizes), "every expert is held once"


def fails_once(_rank: int, folder: Path) -> tuple[list[int], list[int]]:
    """Tokens of each layer that were counted in a batch after one that was dropped, and in a run without it."""
    from dynpipe_ds.host.passing import BatchRefused

    counted = []
    for fails in (True, False):
        run = build_placed(job_of(folder), "random")
        run.scenario._balancing._plan = lambda _layer, rows: Lanes.local(len(rows), NUM_EXPERTS)
        if fails:
            loss_fn = run.engine.module.loss_fn
            run.engine.module.loss_fn = _raise
            with pytest.raises(BatchRefused):
                list(run.train_window([0], timed=False))
            run.engine.module.loss_fn = loss_fn
        list(run.train_window([0], timed=False))
        counted.append([sum(row) for row in run.measured.reports[-1]["tokens per expert"]])
    return counted[0], counted[1]


def _raise(*_args: Any) -> Tensor:
    raise ZeroDivisionError("no loss")


@pytest.mark.exhaustive
def test_a_dropped_batch_is_not_counted(tmp_path: Path) -> None:
    for after, without in run_ranks(fails_once, 4, write("mixtral", tmp_path), timeout_s=300):
        assert after == without and any(after)

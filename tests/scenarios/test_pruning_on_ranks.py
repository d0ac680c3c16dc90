"""Pruning on several ranks: one decision for all stages, moves leave no trace, pruned state stays zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.gpt import GPTConfig
from scenarios.pruning import prunable_weights
from scenarios.pruning.gathering import keep_largest_by_gathering
from scenarios.pruning.selection import Scores, keep_largest
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly
from tests.scenarios.exactness import Job, assert_same_bits

SCHEDULE = {"start_batch": 1, "end_batch": 5, "every": 1, "crossover": 0.6}
BLOCKS = {**SCHEDULE, "structure": "block", "block_rows": 4, "crossover": 0.3}
BOTH = {"parts": {"pruning": SCHEDULE, "freezing": {"batches": [2, 4, 6], "frozen": [1, 3, 2]}}}


@pytest.mark.parametrize(
    ("job", "ranks"),
    mostly(
        [
            pytest.param(Job("pruning", SCHEDULE, stages=2), 2, id="PP2"),
            pytest.param(Job("pruning", SCHEDULE, stages=3, optimizer="zero1_adamw"), 3, id="PP3-ZeRO1"),
            pytest.param(Job("pruning", SCHEDULE, stages=4), 4, id="PP4"),
            pytest.param(Job("pruning", SCHEDULE, stages=2, optimizer="bf16_zero1"), 2, id="PP2-bf16"),
            pytest.param(Job("pruning", BLOCKS, stages=2), 4, id="PP2xDP2-blocks"),
            pytest.param(Job("pruning_freezing", BOTH, stages=2, optimizer="zero1_adamw"), 4, id="PP2xDP2-freezing"),
        ],
        ["PP3-ZeRO1", "PP2xDP2-blocks"],
    ),
)
def test_same_bits_whatever_the_partition(job: Job, ranks: int) -> None:
    reports = assert_same_bits(job, ranks).reports
    small = [int(report["small weights"].split()[0]) for report in reports]
    assert 0 < min(count for count in small if count) < max(small) <= 16, "weights change their form one by one"
    assert reports[-1]["sparsity"] == pytest.approx(0.9, abs=0.02)
    assert len(set(reports[3]["sparsity by layer"][1:-1])) > 1, "layers are pruned unevenly"
    work = [sum(report["multiply-adds by layer"]) for report in reports]
    assert work[-1] < 0.5 * work[0]


def look_at_state(_rank: int, optimizer: str) -> dict[str, Any]:
    """Train with pruning, and look at weights, optimizer state and masks against the undivided model."""
    from pathlib import Path

    from scenarios.compare import build_contender
    from scenarios.data import DataSettings
    from scenarios.settings import RunSettings, Settings, load_deepspeed_json, merge
    from tests.scenarios.exactness import MODEL, SMALL_BATCH

    settings = Settings(
        model=MODEL, scenario="pruning", scenario_settings={"start_batch": 2, "end_batch": 4, "every": 1,
        "crossover": 0.75}, data=DataSettings(), partition_method="uniform", seed=5, output_dir=Path(),
        deepspeed=merge(load_deepspeed_json(optimizer), SMALL_BATCH), run=RunSettings(num_stages=2),
    )  # fmt: skip
    tokens = torch.randint(MODEL.vocab_size, (5000,), generator=torch.Generator().manual_seed(0))
    run = build_contender(settings, tokens.to(torch.uint8).numpy(), dynamic=False)
    engine: Any = run.engine
    found: dict[str, Any] = {"forms": set(), "zeros": True, "bytes": []}
    for batch in range(7):
        list(run.train_window([batch], timed=True))
        weights = [weight for layer in engine.local_layers().values() for weight in prunable_weights(layer)]
        states = [engine.stage_optimizer.export([weight.weight])[0] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            assert len(tensors) >= 2 or weight.weight.numel() == 0
            found["forms"].add(weight.weight.dim())
            for tensor in (weight.weight.detach(), *tensors):
                assert tensor.numel() == weight.weight.numel()
                if weight.weight.dim() == 2 and weight.mask.numel():
                    found["zeros"] &= not tensor.view(weight.weight.shape)[~weight.mask].any()
        held = sum(engine.stage_optimizer.state_bytes(weight.weight) for weight in weights)
        found["bytes"].append(held + sum(weight.weight.nbytes for weight in weights))
    return found


@pytest.mark.parametrize(("optimizer", "ranks"), [("fp32_adamw", 2), ("zero1_adamw", 4), ("bf16_zero1", 2)])
def test_optimizer_state_of_pruned_weights_is_zero_or_gone(optimizer: str, ranks: int) -> None:
    for found in run_ranks(look_at_state, ranks, optimizer):
        assert found["forms"] == {1, 2}
        assert found["zeros"]
        assert found["bytes"][-1] < 0.5 * found["bytes"][0]


def some_scores() -> dict[int, list[Tensor]]:
    """Seven layers of different sizes, one without weights, with many ties among them."""
    generator = torch.Generator().manual_seed(7)
    return {
        layer: [] if layer == 3 else [
            (torch.randn(200 + 31 * layer, generator=generator).abs() * 8).round(), torch.rand(50, generator=generator)
        ] for layer in range(7)
    }  # fmt: skip


def select_on_ranks(rank: int, keeps: list[int]) -> list[Any]:
    """Select with layers spread over the ranks, one of which has none, in both ways."""
    bounds = (0, 2, 2, 7)
    own: Scores = {layer: parts for layer, parts in some_scores().items() if bounds[rank] <= layer < bounds[rank + 1]}
    group = dist.group.WORLD
    return [
        (keep_largest(own, keep, 7, group, torch.device("cpu"))[0], keep_largest_by_gathering(own, keep, group))
        for keep in keeps
    ]


def test_selection_over_ranks_equals_selection_in_one_place() -> None:
    keeps = [0, 1, 77, 500, 1500, 2000, 10**6]
    results = run_ranks(select_on_ranks, 3, keeps)
    for i, keep in enumerate(keeps):
        whole, _ = keep_largest(some_scores(), keep, 7, None, torch.device("cpu"))
        total = sum(part.numel() for parts in some_scores().values() for part in parts)
        for way in (0, 1):
            found = {layer: masks for rank in results for layer, masks in rank[i][way].items()}
            assert sum(int(mask.sum()) for masks in found.values() for mask in masks) == min(keep, total)
            for layer, masks in whole.items():
                assert all(torch.equal(a, b) for a, b in zip(masks, found[layer], strict=True))


def test_the_loss_falls_on_text_while_weights_go() -> None:
    model = GPTConfig(depth=2, hidden=32, heads=2, seq_len=32, vocab_size=256)
    settings = {"start_batch": 4, "end_batch": 20, "every": 4, "crossover": 0.6}
    job = Job("pruning", settings, stages=2, model=model, num_batches=28, every=9, text=True)
    trained = assert_same_bits(job, 2)
    assert trained.reports[-1]["sparsity"] == 0.9
    assert sum(trained.losses[-3:]) / 3 < trained.losses[0] - 0.6

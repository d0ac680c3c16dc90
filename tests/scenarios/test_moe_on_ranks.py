"""Experts on several ranks: expert parallelism is plain data parallelism, cuts and moves change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.data import DataSettings
from scenarios.gpt import GPTConfig, loss_fn
from scenarios.moe import ExpertConfig, MixtureOfExperts, MoEMLP, set_expert_group
from scenarios.moe.scenario import moe_mlps
from scenarios.scenario import build_layers
from scenarios.settings import RunSettings, Settings
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly
from tests.scenarios.exactness import MODEL, Job, assert_same_bits

# Tokens on each rank, experts, and what the router does.
CASES: dict[str, tuple[list[int], int, str]] = {
    "even": ([12, 12, 12], 6, "random"),
    "ranks with different numbers of tokens": ([12, 3, 7], 6, "random"),
    "a rank without tokens": ([12, 0, 7], 6, "random"),
    "no tokens at all": ([0, 0, 0], 6, "random"),
    "all tokens to one expert": ([12, 3, 7], 6, "one"),
    "experts not a multiple of ranks": ([12, 3, 7], 5, "random"),
    "a rank without experts": ([12, 3, 7], 2, "random"),
    "one expert": ([12, 3, 7], 1, "random"),
}


def build(num_experts: int, how: str) -> MoEMLP:
    """The same experts on every rank."""
    torch.manual_seed(0)
    config = GPTConfig(depth=2, hidden=16, heads=2, seq_len=12)
    mlp = MoEMLP(config, ExpertConfig(num_experts=num_experts, top_k=min(2, num_experts) if how == "random" else 1))
    torch.nn.init.normal_(mlp.router.weight, std=1.0)
    if how == "one":
        mlp.router.weight.data[:-1] = 0
        mlp.router.weight.data[-1] = 9
    return mlp


def answers(rank: int, case: tuple[list[int], int, str], shared: bool) -> list[Tensor]:
    """Output, input gradient, and gradients averaged over the ranks as DeepSpeed does."""
    num_tokens, num_experts, how = case
    mlp = build(num_experts, how)
    set_expert_group(dist.group.WORLD if shared else None)
    torch.manual_seed(1 + rank)
    x = torch.rand(num_tokens[rank], 16).requires_grad_()
    y = mlp(x)
    y.backward(torch.randn_like(y))
    if shared:
        mine = range(rank * num_experts // 3, (rank + 1) * num_experts // 3)
        assert not any(bool(mlp.up.grad[e].any()) for e in range(num_experts) if e not in mine)
    set_expert_group(None)
    for parameter in mlp.parameters():
        dist.all_reduce(parameter.grad)
    return [y.detach(), x.grad, *(parameter.grad / 3 for parameter in mlp.parameters())]


def compare_with_plain_data_parallelism(rank: int) -> None:
    for name, case in CASES.items():
        for shared, plain in zip(answers(rank, case, True), answers(rank, case, False), strict=True):
            torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_sharing_experts_is_plain_data_parallelism() -> None:
    """Outputs and averaged gradients, whatever the counts; each rank computes only its own; no rank waits."""
    run_ranks(compare_with_plain_data_parallelism, 3)


def settings(stages: int, partition: str | list[int], **scenario: Any) -> Settings:
    """A job with plain SGD, so that weights show gradients."""
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "dynamic_pipeline": {"enabled": True},
    }  # fmt: skip
    return Settings(
        model=MODEL, scenario="moe", scenario_settings={"every": 1, "num_experts": 4, **scenario}, data=DataSettings(),
        deepspeed=config, partition_method=partition, run=RunSettings(num_stages=stages), seed=5,
        output_dir=Path(),
    )  # fmt: skip


TOKENS = np.random.default_rng(0).integers(MODEL.vocab_size, size=5000).astype(np.uint8)


def contender(job: Settings) -> Any:
    from scenarios.compare import build_contender

    return build_contender(job, TOKENS, dynamic=False)


def cut_anywhere(_rank: int, num_batches: int) -> Any:
    """Losses and router weights after some batches on one cut after the other."""
    found = []
    for cut in range(1, 6):
        run = contender(settings(2, [0, cut, 6], aux_weight=0.7))
        list(run.train_window(range(num_batches), timed=True))
        layers = run.engine.local_layers().items()
        routers = {i: m.router.weight.detach() for i, layer in layers for m in moe_mlps(layer)}
        found.append((run.measured.losses, routers))
    return found


def undivided(num_batches: int, aux_weight: float) -> tuple[list[float], dict[int, Tensor]]:
    """The same training without a pipeline: plain torch, one micro-batch after the other."""
    from deepspeed.runtime.utils import set_random_seed

    from scenarios.data import BatchShape, TokenBatches

    scenario = MixtureOfExperts(every=1, num_experts=4, aux_weight=aux_weight)
    layers = []
    for index, spec in enumerate(build_layers(scenario, MODEL)):
        set_random_seed(5 + index)  # as PipelineModule(seed_layers=True, base_seed=5) does
        layers.append(spec.build())
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = TokenBatches(TOKENS, BatchShape(seq_len=16, micro_batch_size=2, num_micro_batches=3), seed=5)
    losses = []
    for batch in range(num_batches):
        total = 0.0
        for x, labels in data.micro_batches(batch):
            for layer in layers:
                x = layer(x)
            loss = loss_fn(x, labels) / 3
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {i: m.router.weight.detach() for i, layer in enumerate(layers) for m in moe_mlps(layer)}


def test_the_auxiliary_loss_crosses_every_cut() -> None:
    """Total loss and router weights are the same bits on every cut, and equal to the undivided model's."""
    ranks = run_ranks(cut_anywhere, 2, 3)
    losses, routers = undivided(3, aux_weight=0.7)
    without, other_routers = undivided(3, aux_weight=0.0)
    assert losses[0] > without[0] + 4 * 0.7, "four layers add at least their weight each"
    for cut in range(5):
        mine = [rank[cut] for rank in ranks]
        assert mine[0][0] == mine[1][0] == ranks[0][0][0]
        assert mine[0][0] == pytest.approx(losses, rel=1e-6)
        found = {**mine[0][1], **mine[1][1]}
        assert sorted(found) == sorted(routers) == [1, 2, 3, 4]
        for index, weight in found.items():
            torch.testing.assert_close(weight, routers[index], atol=1e-6, rtol=1e-5)
            assert not torch.allclose(weight, other_routers[index], atol=1e-6, rtol=1e-5)


def train_sharing_or_not(_rank: int) -> tuple[list[float], list[float], list[Any]]:
    """Losses of training and, last, of evaluation; and the last reports."""
    both = [contender(settings(2, "uniform", expert_parallel=shared)) for shared in (True, False)]
    for run in both:
        list(run.train_window(range(4), timed=True))
        run.measured.losses.append(float(run.engine.eval_batch(run.data.micro_batches(4))))
    return both[0].measured.losses, both[1].measured.losses, [run.measured.reports[-1] for run in both]


def test_training_with_shared_experts_is_data_parallel_training() -> None:
    """Losses agree up to rounding on two stages times two replicas, in evaluation as well."""
    shared, plain, reports = run_ranks(train_sharing_or_not, 4)[0]
    assert shared == pytest.approx(plain, rel=1e-5)
    assert "busiest rank" in reports[0] and "busiest rank" not in reports[1]
    assert reports[0]["tokens per expert"] == reports[1]["tokens per expert"]
    assert [sum(row) for row in reports[0]["tokens per expert"]] == [0, *[2 * 2 * 2 * 3 * 16] * 4, 0]


def unequal(report: dict[str, Any]) -> bool:
    """Whether experts have different loads, and layers too."""
    rows = [tuple(row) for row in report["tokens per expert"] if row]
    return len(set(rows)) > 1 and any(len(set(row)) > 1 for row in rows)


def dropped(report: dict[str, Any]) -> bool:
    return unequal(report) and report["dropped"] != "0%"


def balanced(report: dict[str, Any]) -> bool:
    return all(len(set(row)) == 1 for row in report["tokens per expert"] if row)


def shared(report: dict[str, Any]) -> bool:
    return unequal(report) and report["busiest rank"] != "1.00 of mean"


EVERY = {"every": 1, "num_experts": 4}
JOBS: dict[str, tuple[Job, int, Callable[[dict[str, Any]], bool]]] = {
    "capacity-PP2": (Job("moe", {**EVERY, "capacity_factor": 0.75}), 2, dropped),
    "loss-free-PP3": (Job("moe", {**EVERY, "routing": "loss_free", "bias_rate": 0.05}, stages=3), 3, unequal),
    "s-base-PP4": (Job("moe", {**EVERY, "routing": "s_base", "top_k": 1}, stages=4), 4, balanced),
    "expert-choice-PP2": (Job("moe", {**EVERY, "routing": "expert_choice"}), 2, balanced),
    "shared-PP2xDP2": (Job("moe", {**EVERY, "routing": "loss_free", "bias_rate": 0.05}), 4, shared),
    "shared-zero1-PP2xDP2": (Job("moe", EVERY, optimizer="zero1_adamw"), 4, shared),
    "shared-capacity-zero-PP2xDP2": (
        Job("moe", {**EVERY, "capacity_factor": 0.0}, optimizer="zero1_adamw"), 4, balanced
    ),
    "bf16-zero1-PP2": (Job("moe", {**EVERY, "routing": "loss_free"}, optimizer="bf16_zero1"), 2, unequal),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly(JOBS, ["capacity-PP2", "loss-free-PP3", "s-base-PP4", "shared-zero1-PP2xDP2"]))
def test_same_bits_whatever_the_partition(name: str) -> None:
    """Losses, loads, weights, biases and optimizer state, with experts really at work."""
    job, ranks, active = JOBS[name]
    job = dataclasses.replace(job, num_batches=6)
    trained = assert_same_bits(job, ranks)
    assert sum(map(active, trained.reports)) >= len(trained.reports) - 2
    loads = [report["tokens per expert"] for report in trained.reports]
    assert active in (balanced,) or len({str(load) for load in loads}) == len(loads), "loads change every batch"


def test_the_loss_falls_on_text() -> None:
    """Experts learn, over two stages; cross entropy and the weighted auxiliary loss."""
    model = GPTConfig(depth=4, hidden=32, heads=2, seq_len=32, vocab_size=256)
    trained = assert_same_bits(Job("moe", EVERY, model=model, num_batches=20, every=9, text=True), 2)
    assert trained.losses[-1] < trained.losses[0] - 0.5

"""Experts that replicas share out: any placement has the same bits, with two replicas those of data parallelism."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds import Replica
from dynpipe_ds.owning import building
from scenarios.gpt import GPTConfig
from scenarios.moe import ExpertConfig, MoEMLP
from scenarios.moe.placing import Lanes
from scenarios.moe.sharded import Experts, Sharing, share_experts
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import Way
from tests.matrix import mostly
from tests.scenarios.exactness import Job
from tests.scenarios.sharded_jobs import Placement, Seen, anywhere, build_placed, seen_of, train_placed, train_run

# -- one layer ------------------------------------------------------------------------------------

CASES: dict[str, tuple[list[int], str]] = {
    "uneven": ([12, 3, 7, 1], "random"),
    "a rank without tokens": ([12, 0, 7, 5], "random"),
    "no tokens at all": ([0, 0, 0, 0], "random"),
    "all tokens to one expert": ([12, 3, 0, 7], "one"),
}
NUM_EXPERTS, WIDTH = 12, 20


def build(how: str, replica: Replica | None = None) -> MoEMLP:
    torch.manual_seed(0)
    with building(replica or Replica()):
        config = GPTConfig(depth=2, hidden=WIDTH, heads=2, seq_len=12)
        top_k = 2 if how == "random" else 1
        mlp = MoEMLP(config, ExpertConfig(num_experts=NUM_EXPERTS, top_k=top_k, expert_weights="sharded"))
    torch.nn.init.normal_(mlp.router.weight, std=1.0)
    if how == "one":
        mlp.router.weight.data[:-1] = 0
        mlp.router.weight.data[-1] = 9
    return mlp


def batch(mlp: MoEMLP, rank: int, num_tokens: list[int], num_micro_batches: int) -> list[Tensor]:
    """Outputs and input gradients; all forwards come first, as in a pipeline."""
    waiting, found = [], []
    for micro_batch in range(num_micro_batches):
        torch.manual_seed(100 * micro_batch + rank)
        x = torch.rand(num_tokens[(rank + micro_batch) % len(num_tokens)], WIDTH).requires_grad_()
        y = mlp(x)
        waiting.append((x, y, torch.randn_like(y)))
    for x, y, gradient in waiting:
        y.backward(gradient)
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def means(mlp: MoEMLP) -> dict[str, Tensor]:
    """Gradients of all ranks, added up for each expert from the rank after its home on around the ring, then divided.

    With two ranks, that is what plain data parallelism does.
    """
    found = {}
    for name in ("up", "down"):
        gradient = getattr(mlp, name).grad
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        means = torch.empty_like(gradient)
        for expert in range(NUM_EXPERTS):
            first = expert * len(parts) // NUM_EXPERTS + 1
            ring = [part[expert] for part in parts[first:] + parts[:first]]
            means[expert] = list(accumulate(ring))[-1] / len(parts)
        found[name] = means
    return found


def placements(num_ranks: int, count: int) -> list[Lanes]:
    draw = random.Random(1)
    owners = [
        tuple(tuple(draw.randrange(num_ranks) for _ in range(NUM_EXPERTS)) for _ in range(num_ranks))
        for _ in range(count)
    ]
    return [Lanes.static(num_ranks, NUM_EXPERTS), Lanes.local(num_ranks, NUM_EXPERTS), *map(Lanes, owners)]


def compare_layers(rank: int, num_micro_batches: int) -> None:
    num_ranks = dist.get_world_size()
    sharing = Sharing(
        dist.group.WORLD, dist.new_group(), dist.new_group(), num_experts=NUM_EXPERTS, device=torch.device("cpu")
    )  # fmt: skip
    share_experts(sharing)
    mine = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
    for name, (num_tokens, how) in CASES.items():
        plain, mlp = build(how), build(how, Replica(rank, num_ranks))
        expected = batch(plain, rank, num_tokens, num_micro_batches)
        gradients = means(plain)
        for lanes in placements(num_ranks, 3):
            for known in (None, num_micro_batches):  # with or without knowing when sums are complete
                sharing.begin({3: Experts(mlp, mlp.expert_weights())}, {3: lanes}, known)
                found = batch(mlp, rank, num_tokens, num_micro_batches)
                assert all(map(torch.equal, found, expected)), f"{name}: {lanes}"
                if known is None:
                    (state,) = sharing._states.values()
                    lanes_here = sum(
                        count > 0 and lanes.owner[source][expert] == rank
                        for source, counts in enumerate(state.rows) for expert, count in enumerate(counts)
                    )  # fmt: skip
                    assert sharing.sum_bytes == lanes_here * (mlp.up[0].nbytes + mlp.down[0].nbytes)
                for weight, gradient in mlp.finish_gradients().items():
                    which = "up" if weight is mlp.up else "down"
                    assert torch.equal(gradient, gradients[which][mine]), f"{name}: {which}, {lanes}"
                assert sharing.sum_bytes == 0
                mlp.eval()
                with torch.no_grad():
                    mlp(torch.rand(num_tokens[rank], WIDTH))
                mlp.train()
    share_experts(None)
    sharing.close()


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches"), mostly([(n, m) for n in (2, 3, 4) for m in (1, 3)], [(2, 3), (4, 1)])
)
def test_a_layer_has_the_bits_of_a_replicated_one(num_ranks: int, num_micro_batches: int) -> None:
    """Outputs, gradients of inputs and of weights, whatever the loads and the placement are."""
    run_ranks(compare_layers, num_ranks, num_micro_batches)


# -- whole trainings ------------------------------------------------------------------------------

ALL: list[Placement] = ["static", "local", "random"]
ONE = {"gradient_accumulation_steps": 1}
JOBS: dict[str, tuple[Job, int, list[Placement], Way]] = {
    "adamw-DP2": (Job("moe", stages=1, num_batches=3), 2, [None, "random"], None),
    "zero1-PP2xDP2": (Job("moe", num_batches=4, optimizer="zero1_adamw"), 4, ["static", "random"], "planned"),
    "adamw-PP2xDP2": (Job("moe", num_batches=5), 4, [None, *ALL, "lanes"], None),
    "adamw-DP3": (Job("moe", stages=1, num_batches=3), 3, ALL, None),
    "adamw-DP4-one": (Job("moe", stages=1, num_batches=3, batch=ONE), 4, ALL, None),
    "zero1-all-PP2xDP2": (Job("moe", num_batches=5, optimizer="zero1_adamw"), 4, [None, *ALL], None),
    "bf16-zero1-PP2xDP2": (
        Job("moe", num_batches=5, optimizer="bf16_zero1", batch={"communication_data_type": "fp32"}), 4,
        [None, *ALL], None,
    ),
    "planned-PP2xDP2": (Job("moe", num_batches=5), 4, ["random", "local"], "planned"),
    "late-PP2xDP2": (Job("moe", num_batches=5, optimizer="bf16_zero1"), 4, ["random"], 2),
    "loss-free-PP2xDP2": (
        Job("moe", {"routing": "loss_free", "bias_rate": 0.05}, num_batches=5), 4, [None, "random"], None
    ),
    "nothing-PP2xDP2": (Job("moe", {"capacity_factor": 0.0}, num_batches=3), 4, [None, "random"], None),
    "fastermoe-PP2xDP2": (Job("moe", {"top_k": 1}, num_batches=5), 4, ["static", "fastermoe", "pro_prophet"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly(JOBS, ["adamw-DP2", "zero1-PP2xDP2"]))
def test_the_bits_are_the_same_wherever_experts_are_computed(name: str) -> None:
    """Losses, weights and optimizer state; the reference is the first placement, with layers that stay."""
    job, ranks, placements, way = JOBS[name]
    moved = run_ranks(train_placed, ranks, job, placements, True, way, timeout_s=300)
    (still,) = run_ranks(train_placed, ranks, job, placements[:1], False, timeout_s=300)[0]
    for rank, found in enumerate(moved):
        for placement, seen in zip(placements, found, strict=True):
            assert seen.losses == still.losses, f"rank {rank}, {placement}"
            assert seen.layers == still.layers, f"rank {rank}, {placement}"


def train_checkpointed(_rank: int, job: Job, placements: Sequence[Placement]) -> list[Seen]:
    """Train with each placement, activations checkpointed or not, by the job's configuration."""
    found = []
    for placement in placements:
        run = build_placed(job, placement)
        assert run.engine.module.activation_checkpoint_interval == job.batch.get("pipeline", {}).get(INTERVAL, 0)
        found.append(train_run(run, job, moves=True))
    return found


INTERVAL = "activation_checkpoint_interval"


@pytest.mark.parametrize(
    ("stages", "reentrant"), mostly([(n, r) for n in (1, 2) for r in (True, False)], [(2, True)])
)
def test_checkpointed_activations_have_the_same_bits(stages: int, reentrant: bool) -> None:
    """Forwards run again in the backward, rows travel again, and nothing counts twice."""
    job = Job("moe", {"dense_blocks": 2}, stages=stages, num_batches=4)
    pipeline = {INTERVAL: 1, "use_reentrant": reentrant}
    plain = run_ranks(train_checkpointed, 2 * stages, job, ["static"], timeout_s=300)[0][0]
    checkpointed = replace(job, batch={"pipeline": pipeline})
    for rank in run_ranks(train_checkpointed, 2 * stages, checkpointed, ["static", "random"], timeout_s=300):
        for seen in rank:
            assert seen.losses == plain.losses and seen.layers == plain.layers
        assert rank[0].reports == plain.reports


# -- what a run says and keeps --------------------------------------------------------------------

QUICK = Job("moe", {"num_experts": 8, "top_k": 1, "aux_weight": 0.0, "dense_blocks": 2}, num_batches=4)


def fails_sometimes(layer: int, rows: Any) -> Lanes:
    if layer == 4:
        raise ZeroDivisionError("no idea")
    return anywhere(layer, rows)


def watched(_rank: int) -> tuple[list[Any], list[Any], list[str], dict[int, str], int]:
    """Reports, what was seen, warnings, placements, bytes of experts."""
    import warnings

    run = build_placed(QUICK, "random")
    run.scenario._balancing._plan = fails_sometimes
    changes = []
    with warnings.catch_warnings(record=True) as caught, patch.object(
        type(run.engine), "expect_change", lambda _self: changes.append(1)
    ):
        warnings.simplefilter("always")
        list(run.train_window(range(4), timed=False))
    texts = [str(each.message) for each in caught if "planner" in str(each.message)]
    lanes = {layer: str(each) for layer, each in run.scenario._balancing._lanes.items()}
    held = sum(
        parameter.nbytes for layer in run.engine.local_layers().values() for name, parameter in layer.named_parameters()
        if name.endswith(("mlp.up", "mlp.down"))
    )  # fmt: skip
    return run.measured.reports, changes, texts, lanes, held


def test_what_a_run_says_and_a_planner_that_raises() -> None:
    """All ranks report the same; a layer whose planner raises stays at home, and one warning says so."""
    ranks = run_ranks(watched, 4)
    reports, changes, _, lanes, _ = ranks[0]
    assert all(rank[0] == reports and rank[1] == changes and rank[3] == lanes for rank in ranks)
    assert changes, "placements change what ranks have to do"
    assert set(lanes) == {3} and Lanes.parse(lanes[3]).num_copies
    assert [len(rank[2]) for rank in ranks] == [1, 0, 0, 0], "one warning"
    assert "the planner failed (ZeroDivisionError: no idea), so experts of layers [4]" in ranks[0][2][0]
    first, last = reports[0], reports[-1]
    assert first["copies"] == 0 and first["copied"] == "0.00 MB" and "hidden" not in first
    assert last["copies"] > 0 and last["hidden"].endswith("%") and "ms" in last["planning"]
    expert_bytes = 2 * 4 * 16 * 16 * 4
    assert last["copied"] == f"{last['copies'] * expert_bytes / 1e6:.2f} MB"
    assert first["busiest rank"] == first["busiest rank at home"]
    assert sum(rank[4] for rank in ranks) == 2 * 8 * expert_bytes, "every expert of two layers is held once"


def shrink(_rank: int, before: int | None) -> Any:
    """Go on with one stage before a batch, if at all; what those saw that stay."""
    run = build_placed(QUICK, "random")
    for batch in range(QUICK.num_batches):
        if batch == before:
            run.engine.repack(1)
        list(run.train_window([batch], timed=False))
        run.engine.eval_batch(run.data.micro_batches(9))
    return seen_of(run)


def test_fewer_stages_have_the_same_bits() -> None:
    """The groups that share experts are others then, also in evaluation."""
    everyone, survivors = run_ranks(shrink, 4, None), run_ranks(shrink, 4, 2, may_leave=range(1, 4))
    stayed = [seen for seen in survivors if seen is not None]
    assert len(stayed) == 2
    assert all(seen.losses == everyone[0].losses and seen.layers == everyone[0].layers for seen in stayed)


def save_and_go_on(_rank: int, folder: str) -> tuple[Any, Any]:
    """A whole run, and one that goes on from its middle in another cut."""
    whole = build_placed(QUICK, "random")
    list(whole.train_window([0, 1], timed=False))
    whole.save(Path(folder), "middle")
    before = dict(whole.scenario._balancing._lanes)
    list(whole.train_window([2, 3], timed=False))
    later = build_placed(QUICK, "random")
    later.engine.repartition((0, 2, 6))
    later.load(Path(folder), "middle")
    assert later.scenario._balancing._lanes == before, "placements go on"
    list(later.train_window([2, 3], timed=False))
    return seen_of(whole), seen_of(later)


def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    for whole, later in run_ranks(save_and_go_on, 4, str(tmp_path)):
        assert later == replace(whole, reports=later.reports)
        assert later.losses == whole.losses and later.reports[-1] == whole.reports[-1]

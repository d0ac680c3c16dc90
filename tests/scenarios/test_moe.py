"""Experts against a dense mixture, what is counted, and the edges."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scenarios.gpt import Block, GPTConfig, gpt_layers
from scenarios.moe import ExpertConfig, MixtureOfExperts, MoEBlock, MoEMLP
from scenarios.moe.experts import run_experts
from scenarios.moe.parallel import expert_ranges
from scenarios.moe.routing import (
    balanced,
    capacity_of,
    expert_choice,
    load_balancing_loss,
    sinkhorn,
    token_choice,
)
from scenarios.scenario import build_layers
from tests.scenarios.fakes import TINY, FakeEngine, run

MODEL = GPTConfig(depth=2, hidden=16, heads=2, seq_len=12, vocab_size=32)
SETTINGS: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1},
    "mixtral": {"top_k": 2},
    "capacity": {"top_k": 2, "capacity_factor": 0.8},
    "capacity of nothing": {"top_k": 2, "capacity_factor": 0.0},
    "loss-free": {"top_k": 2, "routing": "loss_free"},
    "S-BASE": {"top_k": 1, "routing": "s_base"},
    "expert choice": {"top_k": 2, "routing": "expert_choice"},
    "expert choice of nothing": {"routing": "expert_choice", "capacity_factor": 0.0},
    "one expert": {"num_experts": 1, "top_k": 1},
    "top-2 of 2": {"num_experts": 2, "top_k": 2},
    "fewer tokens than experts": {"num_experts": 32, "top_k": 1},
    "fewer tokens than experts, S-BASE": {"num_experts": 32, "top_k": 1, "routing": "s_base"},
}


def make(seed: int = 0, **settings: Any) -> MoEMLP:
    """Build experts whose router has opinions."""
    torch.manual_seed(seed)
    mlp = MoEMLP(MODEL, ExpertConfig(**{"num_experts": 4, **settings}))
    torch.nn.init.normal_(mlp.router.weight, std=1.0)
    return mlp


def dense_mixture(mlp: MoEMLP, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Every expert computes every token; gates of pairs that are not chosen are 0.

    Args:
        mlp: the experts.
        tokens: [T, hidden].
        chosen: which expert computes which token, [T, E] of booleans.
    """
    config = mlp.config
    logits = tokens @ mlp.router.weight.T
    gates = torch.sigmoid(logits) if config.routing == "loss_free" else torch.softmax(logits, dim=1)
    if config.routing in ("token_choice", "loss_free") and config.top_k > 1:
        bias = 0.001 * mlp.bias_steps if config.routing == "loss_free" else 0.0
        best = (gates + bias).topk(config.top_k, dim=1).indices
        wanted = torch.zeros_like(gates).scatter(1, best, 1.0)  # before the capacity
        gates = gates / (gates * wanted).sum(dim=1, keepdim=True)
    mixed = torch.zeros_like(tokens)
    for e in range(config.num_experts):
        answer = F.gelu(tokens @ mlp.up[e].T, approximate="tanh") @ mlp.down[e].T
        mixed = mixed + (gates[:, e] * chosen[:, e])[:, None] * answer
    return mixed


def chosen_pairs(mlp: MoEMLP, tokens: Tensor) -> Tensor:
    """Which expert computes which token, [T, E]."""
    with torch.no_grad():
        found = mlp.route(tokens @ mlp.router.weight.T)
    expert = torch.repeat_interleave(torch.arange(mlp.config.num_experts), found.counts)
    chosen = torch.zeros(len(tokens), mlp.config.num_experts, dtype=torch.bool)
    chosen[found.token, expert] = True
    assert int(chosen.sum()) == len(found.token), "no pair twice"
    return chosen


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_dense_mixture(name: str, training: bool) -> None:
    """Output, input gradient and every weight's gradient; an expert without a token gets a zero, not NaN."""
    mlp = make(**SETTINGS[name]).train(training)
    if mlp.config.routing == "loss_free":
        mlp.bias_steps += torch.tensor([300, 0, -300, 0], dtype=torch.int32)
    dense = copy.deepcopy(mlp)
    x = torch.randn(2, 12, 16, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    weight = torch.randn(2, 12, 16)
    y = mlp(x)
    (y * weight).sum().backward()
    chosen = chosen_pairs(dense, same.detach().flatten(0, 1))
    reference = dense_mixture(dense, same.flatten(0, 1), chosen).view_as(same)
    (reference * weight).sum().backward()
    torch.testing.assert_close(y, reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad, same.grad, atol=1e-5, rtol=1e-5)
    for (which, mine), theirs in zip(mlp.named_parameters(), dense.parameters(), strict=True):
        assert mine.grad is not None, f"{which} has no gradient: replicas would disagree on what to reduce"
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def flops(mlp: MoEMLP, x: Tensor) -> int:
    """FLOPs of the experts without the router, forward and backward."""
    assignment = mlp.route(mlp.router(x).detach())
    with FlopCounterMode(display=False) as counter:
        mlp.compute(x, assignment).sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_operations_are_those_of_the_chosen_experts(top_k: int) -> None:
    """top_k of 4 experts cost top_k / 4 of the dense mixture, to the last operation."""
    x = torch.randn(24, 16, requires_grad=True)
    mlp = make(top_k=top_k)
    with FlopCounterMode(display=False) as counter:
        gates = torch.ones(24, 4)
        sum(
            (gates[:, e, None] * F.linear(F.gelu(F.linear(x, up)), down)
             for e, (up, down) in enumerate(zip(mlp.up.unbind(0), mlp.down.unbind(0), strict=True)))
        ).sum().backward()  # fmt: skip
    assert flops(mlp, x) * 4 == top_k * counter.get_total_flops()


def test_operations_fall_with_what_is_dropped() -> None:
    """Capacity is saved work; the count is exactly that of the tokens that are left."""
    x = torch.randn(24, 16, requires_grad=True)
    found = []
    for factor in (None, 1.0, 0.5, 0.0):
        mlp = make(top_k=2, capacity_factor=factor)
        rows = len(mlp.route(mlp.router(x)).token)
        assert flops(mlp, x) == rows * 3 * 2 * 2 * 16 * 64
        found.append(rows)
    assert found[0] == 48 > found[1] > found[2] > found[3] == 0


def test_capacity_keeps_first_choices_and_early_tokens() -> None:
    """Second choices go first, then later tokens."""
    expert = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    gate = torch.arange(8.0).view(4, 2)
    found = token_choice(expert, gate, num_experts=2, capacity=2)
    assert found.token.tolist() == [1, 2, 0, 1]
    assert found.gate.tolist() == [2.0, 4.0, 0.0, 3.0]
    assert found.counts.tolist() == [2, 2] and found.wanted.tolist() == [4, 4]
    assert (int(found.num_missed), found.num_offered) == (4, 8)


@pytest.mark.parametrize(("tokens", "factor", "capacity"), [(24, 1.0, 12), (24, 0.0, 0), (25, 1.0, 13), (24, 9.0, 24)])
def test_capacity(tokens: int, factor: float, capacity: int) -> None:
    """Rounded up, and never more than there are tokens."""
    assert capacity_of(tokens, num_experts=4, top_k=2, factor=factor) == capacity


def test_a_tokens_place_does_not_depend_on_later_ones() -> None:
    """Token choice is causal even where it drops; expert choice is not."""
    torch.manual_seed(0)
    logits = torch.randn(20, 4)
    other = torch.cat((logits[:10], torch.randn(10, 4)))

    def early(scores: Tensor, routing: str) -> set[tuple[int, float]]:
        if routing == "expert_choice":
            found = expert_choice(scores.softmax(1), capacity=3)
        else:
            gate, expert = scores.softmax(1).topk(1, dim=1)
            found = token_choice(expert, gate, num_experts=4, capacity=3)
        return {(t, g) for t, g in zip(found.token.tolist(), found.gate.tolist(), strict=True) if t < 10}

    assert early(logits, "token_choice") == early(other, "token_choice")
    assert early(logits, "expert_choice") != early(other, "expert_choice")


@pytest.mark.parametrize(("tokens", "experts"), [(24, 4), (25, 4), (3, 8), (8, 1), (0, 4)])
def test_balanced_assignment(tokens: int, experts: int) -> None:
    """Equal shares, also where every token wants the same expert; the happiest tokens keep their wish."""
    capacity = -(-tokens // experts)
    same_wish = torch.zeros(tokens, experts)
    same_wish[:, 0] = 5 + torch.arange(tokens)
    for scores in (same_wish, torch.randn(tokens, experts)):
        found = balanced(scores, capacity=capacity)
        counts = torch.bincount(found, minlength=experts)
        assert int(counts.sum()) == tokens and int(counts.max(dim=0).values) <= capacity
    if tokens == 24:
        assert (balanced(same_wish, capacity=6) == 0).nonzero().flatten().tolist() == list(range(18, 24))


def test_sinkhorn_balances() -> None:
    """Rows sum to 1 and columns to T / E; the fullest expert by plan is far less full than by score."""
    torch.manual_seed(0)
    logits = torch.randn(64, 4) + torch.tensor([3.0, 0.0, 0.0, -3.0])
    plan = sinkhorn(logits, num_iterations=50)
    torch.testing.assert_close(plan.exp().sum(1), torch.ones(64))
    torch.testing.assert_close(plan.exp().sum(0), torch.full((4,), 16.0), atol=0.01, rtol=0)
    by_score, by_plan = (torch.bincount(s.argmax(1), minlength=4).max() for s in (logits, plan))
    assert int(by_score) > 40 and int(by_plan) < 26


def test_load_balancing_loss() -> None:
    """1 when balanced, the number of experts when all go to one; its gradient lowers the busy expert's share."""
    even = torch.full((8, 4), 0.25)
    assert float(load_balancing_loss(even, torch.tensor([4, 4, 4, 4]), top_k=2)) == pytest.approx(1.0)
    one = torch.eye(4)[torch.zeros(8, dtype=torch.int64)]
    assert float(load_balancing_loss(one, torch.tensor([8, 0, 0, 0]), top_k=1)) == pytest.approx(4.0)
    logits = torch.zeros(8, 4, requires_grad=True)
    load_balancing_loss(logits.softmax(1), torch.tensor([5, 1, 1, 1]), top_k=1).backward()
    assert logits.grad is not None and (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [8, 0, 0, 0], [0, 0, 0, 8], [2, 2, 2, 2]])
def test_grouped_product_equals_the_loop(counts: list[int]) -> None:
    """The kernel for CUDA, on the CPU: same answers and gradients, with empty experts."""
    mlp = make()
    results = []
    for kernel in ("loop", "grouped_mm"):
        torch.manual_seed(1)
        rows = torch.randn(8, 16, requires_grad=True)
        y = run_experts(rows, torch.tensor(counts), mlp.up, mlp.down, experts=range(4), kernel=kernel)
        y.backward(torch.randn(8, 16))
        results.append((y.detach(), rows.grad, mlp.up.grad, mlp.down.grad))
        mlp.zero_grad()
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, loop, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
def test_on_cuda_in_bf16() -> None:
    """The grouped kernel is chosen, and two runs give the same bits."""
    mlp = make(top_k=2).cuda().bfloat16()
    x = torch.randn(64, 16, device="cuda", dtype=torch.bfloat16)
    first, second = mlp(x), mlp(x)
    assert torch.equal(first, second) and first.isfinite().all()


@pytest.mark.parametrize("name", SETTINGS)
def test_training_in_a_model(name: str) -> None:
    """No NaN at any edge; every token is accounted for."""
    scenario = MixtureOfExperts(**{"num_experts": 4, **SETTINGS[name]})
    engine = FakeEngine(scenario)
    losses = run(engine, scenario, range(3))
    assert all(torch.isfinite(torch.tensor(losses)))
    report = scenario.report(engine)
    rows = report["tokens per expert"]
    assert [len(row) for row in rows] == [0, 0, scenario.num_experts, 0, scenario.num_experts, 0]
    offered = 2 * 12 * scenario.top_k
    if "capacity" in name or "nothing" in name:
        assert sum(rows[2]) < offered and report["dropped"] != "0%"
    else:
        assert sum(rows[2]) >= offered - (scenario.routing == "expert_choice") * 4
    assert report["kernel"] == "loop" and "busiest rank" not in report


def test_all_tokens_to_one_expert() -> None:
    """The others get zero gradients."""
    mlp = make(top_k=1)
    x = torch.rand(10, 16) + 0.1
    mlp.router.weight.data = torch.tensor([[0.0], [0.0], [9.0], [0.0]]).expand(4, 16).clone()
    mlp(x).sum().backward()
    load = mlp.take_load()
    assert load is not None and load.tolist() == [0, 0, 10, 0, 0, 0, 10, 0, 0, 10]
    assert mlp.up.grad is not None and [bool(g.any()) for g in mlp.up.grad] == [False, False, True, False]


def test_the_bias_makes_busy_experts_less_wanted() -> None:
    """By the sign rule, in whole steps, without a loss of its own; the skew falls."""
    scenario = MixtureOfExperts(
        num_experts=4, top_k=1, routing="loss_free", aux_weight=0.0, bias_rate=0.02, dense_blocks=1, every=3
    )
    engine = FakeEngine(scenario, lr=0.0)
    mlp = engine.layers[4].mlp
    scenario.before_batch(engine, 0)
    engine.train_batch(0)
    wanted = mlp.load[4:8].float()
    scenario.after_batch(engine, 0)
    assert mlp.bias_steps.tolist() == (wanted.mean() - wanted).sign().int().tolist()
    run(engine, scenario, range(1, 40))
    later = torch.stack([torch.tensor(_counts(scenario, engine, batch)) for batch in range(40, 50)]).sum(0)
    assert later.max() / later.float().mean() < wanted.max() / wanted.mean()
    assert mlp.bfloat16().bias_steps.dtype == torch.int32


def _counts(scenario: MixtureOfExperts, engine: FakeEngine, batch: int) -> list[int]:
    run(engine, scenario, range(batch, batch + 1))
    return list(scenario.report(engine)["tokens per expert"][4])


def test_the_loss_is_added_in_training_only() -> None:
    """The pair's second part is the weighted load-balancing loss of the blocks so far."""
    torch.manual_seed(0)
    block = MoEBlock(MODEL, ExpertConfig(num_experts=1, top_k=1, aux_weight=0.5))
    x = torch.randn(2, 12, 16)
    assert float(block((x, torch.tensor(2.0)))[1].detach()) == pytest.approx(2.5)
    assert float(block.eval()((x, torch.tensor(2.0)))[1]) == 2.0
    assert not any("_extra_loss" in module.__dict__ for module in block.modules())


def test_any_number_of_tokens() -> None:
    """A block that gets only some tokens of each sequence, and none at all."""
    mlp = make(top_k=2, capacity_factor=1.0)
    for shape in ((2, 5, 16), (7, 16), (1, 1, 16), (2, 0, 16)):
        y = mlp(torch.randn(shape))
        assert y.shape == shape and y.isfinite().all()


def test_forward_twice_for_one_backward_counts_once() -> None:
    """Activation checkpointing runs the forward first without gradients."""
    mlp = make(top_k=1)
    x = torch.randn(10, 16)
    with torch.no_grad():
        mlp(x)
    assert mlp.load is None
    mlp(x)
    assert mlp.take_load() is not None and mlp.load is None
    mlp.eval()(x)
    assert mlp.load is None


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 3), (2, 4), (1, 2)])
def test_placement(experts: int, ranks: int) -> None:
    """Each expert on one rank, in order, no rank with two more than another."""
    found = expert_ranges(experts, ranks)
    assert [e for part in found for e in part] == list(range(experts)) and len(found) == ranks
    assert max(map(len, found)) - min(map(len, found)) <= 1


def names(**settings: Any) -> list[str]:
    """List the layers by kind."""
    scenario = MixtureOfExperts(**settings)
    return ["moe" if spec.typename is MoEBlock else "" for spec in build_layers(scenario, TINY)]


def test_which_blocks_have_experts() -> None:
    """Every second, from some block on, by number and by fraction; other scenarios' blocks are left alone."""
    assert names() == ["", "", "moe", "", "moe", ""]
    assert names(every=1, dense_blocks=0.5) == names(every=1, dense_blocks=2) == ["", "", "", "moe", "moe", ""]
    assert names(every=1) == ["", "moe", "moe", "moe", "moe", ""]
    specs = gpt_layers(TINY, extra_loss=True)
    specs[1].typename = type("Other", (Block,), {})
    found = MixtureOfExperts(every=1).layers(TINY, specs)
    assert found[1] is specs[1] and found[2].typename is MoEBlock


def test_settings_without_a_meaning() -> None:
    """All problems at once."""
    with pytest.raises(ValueError, match="top_k=3 must be between 1 and num_experts=2.*aux_weight=-1.*every=0"):
        MixtureOfExperts(num_experts=2, top_k=3, aux_weight=-1, every=0)
    with pytest.raises(ValueError, match="routing='best' must be one of token_choice, loss_free.*dense_blocks=1.5"):
        MixtureOfExperts(routing="best", dense_blocks=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set top_k=1 .it is 2. and capacity_factor=null .it is 1.0"):
        MixtureOfExperts(routing="s_base", capacity_factor=1.0)
    with pytest.raises(ValueError, match="num_experts=0.*capacity_factor=-1.*bias_rate=0.*sinkhorn_iterations=0"):
        MixtureOfExperts(num_experts=0, capacity_factor=-1, bias_rate=0, sinkhorn_iterations=0)
    with pytest.raises(ValueError, match="dense_blocks=4 and scenario.every=2 leave none of the 4 plain blocks"):
        build_layers(MixtureOfExperts(dense_blocks=4), TINY)

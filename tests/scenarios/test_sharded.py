"""Experts that replicas share out: settings, weights at the start, one rank alone, the arithmetic of lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynpipe_ds import Replica
from dynpipe_ds.owning import building, owner_of
from dynpipe_ds.splitting.functions import PartialBackward
from scenarios.gpt import GPTConfig
from scenarios.moe import ExpertConfig, MixtureOfExperts, MoEMLP
from scenarios.moe.sharded.exchange import Span
from scenarios.moe.sharded.products import LaneSums, LaneWeights, mlp, multiply
from scenarios.scenario import build_layers, build_scenario
from tests.scenarios.fakes import TINY, FakeEngine, run

MODEL = GPTConfig(depth=2, hidden=16, heads=2, seq_len=12, vocab_size=32)


def make(replica: Replica | None = None, **settings: Any) -> MoEMLP:
    torch.manual_seed(0)
    with building(replica or Replica()):
        return MoEMLP(MODEL, ExpertConfig(**{"num_experts": 6, "expert_weights": "sharded", **settings}))


def test_all_replicas_together_begin_with_the_replicated_weights() -> None:
    """Each keeps its rows alone, in storage of their own, and draws what a replica with all of them draws."""
    whole, states = make(expert_weights="replicated"), [torch.get_rng_state()]
    parts = []
    for index in range(3):
        parts.append(make(Replica(index, 3)))
        states.append(torch.get_rng_state())
    for name in ("up", "down"):
        own = [getattr(part, name) for part in parts]
        assert torch.equal(torch.cat(list(own)), getattr(whole, name))
        assert all(each.untyped_storage().nbytes() * 3 == getattr(whole, name).nbytes for each in own)
        assert [owner_of(each) for each in own] == [Replica(index, 3) for index in range(3)]
    assert all(torch.equal(part.router.weight, whole.router.weight) for part in parts)
    assert all(torch.equal(state, states[0]) for state in states)


def test_one_rank_alone_has_all_experts_and_works_as_plain() -> None:
    alone, plain = make(), make(expert_weights="replicated")
    assert not alone.is_sharded and owner_of(alone.up) is None and alone.expert_weights() == {}
    x = torch.rand(2, 12, 16)
    assert torch.equal(alone(x), plain(x))
    losses = []
    for more in ({"expert_weights": "sharded", "placement": "lanes"}, {}):
        scenario = build_scenario("moe", {"every": 1, "num_experts": 4, **more})
        losses.append(run(FakeEngine(scenario), scenario, range(3)))
    assert losses[0] == losses[1]


def test_a_share_without_partners_says_so() -> None:
    with pytest.raises(RuntimeError, match="does not know who holds the others"):
        make(Replica(1, 2))(torch.rand(3, 16))


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no such weights": ({"expert_weights": "halved"}, 2, "expert_weights"),
    "no such placement": ({"expert_weights": "sharded", "placement": "best"}, 2, "placement"),
    "a placement of replicated experts": ({"placement": "lanes"}, 2, "set expert_weights=sharded"),
    "never": ({"expert_weights": "sharded", "plan_every": 0}, 2, "plan_every=0 must be at least 1"),
    "fewer copies than none": ({"expert_weights": "sharded", "max_copies": -1}, 2, "max_copies=-1 must be 0 or more"),
    "shared out, and each computes all": (
        {"expert_weights": "sharded", "expert_parallel": False}, 2, "set expert_parallel=true"
    ),
    "experts that don't divide": ({"expert_weights": "sharded", "num_experts": 6}, 4, "num_experts=6 on 4"),
    "all local with few copies": (
        {"expert_weights": "sharded", "placement": "local", "max_copies": 3}, 2, "max_copies=3"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_without_a_meaning_are_refused_at_the_start(name: str) -> None:
    settings, num_replicas, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        scenario = build_scenario("moe", {"every": 1, "num_experts": 8, **settings})
        build_layers(scenario, TINY)
        scenario.check_replicas(num_replicas)


@pytest.mark.parametrize("name", ["moe", "moe_continual"])
def test_what_is_wrong_with_a_setting_is_said_once(name: str) -> None:
    settings = {"placement": "best", "expert_weights": "halved", "plan_every": 0}
    with pytest.raises(ValueError, match="plan_every=0 must be at least 1") as caught:
        build_scenario(name, settings)
    text = str(caught.value)
    assert [text.count(f"{setting}=") for setting in settings] == [1, 1, 1], text


def test_experts_that_dont_divide_may_be_replicated_or_alone() -> None:
    MixtureOfExperts(num_experts=6).check_replicas(4)
    MixtureOfExperts(num_experts=6, expert_weights="sharded").check_replicas(1)


# -- the arithmetic ---------------------------------------------------------------------------


SPANS = [Span(0, 1, 0, 3), Span(0, 2, 3, 8), Span(2, 1, 8, 9), Span(2, 3, 9, 16)]


def lanes_apart(x: Tensor, ups: Tensor, downs: Tensor, dtype: torch.dtype) -> list[Any]:
    """What each lane is computed alone, by autograd."""
    found = []
    for _, expert, start, stop in SPANS:
        rows = x[start:stop].clone().requires_grad_()
        up, down = (nn.Parameter(stack[expert].clone()) for stack in (ups, downs))
        y = F.linear(F.gelu(F.linear(rows, up), approximate="tanh"), down)
        y.backward(torch.full_like(y, 0.5).to(dtype))
        found.append((y.detach(), rows.grad, up.grad, down.grad))
    return found


def by_products(
    rows: Tensor, up: Tensor, down: Tensor, ups: LaneWeights, downs: LaneWeights, spans: Sequence[Span]
) -> Tensor:
    """As :func:`mlp`, of one product at a time."""
    inner = multiply(rows, up, ups, spans)
    active = [F.gelu(inner[start:stop], approximate="tanh") for *_, start, stop in spans]
    return multiply(torch.cat(active), down, downs, spans)


def in_halves(y: Tensor, rows: Tensor, gradient: Tensor) -> None:
    """A backward whose gradients of weights are computed later."""
    late = PartialBackward(y.grad_fn, (1, 2))
    late.begin()
    (rows.grad,) = torch.autograd.grad(y, rows, gradient, retain_graph=True)
    assert late.compute([gradient]) == [None, None]
    late.restore()


def whole(y: Tensor, rows: Tensor, gradient: Tensor) -> None:
    """A backward in one part."""
    y.backward(gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 51])
@pytest.mark.parametrize(("compute", "backward"), [(mlp, whole), (mlp, in_halves), (by_products, whole)])
def test_a_lane_has_the_bits_that_it_has_alone(
    compute: Callable[..., Tensor], backward: Callable[..., None], dtype: torch.dtype, width: int
) -> None:
    """Whatever lies before and behind it, on odd sizes, too; sums over two micro-batches in float32."""
    torch.manual_seed(1)
    x, ups, downs = torch.randn(16, 20), torch.randn(4, width, 20), torch.randn(4, 20, width)
    x, ups, downs = x.to(dtype), ups.to(dtype), downs.to(dtype)
    own = {"up": nn.Parameter(ups[1:3].clone()), "down": nn.Parameter(downs[1:3].clone())}
    sums = {name: LaneSums(torch.float32) for name in own}
    weights = {
        name: LaneWeights(1, {0: stack[0], 3: stack[3]}, sums[name]) for name, stack in (("up", ups), ("down", downs))
    }
    for repeat in (1, 2):
        rows = x.clone().requires_grad_()
        y = compute(rows, own["up"], own["down"], weights["up"], weights["down"], SPANS)
        backward(y, rows, torch.full_like(y, 0.5))
        for (source, expert, start, stop), alone in zip(SPANS, lanes_apart(x, ups, downs, dtype), strict=True):
            assert torch.equal(y[start:stop], alone[0])
            assert torch.equal(rows.grad[start:stop], alone[1])
            for name, gradient in zip(own, alone[2:], strict=True):
                assert torch.equal(sums[name]._sums[source, expert], gradient.float() * repeat)
    assert all(parameter.grad is None for parameter in own.values()), "autograd has no part in these gradients"
    assert sums["up"].num_added == sums["down"].num_added == 2 and sums["up"].num_bytes == 4 * width * 20 * 4


@pytest.mark.parametrize("trained", ["up", "down"])
def test_weights_that_are_frozen_get_no_sums(trained: str) -> None:
    torch.manual_seed(1)
    own = {name: nn.Parameter(torch.randn(size), requires_grad=name == trained) for name, size in (
        ("up", (4, 64, 20)), ("down", (4, 20, 64)),
    )}  # fmt: skip
    sums = {name: LaneSums() for name in own}
    ups, downs = (LaneWeights(0, {}, sums[name]) for name in own)
    rows = torch.randn(16, 20)
    mlp(rows, own["up"], own["down"], ups, downs, SPANS).sum().backward()
    expected = {name: LaneSums() for name in own}
    ups, downs = (LaneWeights(0, {}, expected[name]) for name in own)
    rows.requires_grad_()
    for parameter in own.values():
        parameter.requires_grad_()
    mlp(rows, own["up"], own["down"], ups, downs, SPANS).sum().backward()
    for name in own:
        assert sums[name].num_added == (name == trained)
        for source, expert, *_ in SPANS:
            found, whole = sums[name].take((source, expert)), expected[name].take((source, expert))
            assert (found is not None and torch.equal(found, whole)) if name == trained else found is None


def test_no_lane_at_all_is_still_part_of_the_graph() -> None:
    up, down = nn.Parameter(torch.randn(2, 3, 5)), nn.Parameter(torch.randn(2, 5, 3))
    rows, weights = torch.zeros(0, 5, requires_grad=True), LaneWeights(0, {}, LaneSums())
    assert multiply(rows, up, weights, []).shape == (0, 3)
    y = mlp(rows, up, down, weights, weights, [])
    assert y.shape == (0, 5)
    y.sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, 5)

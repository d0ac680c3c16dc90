"""Pruning in one process: which weights stay, products against dense ones, work really saved, edge cases."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from dynpipe_ds import ParameterReplacement
from scenarios.gpt import Block, GPTConfig
from scenarios.pruning import CubicSchedule, Form, PrunableLinear, Pruning, make_prunable, prunable_weights
from scenarios.pruning.gathering import keep_largest_by_gathering
from scenarios.pruning.selection import keep_largest
from scenarios.scenario import build_scenario
from tests.scenarios.fakes import TINY, FakeEngine, run

CPU = torch.device("cpu")
SMALL = GPTConfig(depth=2, hidden=64, heads=2, seq_len=16)


class PruningEngine(FakeEngine):
    """A fake engine whose parameters may change their shape."""

    def replace_parameters(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Put the new ones in place; SGD has no state."""
        for replacement in replacements:
            probe = torch.ones_like(replacement.old)
            assert replacement.carry(probe).shape == replacement.parameter.shape
            setattr(replacement.owner, replacement.name, replacement.parameter)

    def weights(self) -> list[PrunableLinear]:
        """Return the prunable weights of all layers."""
        return [weight for layer in self.layers for weight in prunable_weights(layer)]


def pruning(sparsity: float, **settings: Any) -> Pruning:
    """Prune once, before the first batch."""
    return Pruning(start_batch=0, end_batch=0, final_sparsity=sparsity, **settings)


def shrink(linear: PrunableLinear, keep: Tensor) -> None:
    """Prune one layer by a mask over its units."""
    change = linear.shrink(keep)
    if change is not None:
        linear.weight = change.replacement.parameter
        change.finish()


def make_linear(out: int, inner: int, sparsity: float, *, bias: bool = True, **form: Any) -> PrunableLinear:
    """Build a layer with random weights, the smallest of which are pruned."""
    torch.manual_seed(1)
    linear = PrunableLinear(nn.Linear(inner, out, bias=bias), Form(**form))
    scores = linear.scores()
    keep = keep_largest({0: [scores]}, round((1 - sparsity) * scores.numel()), 1, None, CPU)[0][0][0]
    shrink(linear, keep)
    return linear


FORMS = {
    "masked": {"crossover": 1.0},
    "csr": {"crossover": 0.0},
    "block masked": {"structure": "block", "block_rows": 8, "crossover": 1.0},
    "block": {"structure": "block", "block_rows": 8, "crossover": 0.0},
}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_products_equal_dense_ones_with_the_same_mask(form: str, bias: bool, sparsity: float) -> None:
    linear = make_linear(24, 40, sparsity, bias=bias, **FORMS[form])
    dense, kept = linear.dense_weight().requires_grad_(), linear.kept()
    assert int(kept.sum()) == linear.num_kept() == pytest.approx((1 - sparsity) * 24 * 40, abs=24)
    assert torch.equal(dense != 0, kept)
    x, gradient = torch.randn(2, 7, 40), torch.randn(2, 7, 24)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain_bias = linear.bias.detach().clone().requires_grad_() if bias else None
    y, expected = linear(ours), F.linear(theirs, dense, plain_bias)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    y.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    seen = copy.deepcopy(linear)
    seen.weight = nn.Parameter(linear.weight.grad)
    torch.testing.assert_close(seen.dense_weight(), dense.grad * kept, atol=1e-5, rtol=1e-5)
    if bias:
        torch.testing.assert_close(linear.bias.grad, plain_bias.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("structure", ["unstructured", "block"])
@pytest.mark.parametrize("crossover", [0.0, 0.8])
def test_a_block_equals_a_dense_block_with_the_same_mask(structure: str, crossover: float) -> None:
    """Through attention, GELU and residuals, where layouts of memory differ."""
    torch.manual_seed(0)
    block = Block(SMALL)
    dense = copy.deepcopy(block)
    make_prunable(block, Form(structure, crossover, 16))
    for weight, name in zip(prunable_weights(block), ("qkv", "out", "up", "down"), strict=True):
        scores = weight.scores()
        shrink(weight, keep_largest({0: [scores]}, scores.numel() // 10, 1, None, CPU)[0][0][0])
        plain = getattr(dense.attention if name in ("qkv", "out") else dense.mlp, name)
        plain.weight.data.copy_(weight.dense_weight())
    x = torch.randn(2, 16, 64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = block(ours), dense(theirs)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(block.norm1.weight.grad, dense.norm1.weight.grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_close_to_float32() -> None:
    linear = make_linear(24, 40, 0.9, crossover=0.0)
    half = copy.deepcopy(linear).bfloat16()
    x = torch.randn(3, 40)
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), linear(x), atol=0.02, rtol=0.02)
    y.sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16


# Which weights stay.


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.79, 0.9, 1.0])
def test_the_mask_is_that_of_torch_on_the_whole_model(sparsity: float) -> None:
    scenario = pruning(sparsity)
    engine = PruningEngine(scenario)
    plain = [nn.Linear(w.in_features, w.out_features) for w in engine.weights()]
    for linear, weight in zip(plain, engine.weights(), strict=True):
        linear.weight.data.copy_(weight.weight.detach())
    prune.global_unstructured(
        [(linear, "weight") for linear in plain], pruning_method=prune.L1Unstructured, amount=sparsity
    )
    scenario.before_batch(engine, 0)
    for linear, weight in zip(plain, engine.weights(), strict=True):
        assert torch.equal(weight.kept(), linear.weight_mask.bool())
        assert torch.equal(weight.dense_weight(), linear.weight.detach())


def brute_force(numbers: Tensor, keep: int) -> Tensor:
    """Mark the largest, the first of equal ones, by a stable sort in one place."""
    mask = torch.zeros(numbers.numel(), dtype=torch.bool)
    mask[numbers.sort(descending=True, stable=True).indices[:keep]] = True
    return mask


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "zeros", "extreme"])
def test_selection_equals_a_stable_sort(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(3000, generator=generator).abs()
    numbers = {
        "normal": numbers, "ties": (numbers * 4).round(), "equal": torch.full((3000,), 0.25),
        "zeros": torch.zeros(3000), "extreme": torch.exp(80 * (numbers - 1)),
    }[kind]  # fmt: skip
    scores = {1: [numbers[:700], numbers[700:1000]], 3: [numbers[1000:1000], numbers[1000:]]}
    for keep in (0, 1, 2, 699, 1500, 2999, 3000, 4000):
        expected = brute_force(numbers, keep)
        for masks in (keep_largest(scores, keep, 5, None, CPU)[0], keep_largest_by_gathering(scores, keep)):
            assert [[m.shape for m in parts] for parts in masks.values()] == [[(700,), (300,)], [(0,), (2000,)]]
            assert torch.equal(torch.cat([m for parts in masks.values() for m in parts]), expected)


def test_pruned_weights_stay_pruned_and_sparsity_follows_the_schedule() -> None:
    """Over several prunings with training between them, whichever form a weight has."""
    scenario = Pruning(start_batch=0, end_batch=4, every=1, crossover=0.7)
    engine = PruningEngine(scenario)
    total = sum(weight.numel for weight in engine.weights())
    before = [weight.kept() for weight in engine.weights()]
    forms = []
    for batch, sparsity in enumerate((0.0, 0.520, 0.788, 0.886, 0.9, 0.9)):
        run(engine, scenario, range(batch, batch + 1))
        kept = [weight.kept() for weight in engine.weights()]
        assert all(not (new & ~old).any() for old, new in zip(before, kept, strict=True))
        assert all(not w.dense_weight()[~k].any() for w, k in zip(engine.weights(), kept, strict=True))
        exact = scenario.schedule.sparsity(min(batch, 4))
        assert exact == pytest.approx(sparsity, abs=6e-4)
        assert sum(int(k.sum()) for k in kept) == total - round(exact * total)
        forms.append({weight.weight.dim() for weight in engine.weights()})
        before = kept
    assert {1, 2} in forms, "some weights are dense with a mask, others without zeros"


@pytest.mark.parametrize(
    ("batches", "sparsities"),
    [((2, 8, 14, 20, 26), (0.0, 0.52, 0.79, 0.89, 0.9)), ((1, 3, 7, 27, 30), (None,) * 5)],
)
def test_the_default_schedule_is_the_papers(batches: tuple[int, ...], sparsities: tuple[Any, ...]) -> None:
    schedule = Pruning().schedule
    for batch, sparsity in zip(batches, sparsities, strict=True):
        found = schedule.sparsity(batch)
        assert (None if found is None else round(found, 2)) == sparsity


# The saving is real.


@pytest.mark.parametrize(("structure", "crossover"), [("unstructured", 0.7), ("block", 0.0)])
def test_multiply_adds_fall_with_sparsity(structure: str, crossover: float) -> None:
    """Counted from the operands of every product that runs; a mask over dense work would not lower them."""
    counted = []
    for sparsity in (0.0, 0.5, 0.75, 0.9):
        scenario = pruning(sparsity, structure=structure, crossover=crossover, block_rows=4)
        engine = PruningEngine(scenario, GPTConfig(depth=2, hidden=32, heads=2, seq_len=8))
        run(engine, scenario, range(1))
        report = scenario.report(engine)
        assert len(report["multiply-adds by layer"]) == 4
        counted.append(sum(report["multiply-adds by layer"]))
    weights = 2 * 12 * 32 * 32
    assert counted[0] == 3 * weights * 2 * 8, "forward, input gradient and weight gradient of every token"
    if structure == "block":
        assert [c / counted[0] for c in counted[1:]] == pytest.approx([0.5, 0.25, 0.1], abs=0.03)
    else:
        assert counted[3] / counted[0] == pytest.approx(0.1, abs=0.05)
        assert counted[3] < counted[2] < counted[1] <= counted[0], "weights pass the crossover one by one"


def test_memory_of_weight_and_gradient_falls() -> None:
    """Nothing of the dense weight's size is left, neither as a parameter nor as a gradient."""
    linear = make_linear(64, 64, 0.9, crossover=0.8)
    linear(torch.randn(5, 64)).sum().backward()
    assert linear.weight.numel() == linear.weight.grad.numel() == 64 * 64 - round(0.9 * 64 * 64)
    assert max(buffer.numel() for buffer in linear.buffers()) < 64 * 64 / 8


def test_no_product_of_the_dense_size_runs() -> None:
    """No operation that a sparse layer calls, forward or backward, makes or reads a tensor [out, in]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[str, tuple[int, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for value in (*args, result):
                if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() >= 48 * 80:
                    seen.append((str(function), tuple(value.shape)))
            return result

    linear = make_linear(48, 80, 0.9, crossover=0.8)
    x = torch.randn(5, 80, requires_grad=True)
    with Watch():
        linear(x).sum().backward()
    assert not seen


def test_frozen_weights_are_pruned_too_and_get_no_gradient() -> None:
    scenario = pruning(0.9)
    engine = PruningEngine(scenario)
    engine.layers[1].requires_grad_(False)
    run(engine, scenario, range(2))
    for weight in prunable_weights(engine.layers[1]):
        assert not weight.weight.requires_grad and weight.num_kept() < weight.numel
    (up,) = [w for w in prunable_weights(engine.layers[1]) if w.feature_major]
    up.work.take()
    up(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert up.work.take() == 2 * 4 * up.weight.numel(), "forward and input gradient, no weight gradient"


# Edge cases.


@pytest.mark.parametrize("structure", ["unstructured", "block"])
@pytest.mark.parametrize("crossover", ["auto", "never", 0.0])
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_nothing_and_everything_pruned(sparsity: float, crossover: Any, structure: str) -> None:
    scenario = pruning(sparsity, crossover=crossover, structure=structure)
    engine = PruningEngine(scenario)
    losses = run(engine, scenario, range(3))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert scenario.report(engine)["sparsity"] == sparsity
    if crossover == "never":
        assert scenario.report(engine)["small weights"] == "0 of 16"


def test_one_block_and_one_weight_without_a_non_zero() -> None:
    scenario = pruning(0.5)
    engine = PruningEngine(scenario, GPTConfig(depth=1, hidden=16, heads=2, seq_len=12, vocab_size=32))
    engine.weights()[1].weight.data.mul_(1e-6)
    losses = run(engine, scenario, range(3))
    assert engine.weights()[1].weight.shape == (0,)
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("form", FORMS)
def test_saved_layers_load_into_fresh_ones(form: str) -> None:
    linear = make_linear(24, 40, 0.9, **FORMS[form])
    fresh = PrunableLinear(nn.Linear(40, 24), Form(**FORMS[form]))
    parameter = fresh.weight
    fresh.load_state_dict(copy.deepcopy(linear.state_dict()))
    assert isinstance(fresh.weight, nn.Parameter)
    assert (fresh.weight is parameter) == (linear.weight.dim() == 2), "another shape is another parameter"
    x = torch.randn(3, 40)
    assert torch.equal(fresh(x), linear(x))
    assert torch.equal(fresh.kept(), linear.kept())
    dense = PrunableLinear(nn.Linear(40, 24), Form())
    linear.load_state_dict(dense.state_dict())
    assert torch.equal(linear(x), dense(x))


def test_weights_are_drawn_as_without_pruning() -> None:
    ours, plain = PruningEngine(pruning(0.5)), FakeEngine(build_scenario("none", {}))
    for layer, dense in zip(ours.layers, plain.layers, strict=True):
        for a, b in zip(layer.parameters(), dense.parameters(), strict=True):
            assert torch.equal(a, b)


def test_depth_scaled_weights_make_sparsity_uneven() -> None:
    """Deeper blocks start smaller, so they lose more (Zhang et al. 2019, equation 7)."""
    scenario = pruning(0.9, init="depth_scaled")
    engine = PruningEngine(scenario, GPTConfig(depth=4, hidden=64, heads=2, seq_len=8))
    spread = [float(weight.weight.detach().std()) for weight in engine.weights()[::4]]
    assert spread == pytest.approx([0.02 / depth**0.5 for depth in (1, 2, 3, 4)], rel=0.03)
    scenario.before_batch(engine, 0)
    sparsities = scenario.report(engine)["sparsity by layer"][1:-1]
    assert sparsities == sorted(sparsities) and sparsities[-1] > sparsities[0] + 0.1


def test_settings_without_a_meaning_are_refused_together() -> None:
    with pytest.raises(ValueError, match="end_batch=25 must be .* end_batch=26 .*structure='2:4'.*crossover"):
        build_scenario("pruning", {"end_batch": 25, "structure": "2:4", "crossover": 1.5})
    with pytest.raises(ValueError, match="must rise within"):
        Pruning(initial_sparsity=0.95)
    assert CubicSchedule(start_batch=3, end_batch=3, every=1, initial_sparsity=0, final_sparsity=0.5).sparsity(3) == 0.5


def test_tied_models_train() -> None:
    """The tied embedding is no block, so it is not pruned."""
    from scenarios.scenario import build_layers

    specs = build_layers(pruning(0.5), GPTConfig(**{**TINY.__dict__, "tied": True}))
    assert [bool(prunable_weights(spec.build())) for spec in specs] == [False, True, True, True, True, False, False]

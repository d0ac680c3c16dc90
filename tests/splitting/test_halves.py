"""A backward in two halves gives the bits of the plain one, and runs nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds.splitting.graph import CantBeSplit
from dynpipe_ds.splitting.halves import ParameterHalf, backward_inputs
from tests.splitting.blocks import (
    BLOCKS,
    WIDTH,
    Attention,
    Frozen,
    InParts,
    Mlp,
    Own,
    Parted,
    Product,
    Recomputed,
    Refusing,
)  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    stage = BLOCKS[name]()
    assert isinstance(stage, nn.Module)
    return stage


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def forward(stage: Callable[[Tensor], Any], batch: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """An input, the outputs that get a gradient, and that; of several outputs the last one gets none."""
    torch.manual_seed(100 + batch)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    outputs = tensors_of(stage(x))
    outputs = outputs[:-1] if len(outputs) > 1 else outputs
    return x, outputs, [torch.randn(output.shape) for output in outputs]


def gradients_of(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second) and first.stride() == second.stride()


def plain(stage: nn.Module, num_batches: int) -> list[Tensor | None]:
    found = []
    for batch in range(num_batches):
        x, outputs, gradients = forward(stage, batch)
        torch.autograd.backward(outputs, gradients)
        found.append(x.grad)
    return found


def in_halves(stage: nn.Module, num_batches: int, delay: int) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    waiting: list[ParameterHalf] = []
    for batch in range(num_batches):
        x, outputs, gradients = forward(stage, batch)
        before = {name: None if g is None else g.clone() for name, g in gradients_of(stage).items()}
        waiting.append(backward_inputs(outputs, gradients, [x]))
        del outputs
        assert all(same(g, before[name]) for name, g in gradients_of(stage).items()), "the first half adds nothing up"
        found.append(x.grad)
        while len(waiting) > delay:
            waiting.pop(0).run()
    while waiting:
        waiting.pop(0).run(lambda _, settle: settle())  # as where each product is another layer's
    return found


def in_three(stage: nn.Module, num_batches: int) -> list[Tensor | None]:
    """The parameters of every other module right after the first half, and the others two batches later."""
    modules = [module for module in stage.modules() if next(module.parameters(recurse=False), None) is not None]
    prompt = frozenset(p for module in modules[::2] for p in module.parameters(recurse=False))
    found: list[Tensor | None] = []
    waiting: list[ParameterHalf] = []
    for batch in range(num_batches):
        x, outputs, gradients = forward(stage, batch)
        half = backward_inputs(outputs, gradients, [x])
        at_once = half.run(only=prompt)
        assert at_once <= prompt
        waiting.append(half)
        found.append(x.grad)
        if len(waiting) > 2:
            assert at_once.isdisjoint(waiting.pop(0).run())
    for half in waiting:
        half.run()
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_some_of_the_second_half_may_come_at_once(name: str) -> None:
    expected, stage = build(name), build(name)
    assert all(map(same, plain(expected, 4), in_three(stage, 4)))
    for parameter, gradient in gradients_of(expected).items():
        assert same(gradient, gradients_of(stage)[parameter]), parameter


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_both_halves_are_the_plain_backward(name: str, delay: int) -> None:
    expected, stage = build(name), build(name)
    assert all(map(same, plain(expected, 3), in_halves(stage, 3, delay)))
    theirs, ours = gradients_of(expected), gradients_of(stage)
    assert any(gradient is not None for gradient in theirs.values())
    for parameter, gradient in theirs.items():
        assert same(gradient, ours[parameter]), parameter
    assert [m.seen.sort() or m.seen for m in stage.modules() if hasattr(m, "seen")] == [
        m.seen.sort() or m.seen for m in expected.modules() if hasattr(m, "seen")
    ]
    assert [m.num_forwards for m in stage.modules() if isinstance(m, Recomputed)] == [
        m.num_forwards for m in expected.modules() if isinstance(m, Recomputed)
    ]


def test_a_function_runs_once() -> None:
    stage = build("function")
    Product.num_backwards = 0
    x, outputs, gradients = forward(stage, 0)
    half = backward_inputs(outputs, gradients, [x])
    assert Product.num_backwards == 2
    half.run()
    assert Product.num_backwards == 2


def test_a_function_in_parts_is_asked_for_each_gradient_once() -> None:
    stage = build("function in parts")
    InParts.asked.clear()
    x, outputs, gradients = forward(stage, 0)
    half = backward_inputs(outputs, gradients, [x])
    assert InParts.asked == [(True, False, False)] * 2
    half.run()
    assert InParts.asked[2:] == [(False, False, True), (False, True, True)]


def test_a_function_in_parts_that_can_not_be_split_is_asked_for_all() -> None:
    stage = nn.Sequential(Parted(), Own())  # the latter may fail, so nothing is let go of

    def fail(_gradient: Tensor) -> None:
        raise ValueError("not this one")

    x, outputs, gradients = forward(stage, 0)
    handle = x.register_hook(fail)
    with pytest.raises(CantBeSplit, match="not this one"):
        backward_inputs(outputs, gradients, [x])
    handle.remove()
    InParts.asked.clear()
    torch.autograd.backward(outputs, gradients)
    assert InParts.asked == [(True, True, True)]


def test_what_waits_are_the_products() -> None:
    """The first half computes norms, whose parameters are small; the second begins with the last product."""
    stage = nn.Sequential(Mlp(), Attention())
    x, outputs, gradients = forward(stage, 0)
    half = backward_inputs(outputs, gradients, [x])
    names = {parameter: name for name, parameter in stage.named_parameters()}
    begun: list[str] = []
    added = half.run(lambda parameter, _: begun.append(names[parameter].rpartition(".")[0]))
    assert begun == ["1.out", "1.qkv", "0.down", "0.up"]
    assert added == half.parameters == set(stage.parameters())


def test_what_comes_at_once_is_let_go_of() -> None:
    stage = nn.Sequential(Mlp(), Attention())
    x, outputs, gradients = forward(stage, 0)
    half = backward_inputs(outputs, gradients, [x])
    assert half.run(only=set(stage[1].parameters())) == set(stage[1].parameters())
    assert all(p.grad is not None for p in stage[1].parameters()) and all(p.grad is None for p in stage[0].parameters())
    assert half.run() == set(stage[0].parameters()), "nothing twice"


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (nn.Sequential(Mlp(), Recomputed(reentrant=True)), "reentrant activation checkpointing"),
        (nn.Sequential(Frozen(), nn.Tanh()), ""),
        (nn.LayerNorm(WIDTH), ""),
    ],
)
def test_what_can_not_be_split_can_run_whole(stage: nn.Module, reason: str) -> None:
    x, outputs, gradients = forward(stage, 0)
    with pytest.raises(CantBeSplit, match=f"^{reason}$"):
        backward_inputs(outputs, gradients, [x])
    assert all(gradient is None for gradient in gradients_of(stage).values())
    torch.autograd.backward(outputs, gradients)
    assert x.grad is not None


def test_a_function_that_refuses() -> None:
    def stage(of: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: of[1](Refusing.apply(of[0](x)))  # type: ignore[index]

    expected, split = build("mlp"), build("mlp")
    x, outputs, gradients = forward(stage(expected), 0)
    torch.autograd.backward(outputs, gradients)
    y, outputs, gradients = forward(stage(split), 0)
    with pytest.raises(CantBeSplit, match="^RuntimeError: call backward\\(\\) instead$"):
        backward_inputs(outputs, gradients, [y])
    torch.autograd.backward(outputs, gradients)
    assert same(x.grad, y.grad)
    assert all(same(gradient, gradients_of(split)[name]) for name, gradient in gradients_of(expected).items())


def test_an_error_of_the_scripts_own_is_its_own() -> None:
    """A backward that has let go of what it passed can't run again; one with functions, which may fail, can."""

    def fail(_gradient: Tensor) -> None:
        raise ValueError("not this one")

    for name, error in (("mlp", ValueError), ("function", CantBeSplit), ("checkpoint", CantBeSplit)):
        stage = build(name)
        x, outputs, gradients = forward(stage, 0)
        x.register_hook(fail)
        with pytest.raises(error, match="not this one"):
            backward_inputs(outputs, gradients, [x])
        assert all(gradient is None for gradient in gradients_of(stage).values())
        if error is CantBeSplit:
            with pytest.raises(ValueError, match="not this one"):
                torch.autograd.backward(outputs, gradients)


def test_what_is_known_of_a_graph_is_used_for_one_of_the_same_shape_only() -> None:
    """Two inputs, of which either or both want a gradient, and two outputs; layers freeze on the way."""

    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Mlp(), Mlp(), Mlp()

        def forward(self, x: Tensor, y: Tensor, *, swap: bool) -> list[Tensor]:
            found = [self.first(x) + self.last(y), self.second(x) * self.second(y)]
            return found[::-1] if swap else found

    def run(stage: TwoWays, case: int, *, split: bool) -> list[Tensor | None]:
        torch.manual_seed(case)
        stage.last.requires_grad_(case % 3 != 2)
        handed = [
            torch.randn(2, 4, WIDTH, requires_grad=case in wanting) for wanting in ((0, 1, 2, 4, 5, 6), (0, 1, 3, 6))
        ]
        outputs = stage(*handed, swap=case in (1, 5))
        gradients = [torch.randn_like(y) for y in outputs]
        wanting = [x for x in handed if x.requires_grad]
        if split:
            backward_inputs(outputs, gradients, wanting).run()
        else:
            torch.autograd.backward(outputs, gradients)
        return [x.grad for x in handed]

    torch.manual_seed(3)
    expected = TwoWays()
    stage = copy.deepcopy(expected)
    for case in (*range(7), *range(7)):
        assert all(map(same, run(expected, case, split=False), run(stage, case, split=True))), case
        assert all(same(g, gradients_of(stage)[name]) for name, g in gradients_of(expected).items()), case


@pytest.mark.exhaustive
def test_a_compiled_layer_runs_whole() -> None:
    stage = nn.Sequential(Mlp(), torch.compile(Mlp(), backend="aot_eager"))
    x, outputs, gradients = forward(stage, 0)
    with pytest.raises(CantBeSplit, match="^a compiled layer$"):
        backward_inputs(outputs, gradients, [x])


def test_an_old_torch_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynpipe_ds.splitting import halves

    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    halves._why_not_here.cache_clear()
    try:
        x, outputs, gradients = forward(Mlp(), 0)
        with pytest.raises(CantBeSplit, match=r"^torch 2\.6\.0\+cpu, older than 2\.7$"):
            backward_inputs(outputs, gradients, [x])
    finally:
        halves._why_not_here.cache_clear()

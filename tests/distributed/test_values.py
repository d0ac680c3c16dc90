"""What crosses a cut besides tensors arrives as it was; what can't is refused on every rank, or never cut."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from dynpipe_ds.schedule import Order
from tests.distributed.configs import CLIPPED
from tests.distributed.models import LENGTH, Block, Embed, Head, data
from tests.distributed.ranks import run_ranks
from tests.distributed.test_layouts import case_of, compare_with_undivided, train_each, train_undivided
from tests.distributed.test_shapes import make
from tests.matrix import mostly

# -- everything that can cross ----------------------------------------------------------------


class Pair(NamedTuple):
    """Two things with names."""

    keys: Any
    small: Any


State = dict[str, Any]


class Begin(Embed):
    """Ends every micro-batch's state with values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> State:  # type: ignore[override]
        self.calls += 1
        hidden = super().forward(tokens)
        return {
            "hidden": hidden, "mask": None, "count": self.calls, "rate": 1 / self.calls,
            "kind": "even" * (self.calls % 2),
            "rest": [torch.arange(LENGTH), (hidden, True), OrderedDict(shape=hidden.shape, dtype=hidden.dtype)],
            "pair": Pair(hidden.tanh(), (hidden.detach() * 8).to(torch.float8_e5m2)), 7: [],
        }


class Between(Block):
    """Uses all of it, and changes the containers that it gets."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        assert type(state) is dict and [*state] == ["hidden", "mask", "count", "rate", "kind", "rest", "pair", 7]
        (places, (again, is_true), both), pair = state["rest"], state["pair"]
        assert again is state["hidden"] and is_true is True and type(state["rest"]) is list and type(pair) is Pair
        assert type(both) is OrderedDict and both["shape"] == again.shape and type(both["shape"]) is torch.Size
        assert both["dtype"] is again.dtype and pair.small.dtype == torch.float8_e5m2 and state["mask"] is None
        assert type(state["count"]) is int and state["kind"] in ("", "even") and state[7] == []
        scale = state["rate"] + 0.01 * state["count"] + 0.1 * bool(state["kind"])
        small = pair.small.to(again.dtype) * 0.01 + (places * 0.001).to(again.dtype).unsqueeze(-1)
        hidden = super().forward(again) * scale + torch.tanh(pair.keys + small)
        state["count"] += 1
        state["hidden"], state["rest"][1] = hidden, (hidden, True)
        state["pair"] = pair._replace(keys=pair.keys + hidden)
        return state


class End(Head):
    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        return super().forward(state["hidden"] + state["pair"].keys)


def all_kinds() -> list[Any]:
    return [LayerSpec(Begin), *(LayerSpec(Between) for _ in range(3)), LayerSpec(End)]


class WithMask(Embed):
    """As GPT-NeoX and others have it: some of a tuple is None."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), None, torch.arange(LENGTH).expand_as(tokens), None


class Masked(Block):
    def forward(self, state: Any) -> Any:
        hidden, mask, places, cache = state
        assert mask is None and cache is None
        return super().forward(hidden) + (places * 0.01).to(hidden.dtype).unsqueeze(-1), mask, places, cache


class FirstOf(Head):
    def forward(self, state: Any) -> Tensor:
        return super().forward(state[0])


def with_none() -> list[Any]:
    return [LayerSpec(WithMask), *(LayerSpec(Masked) for _ in range(3)), LayerSpec(FirstOf)]


class WithNumber(Embed):
    """As others have it: a number and a text in a tuple, another one for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Any:
        self.calls += 1
        return super().forward(tokens), None, self.calls, "add" * (self.calls % 2)


class Numbered(Block):
    def forward(self, state: Any) -> Any:
        hidden, mask, number, how = state
        assert mask is None and type(number) is int
        hidden = super().forward(hidden) + 0.1 * number * bool(how)
        return hidden, mask, number + 1, how


def numbered() -> list[Any]:
    return [LayerSpec(WithNumber), *(LayerSpec(Numbered) for _ in range(3)), LayerSpec(FirstOf)]


class NowAndThen(Masked):
    """Makes a mask for every second micro-batch."""

    def forward(self, state: Any) -> Any:
        hidden, mask, places, cache = super().forward((state[0], None, *state[2:]))
        return hidden, (places > 2 if self.calls % 2 else None), places, cache


def now_and_then() -> list[Any]:
    return [LayerSpec(WithMask), *(LayerSpec(NowAndThen) for _ in range(3)), LayerSpec(FirstOf)]


KINDS = {
    "all": case_of(all_kinds),
    "all, zero1": case_of(all_kinds, config=CLIPPED["zero1"]),
    "all, bf16": case_of(all_kinds, config=CLIPPED["bf16"]),
    "none": case_of(with_none),
    "none, checkpointed": case_of(with_none, arguments={"activation_checkpoint_interval": 1}),
    "numbers, checkpointed": case_of(numbered, arguments={"activation_checkpoint_interval": 1}),
    "all, with dynamic_shape": case_of(all_kinds, arguments={"dynamic_shape": True}),
    "now and then, with dynamic_shape": case_of(now_and_then, arguments={"dynamic_shape": True}),
}


@pytest.mark.parametrize(
    ("name", "num_stages"),
    mostly(product(KINDS, [2, 3]), [("all", 2), ("none, checkpointed", 3)]),
)
def test_values_of_every_kind_that_can_cross(name: str, num_stages: int) -> None:
    compare_with_undivided(KINDS[name], num_stages)


def refused(_rank: int) -> None:
    engine = make(replace(case_of(now_and_then), num_stages=3, first=(0, 2, 4, 5)))
    message = (
        r"^rank 0: ValueError: what stage 0 puts out was \(tensor 0, tensor 1, tensor 2, None\) in the first "
        r"micro-batch of the batch and is \(tensor 0, None, tensor 1, None\) in a later one; .*dynamic_shape=True"
    )
    with pytest.raises(ValueError, match=message):
        engine.train_batch(data(0, 4))


def test_none_in_some_micro_batches_only_is_refused_on_every_rank() -> None:
    run_ranks(refused, 3, timeout_s=60)


def profiled(_rank: int) -> None:
    engine = make(replace(case_of(all_kinds), num_stages=1))
    engine.train_batch(data(0, 4))
    assert all(layer.backward_s > 0 for layer in engine.last_batch_profile.layers)


def test_backwards_are_told_apart_in_any_container() -> None:
    run_ranks(profiled, 1)


# -- tensors that want a gradient in some micro-batches only ----------------------------------


class Frozen(Embed):
    """Hands on which micro-batch of four it is, besides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.num_calls = 0

    def forward(self, tokens: Tensor) -> Any:
        self.num_calls += 1
        return super().forward(tokens), torch.tensor([(self.num_calls - 1) % 4])


class Skipped(Block):
    """Is skipped in some micro-batches."""

    def __init__(self, when: tuple[int, ...]) -> None:
        super().__init__()
        self.when = when

    def forward(self, state: Any) -> Any:
        hidden, number = state
        return state if int(number) in self.when else (super().forward(hidden), number)


def skipping(when: tuple[int, ...]) -> list[Any]:
    skipped = [LayerSpec(Skipped, when), LayerSpec(Skipped, when)]
    return [LayerSpec(Frozen), *skipped, LayerSpec(Skipped, ()), LayerSpec(FirstOf)]


SKIPS = {
    "first": partial(skipping, (0,)), "later": partial(skipping, (2,)), "all but one": partial(skipping, (0, 1, 3)),
    "all": partial(skipping, (0, 1, 2, 3)),
}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {}, "with dynamic_shape": {"arguments": {"dynamic_shape": True}}, "zero1": {"config": CLIPPED["zero1"]},
    "bf16": {"config": CLIPPED["bf16"]},
    # A layer whose input wants no gradient is not recomputed, and counts its calls otherwise.
    "checkpointed": {"arguments": {"activation_checkpoint_interval": 1, "dynamic_shape": True}},
}


@pytest.mark.parametrize(
    ("name", "way", "num_stages"),
    mostly(product(SKIPS, WAYS, [2, 3]), [("first", "adamw", 3), ("later", "with dynamic_shape", 2)]),
)
def test_a_layer_that_is_skipped_behind_a_frozen_prefix(name: str, way: str, num_stages: int) -> None:
    compare_with_undivided(case_of(SKIPS[name], **WAYS[way]), num_stages)


LATE = Order.parse(
    "F0 SA0 F1 SA1 F2 SA2 F3 SA3 RG0 B0 RG1 B1 RG2 B2 RG3 B3 | "
    "RA0 F0 B0 SG0 RA1 F1 B1 SG1 RA2 F2 B2 SG2 RA3 F3 B3 SG3 W0 W1 W2 W3 @ 2 1"
)
"""The last two layers add up their gradients in each ``B``, but where no input wants a gradient all wait for ``W``."""


def run_late(engine: Any, _batch: int) -> None:
    ordering = engine.dynamic.balancer.ordering
    ordering.is_due = lambda: False
    ordering.adopt(LATE, engine.partition)


def test_some_backwards_are_split_and_others_wait_as_a_whole() -> None:
    """Gradients are added up in the order of micro-batches all the same."""
    undivided = case_of(SKIPS["all but one"])
    whole = train_undivided(undivided)
    case = replace(undivided, num_stages=2, first=(0, 2, 5), before_batch=run_late)
    outcomes = [rank[0] for rank in run_ranks(train_each, 2, [case])]
    assert outcomes[0].losses == whole.losses
    assert {k: v for o in outcomes for k, v in o.digest.items()} == whole.digest

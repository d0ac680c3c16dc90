"""Values that can't be sent to another stage: seen before a cut, or refused on every rank at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from tests.distributed.configs import ADAMW, BY_HAND, CLIPPED
from tests.distributed.models import Block, Embed, Head, data, digest
from tests.distributed.ranks import run_ranks
from tests.distributed.test_shapes import Case, make
from tests.matrix import mostly

REMEDY = r".*let it return what can: tensors, None, numbers and texts, in tuples, lists and dicts, are sent"


class Cache:
    """An object that only its own process knows."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Wrap(Block):
    """Returns an object from a given call on, until another; in evaluation always."""

    def __init__(self, first: int = 0, last: int = 10**9) -> None:
        super().__init__()
        self.first, self.last, self.num_calls = first, last, 0

    def forward(self, x: Tensor) -> Any:
        hidden, self.num_calls = super().forward(x), self.num_calls + 1
        wraps = self.first < self.num_calls <= self.last or not self.training
        return [hidden, Cache(hidden)] if wraps else hidden


class Unwrap(Block):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x[1].hidden if isinstance(x, list) else x)


def layers(*when: int) -> list[Any]:
    inside = [LayerSpec(Block), LayerSpec(Wrap, *when), LayerSpec(Unwrap), LayerSpec(Block), LayerSpec(Unwrap)]
    return [LayerSpec(Embed), *inside, LayerSpec(Head)]


def case_of(num_stages: int, first: tuple[int, ...], *when: int, **kwargs: Any) -> Case:
    return Case(lambda: layers(*when), num_stages, first, {}, **kwargs)


def micro_batches(engine: Any) -> Iterator[Any]:
    return data(engine.grid.get_data_parallel_id(), 4)


# -- seen while both layers are on one stage --------------------------------------------------

SEEN = (
    r"^the partition \(0, 1, 3, 7\) cuts at 3, but layer 2 \(Wrap\) returns a value of type "
    r"tests\.distributed\.test_obstacles\.Cache \(at \[1\]\), which can't be sent to another stage; choose another cut,"
)


def seen_and_refused(_rank: int) -> None:
    engine = make(case_of(3, (0, 1, 5, 7)))
    batches = micro_batches(engine)
    assert engine.dynamic.balancer.pinned == ()
    engine.train_batch(batches)
    for first in ((0, 1, 5, 7), (0, 2, 4, 7)):  # the layer is on another rank then, which has not seen it yet
        engine.repartition(first)
        before = digest(engine)
        with pytest.raises(ValueError, match=SEEN + REMEDY):
            engine.repartition((0, 1, 3, 7))
        assert engine.partition == first and digest(engine) == before
    engine.train_batch(batches)
    assert engine.dynamic.balancer.pinned == (3,)


def test_repartition_refuses_what_was_seen() -> None:
    run_ranks(seen_and_refused, 3)


def halves() -> list[Any]:
    """The two halves have as many parameters; the object would have to cross between them."""
    return [*layers()[:5], LayerSpec(Head)]


def balanced_in_every_batch(_rank: int, *first: int) -> list[tuple[float, tuple[int, ...]]]:
    section = {"enabled": True, "rebalance_every": 1, "cost": "parameters", "partitioner": "optimal", "min_gain": 0.0}
    engine = make(Case(halves, len(first) - 1, first, {}, config={**ADAMW, "dynamic_pipeline": section}))
    batches = micro_batches(engine)
    return [(float(engine.train_batch(batches)), engine.partition) for _ in range(4)]


def test_the_automatic_mode_never_cuts_there() -> None:
    first, second = run_ranks(balanced_in_every_batch, 2, 0, 1, 6)
    whole = run_ranks(balanced_in_every_batch, 1, 0, 6)[0]
    assert first == second and [loss for loss, _ in first] == [loss for loss, _ in whole]
    assert [partition for _, partition in first][2:] == [(0, 4, 6)] * 2, "the best one would be (0, 3, 6)"


# -- shown at the cut -------------------------------------------------------------------------

AT_CUT = (
    r"^rank {rank}: ValueError: layer 2 \(Wrap\) returns a value of type tests\.distributed\.test_obstacles\.Cache "
    r"\(at \[1\]\), which can't be sent from stage {stage} to the next; keep layers 2 and 3 on one stage \(pin=\[3\]\),"
)
"""For a layer in front of a cut, where nobody could know it before."""

CASES: dict[str, Case] = {
    "from the beginning": case_of(3, (0, 1, 3, 7)),
    "in a later micro-batch": case_of(3, (0, 1, 3, 7), 2, 3),
    "in a later batch": case_of(3, (0, 1, 3, 7), 4),
    "in front of the last stage": case_of(2, (0, 3, 7)),
    "in some micro-batches, with dynamic_shape": case_of(3, (0, 1, 3, 7), 1, 3, arguments={"dynamic_shape": True}),
    "behind a stage without layers": replace(
        case_of(3, (0, 1, 3, 7)), moves={0: (0, 3, 3, 7)},
        config={**ADAMW, "dynamic_pipeline": {**BY_HAND, "allow_empty_stages": True}},
    ),
}
WITH = {
    f"{name}, {config}": replace(CASES[name], config=CLIPPED[config])
    for name in ("from the beginning", "in some micro-batches, with dynamic_shape") for config in ("zero1", "bf16")
}


def forget_calls(engine: Any) -> None:
    for layer in engine.local_layers().values():
        if isinstance(layer, Block):
            layer.calls.zero_()
        if isinstance(layer, Wrap):
            layer.num_calls = 0


def refused_and_trained_on(_rank: int, name: str) -> None:
    case = {**CASES, **WITH}[name]
    engine, other = make(case), make(case)
    for each in (engine, other):
        each.repartition(case.moves.get(0, case.first))
    batches, the_same = micro_batches(engine), micro_batches(other)
    if name == "in a later batch":
        assert float(engine.train_batch(batches)) == float(other.train_batch(the_same))
    before = [parameter.clone() for parameter in engine.module.parameters()]
    stage = engine.module.stage_owner(2)
    with pytest.raises(ValueError, match=AT_CUT.format(rank=stage, stage=stage) + REMEDY):
        engine.train_batch(batches)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    # Cut elsewhere it goes on as if the refused batch had not been there.
    for _ in range(4):
        next(the_same)
    for each in (engine, other):
        forget_calls(each)
        each.repartition((0, 1, 5, 7) if case.num_stages == 3 else (0, 4, 7))
    for _ in range(2):
        assert float(engine.train_batch(batches)) == float(other.train_batch(the_same))
    assert digest(engine) == digest(other)


@pytest.mark.parametrize("name", mostly([*CASES, *WITH], ["from the beginning", "in a later micro-batch"]))
def test_a_cut_there_is_refused_on_every_rank(name: str) -> None:
    run_ranks(refused_and_trained_on, {**CASES, **WITH}[name].num_stages, name, timeout_s=60)


def one_replica(_rank: int, config: str) -> None:
    """The other replica's ranks hold gradients that these lack."""
    engine = make(replace(CASES["in front of the last stage"], config=CLIPPED[config]))
    batches = micro_batches(engine)
    for layer in engine.local_layers().values():
        if isinstance(layer, Wrap) and engine.grid.get_data_parallel_id() == 0:
            layer.first = 10**9
    with pytest.raises(ValueError, match=AT_CUT.format(rank=1, stage=0) + REMEDY):
        engine.train_batch(batches)


@pytest.mark.parametrize("config", mostly(CLIPPED, ["bf16"]))
def test_one_replica_alone_has_such_a_value(config: str) -> None:
    run_ranks(one_replica, 4, config, timeout_s=60)


def evaluated(_rank: int) -> None:
    engine = make(case_of(2, (0, 3, 7), 10**9))
    batches = micro_batches(engine)
    loss = float(engine.train_batch(batches))
    with pytest.raises(ValueError, match=AT_CUT.format(rank=0, stage=0) + REMEDY):
        engine.eval_batch(data(9, 4))
    assert float(engine.train_batch()) != loss, "the training data are those of before"
    engine.repartition((0, 4, 7))
    assert float(engine.eval_batch(data(9, 4))) > 0


def test_evaluation_is_refused_on_every_rank() -> None:
    run_ranks(evaluated, 2, timeout_s=60)

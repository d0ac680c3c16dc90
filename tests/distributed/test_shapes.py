"""What users put into a pipeline: tuples, changing lengths, live modules, subclasses, pins.

Each is trained twice in the same world, static and with moves; both must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, BY_HAND, CLIP, EVEN, MOVES, ZERO
from tests.distributed.models import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Block,
    Embed,
    Head,
    Run,
    base_config,
    data,
    digest,
    double,
    loss_fn,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import sleep, tell_time

Moves = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; its functions are found by name on every rank."""

    layers: Callable[[], list[Any]]
    num_stages: int
    first: tuple[int, ...]
    moves: Moves
    config: dict[str, Any] = field(default_factory=lambda: {**ADAMW, **CLIP})
    module_class: type = DynamicPipelineModule
    arguments: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[], Iterator[Any]] | None = None
    prepare: Callable[[Any], None] | None = None  # between construction and initialize
    before_batch: Callable[[Any, int], None] | None = None
    num_batches: int = 7


@dataclass
class Outcome:
    losses: list[float]
    digest: dict[str, str]


def make(case: Case) -> Any:
    torch.manual_seed(7)
    module = case.module_class(
        case.layers(), num_stages=case.num_stages, loss_fn=loss_fn, seed_layers=True,
        **{"partition_method": list(case.first), **case.arguments},
    )
    if case.prepare is not None:
        case.prepare(module)
    config = base_config(Run(num_stages=case.num_stages, config=case.config), 1)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


def batches_of(case: Case) -> Iterator[Any]:
    return data(0, 4) if case.batches is None else case.batches()


def train(case: Case, moves: Moves) -> Outcome:
    engine, batches, losses = make(case), batches_of(case), []
    for batch in range(case.num_batches):
        if batch in moves:
            engine.repartition(moves[batch])
        if case.before_batch is not None:
            case.before_batch(engine, batch)
        losses.append(float(engine.train_batch(batches)))
    return Outcome(losses, digest(engine))


def static_and_moved(_rank: int, cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    return [(train(case, {}), train(case, case.moves)) for case in cases]


def compare(*cases: Case) -> list[list[float]]:
    """Train each case both ways, all in one world; gives back the losses."""
    by_rank = run_ranks(static_and_moved, cases[0].num_stages, list(cases))
    for i, case in enumerate(cases):
        static, moved = ([rank[i][way] for rank in by_rank] for way in range(2))
        assert static[0].losses == moved[0].losses and all(loss == loss for loss in static[0].losses)
        whole = [{k: v for o in outcomes for k, v in o.digest.items()} for outcomes in (static, moved)]
        assert whole[0] == whole[1] and len(whole[0]) >= case.num_stages
    return [outcomes[0].losses for outcomes in by_rank[0]]


# -- tuples of floats, ints and bools ---------------------------------------------------------

State = tuple[Tensor, Tensor, Tensor, Tensor]


class Begin(Embed):
    def forward(self, tokens: Tensor) -> State:  # type: ignore[override]
        hidden = super().forward(tokens)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return hidden, positions, tokens > 4, hidden * 0.5


class Mix(nn.Module):
    """Uses and changes everything it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: State) -> State:
        hidden, positions, mask, residual = state
        update = torch.tanh(self.linear(hidden + self.places(positions))) * mask.unsqueeze(-1)
        return hidden + update, (positions + 1) % LENGTH, ~mask, residual + update * 0.1


class End(Head):
    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        hidden, positions, mask, residual = state
        places = (positions.unsqueeze(-1) * 0.01).to(hidden.dtype)
        return super().forward(hidden + residual * mask.unsqueeze(-1) + places)


class GPT2ModelPipe(DynamicPipelineModule):
    """DeepSpeed knows this class by its name and expects an attention mask last in its tuples."""


def tuple_layers() -> list[Any]:
    return [LayerSpec(Begin), *(LayerSpec(Mix) for _ in range(6)), LayerSpec(End)]


TUPLES = {
    2: Case(tuple_layers, 2, (0, 4, 8), MOVES[2]),
    3: Case(tuple_layers, 3, EVEN[3], MOVES[3], module_class=GPT2ModelPipe),
    4: Case(tuple_layers, 4, (0, 2, 4, 6, 8), MOVES[4]),
}


def test_tuples_on_two_stages_and_under_checkpointing() -> None:
    plain = TUPLES[2]
    checkpointed = replace(plain, arguments={"activation_checkpoint_interval": 1})
    losses = compare(plain, checkpointed)
    assert losses[0] == losses[1]


def test_tuples_on_three_stages_of_a_class_that_deepspeed_knows_by_name() -> None:
    compare(TUPLES[3], replace(TUPLES[3], config={**ADAMW, **BF16_FP32_SUMS, **CLIP}))


@pytest.mark.exhaustive
def test_tuples_on_four_stages() -> None:
    compare(TUPLES[4])


# -- lengths that change ----------------------------------------------------------------------


def plain_layers() -> list[Any]:
    return [LayerSpec(Embed), *(LayerSpec(Block, 16 + 16 * (i % 3)) for i in range(6)), LayerSpec(Head)]


def changing_lengths() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for length in cycle([6, 2, 5, 1, 7, 3, 4]):
        tokens = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def test_lengths_that_change_from_micro_batch_to_micro_batch() -> None:
    case = Case(
        plain_layers, 3, EVEN[3], MOVES[3], arguments={"dynamic_shape": True}, batches=changing_lengths
    )
    compare(case)


def resize(engine: Any, batch: int) -> None:
    sizes = {2: 4, 3: 12, 5: 2}  # micro-batches of 2, so 2, 6 and 1 of them; DeepSpeed's default here is 4
    if batch in sizes:
        engine.set_train_batch_size(sizes[batch])


def test_batch_size_that_changes() -> None:
    case = Case(plain_layers, 3, EVEN[3], MOVES[3], before_batch=resize)
    compare(case, *(replace(case, config={**ADAMW, **CLIP, **zero}) for zero in (ZERO, BF16_FP32_SUMS)))


def test_a_move_before_the_first_batch() -> None:
    """There is no optimizer state yet."""
    case = Case(plain_layers, 3, EVEN[3], {0: (0, 1, 2, 8), 1: (0, 2, 7, 8)}, num_batches=3)
    compare(case, *(replace(case, config={**ADAMW, **CLIP, **zero}) for zero in (ZERO, BF16_FP32_SUMS)))


# -- evaluation -------------------------------------------------------------------------------


def short() -> Iterator[Any]:
    """Sequences of another length than those that are trained."""
    return ((x[:, :3].contiguous(), y[:, :3].contiguous()) for x, y in data(9, 4))


def train_and_evaluate(case: Case, moves: Moves, evaluate: bool) -> tuple[list[float], list[float]]:
    engine, batches, losses, evaluated = make(case), batches_of(case), [], []
    for batch in range(case.num_batches):
        if evaluate:
            evaluated.append(float(engine.eval_batch(short())))
        if batch in moves:
            engine.repartition(moves[batch])
        if evaluate:
            evaluated.append(float(engine.eval_batch(data(9, 4), num_micro_batches=2)))
        losses.append(float(engine.train_batch(batches)))
    return losses, evaluated


def evaluation(_rank: int, case: Case) -> None:
    static = train_and_evaluate(case, {}, True)
    assert train_and_evaluate(case, case.moves, True) == static
    assert train_and_evaluate(case, {}, False)[0] == static[0]
    assert len(set(static[1])) == len(static[1]) == 2 * case.num_batches


def test_evaluation_before_and_after_a_move() -> None:
    run_ranks(evaluation, 3, replace(TUPLES[3], num_batches=5))


# -- subclasses and empty stages --------------------------------------------------------------


class Mine(DynamicPipelineModule):
    """A user's class with a partition of its own."""

    def _partition_layers(self, method: Any = "uniform") -> None:
        self.parts = [0, 1, 2, self._num_layers]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def is_mine(engine: Any, batch: int) -> None:
    assert type(engine.module).__name__ == "Mine"
    assert batch or engine.partition == (0, 1, 2, 8)


def test_a_subclass_with_its_own_partition_and_stages_without_layers() -> None:
    mine = Case(
        plain_layers, 3, EVEN[3], MOVES[3], module_class=Mine, before_batch=is_mine,
        arguments={"partition_method": "uniform"},
    )
    section = {**BY_HAND, "allow_empty_stages": True}
    empty = Case(
        plain_layers, 3, EVEN[3],
        {1: (0, 0, 4, 8), 2: (0, 8, 8, 8), 3: (0, 0, 8, 8), 4: (0, 2, 2, 8), 5: (0, 3, 8, 8), 6: (0, 0, 0, 8)},
        config={**ADAMW, **CLIP, "dynamic_pipeline": section},
    )
    compare(mine, empty, replace(empty, config={**empty.config, **BF16_FP32_SUMS}))


# -- modules that were changed after they were built ------------------------------------------


class Transposed(nn.Module):
    """A fixed projection whose layout is not the usual one; kernels round differently for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("up", torch.randn(33, HIDDEN).t() * 0.1)
        self.down = nn.Parameter(torch.randn(33, HIDDEN) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.up.stride() == (1, HIDDEN)
        return x + torch.tanh(x @ self.up.to(x.dtype)) @ self.down


class Adapter(nn.Module):
    """A frozen linear layer with a small trained addition, as PEFT makes them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def halve(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def live_layers() -> list[Any]:
    return [
        Embed().requires_grad_(False), LayerSpec(Block), Block(48), double, Transposed(), Block(32),
        LayerSpec(Block, 16), LayerSpec(Head),
    ]


def adapt(module: Any) -> None:
    """Wrap and mark this rank's blocks, alike whatever the cut."""
    for layer, function in zip(module.local_indices(), module.forward_funcs, strict=True):
        if isinstance(function, Block):
            torch.manual_seed(100 + layer)
            function.up = Adapter(function.up)
            function.register_forward_hook(halve)
            function.note = f"layer {layer}"
        if isinstance(function, nn.Module):
            for name, parameter in function.named_parameters():
                parameter.original_name = f"{layer}.{name}"  # type: ignore[attr-defined]


def as_adapted(engine: Any, _batch: int) -> None:
    for layer, module in engine.local_layers().items():
        assert all(p.original_name == f"{layer}.{name}" for name, p in module.named_parameters())
        if isinstance(module, Block):
            assert module.note == f"layer {layer}" and len(module._forward_hooks) == 1
            assert [p.requires_grad for p in module.up.parameters()] == [True, True, False, False]
    held = {i for i, spec in enumerate(engine.module._layer_specs) if isinstance(spec, nn.Module)}
    first = range(3 * engine.stage_id, min(3 * engine.stage_id + 3, 8))
    assert held & set(first) <= set(engine.module.local_indices()), "a layer that left is kept alive"


def test_modules_that_were_changed_after_they_were_built() -> None:
    case = Case(live_layers, 3, EVEN[3], MOVES[3], prepare=adapt, before_batch=as_adapted)
    compare(case, replace(case, config={**ADAMW, **CLIP, **BF16_FP32_SUMS}))


# -- pins -------------------------------------------------------------------------------------


class Slow(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.seconds)
        return super().forward(x)


SLOW_S = 1.0
STASH: dict[str, Tensor] = {}


def stash(x: Tensor) -> Tensor:
    sleep(SLOW_S)
    STASH["x"] = x
    return x * 2


def add_stashed(x: Tensor) -> Tensor:
    sleep(SLOW_S)
    return x + STASH.pop("x")


def slow_layers() -> list[Any]:
    """Balanced by a cut at 4 only, between the two function layers."""
    slow = [LayerSpec(Slow, SLOW_S) for _ in range(4)]
    return [LayerSpec(Embed), *slow[:2], stash, add_stashed, *slow[2:], LayerSpec(Head)]


def pinned(_rank: int) -> None:
    section = {**BY_HAND, "pinned_cuts": [6]}
    case = Case(
        slow_layers, 2, (0, 2, 8), {}, arguments={"pin": [4], "partition_method": "optimal:time"},
        config={**ADAMW, "dynamic_pipeline": section},
    )
    tell_time()
    engine, batches = make(case), data(0, 4)
    assert engine.partition[1] not in (4, 6)
    for cut in (4, 6):
        with pytest.raises(ValueError, match=rf"cut at {cut}, between layers {cut - 1} and {cut}"):
            engine.repartition((0, cut, 8))
    for cut in (1, 7):
        engine.repartition((0, cut, 8))
        engine.train_batch(batches)
        engine.rebalance()
        assert engine.partition in ((0, 3, 8), (0, 5, 8))
        engine.train_batch(batches)
    with pytest.raises(ValueError, match=r"cut at 4, between layers 3 and 4"):
        make(replace(case, arguments={"pin": [4], "partition_method": [0, 4, 8]}))


def test_pinned_cuts_are_respected_and_refused() -> None:
    run_ranks(pinned, 2)

"""Layers that ``torch.compile`` has compiled, in each way that there is, and how they are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds.migration.compiled import compiled_parts
from tests.distributed.configs import ADAMW, UNCLIPPED
from tests.distributed.models import HIDDEN, Block, Embed, Head, as_head, double
from tests.distributed.test_shapes import Case, Moves, Outcome, train

BACKEND = "aot_eager"
compiled = torch.compile(backend=BACKEND)


class CompiledSpec(LayerSpec):  # type: ignore[misc]
    """Builds what it says, compiled."""

    def build(self, log: bool = False) -> nn.Module:
        return compiled(super().build(log))


class Holding(nn.Module):
    """Has a compiled module inside; without a backend, by one that has no name."""

    def __init__(self, backend: Any = BACKEND) -> None:
        super().__init__()
        self.block = torch.compile(Block(dropout=0.1), backend=backend or (lambda graph, _: graph))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def squash(x: Tensor) -> Tensor:
    return torch.tanh(x) * 1.5


@compiled
def bend(x: Tensor) -> Tensor:
    return torch.sin(x) + x


class Calling(nn.Module):
    """Calls compiled functions: one that it holds, and one of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.function = compiled(squash)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(bend(self.linear(x)))


class ByMethod(Block):
    """Its own forward is compiled, on the object."""

    def __init__(self) -> None:
        super().__init__(48)
        self.forward = compiled(self.forward)  # type: ignore[method-assign]


class InPlace(Block):
    def __init__(self) -> None:
        super().__init__(24, dropout=0.1)
        self.compile(backend=BACKEND)


def layers_of_all_kinds() -> list[Any]:
    """One layer of each way to compile."""
    return [
        LayerSpec(Embed), CompiledSpec(Block, 32), LayerSpec(Holding), LayerSpec(Calling), LayerSpec(ByMethod),
        LayerSpec(InPlace), compiled(Block(40)), LayerSpec(Head),
    ]  # fmt: skip


def usual_layers() -> list[Any]:
    """Modules, functions and tied layers, which ``engine.compile()`` compiles all."""
    return [
        TiedLayerSpec("embed", Embed, tied_weight_attr="weight"), double, LayerSpec(Block, 16, 0.1), squash,
        LayerSpec(Block, 32, 0.1), LayerSpec(Block, 16), LayerSpec(Block, 24),
        TiedLayerSpec("embed", Embed, forward_fn=as_head, tied_weight_attr="weight"),
    ]  # fmt: skip


def compile_engine(engine: Any, batch: int) -> None:
    if batch == 0:
        engine.compile(backend=BACKEND)


MOVES_OF_TWO: Moves = {1: (0, 1, 8), 2: (0, 7, 8), 4: (0, 3, 8)}
KINDS = Case(layers_of_all_kinds, 2, (0, 4, 8), MOVES_OF_TWO, num_batches=5)
BY_ENGINE = Case(
    usual_layers, 2, (0, 4, 8), MOVES_OF_TWO, config={**ADAMW, **UNCLIPPED}, before_batch=compile_engine, num_batches=5
)


def num_compiled(engine: Any) -> dict[int, int]:
    """How many compiled parts each layer of this rank has, ``module.compile()`` included."""
    return {i: sum(1 for _ in compiled_parts(layer)) for i, layer in engine.local_layers().items()}


def num_graphs() -> int:
    """How many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def train_watched(case: Case, moves: Moves) -> tuple[Outcome, list[dict[int, int]], list[int]]:
    """Train; give back the outcome, what is compiled of each layer before every batch, and graphs after it."""
    parts: list[dict[int, int]] = []
    graphs: list[int] = []
    own: Callable[[Any, int], None] = case.before_batch or (lambda *_: None)

    def before_batch(engine: Any, batch: int) -> None:
        graphs.append(num_graphs())
        own(engine, batch)
        parts.append(num_compiled(engine))

    outcome = train(replace(case, before_batch=before_batch), moves)
    return outcome, parts, [*graphs[1:], num_graphs()]


@contextlib.contextmanager
def recompile_limit(limit: int) -> Any:
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


